// Reports of faults: what they say, and which handlers get the signals.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_report.h"
#include "base/process.h"
#include "base/thread.h"
#include "cpp/host_fixture.h"

namespace vtensor::faults {
namespace {

constexpr std::size_t kBytes = 4 * 4096;

class Named final : public Range {
 public:
  explicit Named(std::size_t number) : number_(number) {}
  ~Named() override { number_ = 0; }
  void name(Text& text, std::uintptr_t at) const noexcept override {
    text << "byte " << at - base() << " of number " << number_;
  }
  void explain(Text& text, std::uintptr_t) const noexcept override { text << "map it"; }

 private:
  std::size_t number_;
};

char* reserve() {
  void* const at = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

Known know_as(std::size_t number, const char* at, bool on_device = false) {
  return know(std::make_unique<Named>(number), reinterpret_cast<std::uintptr_t>(at), kBytes,
              on_device);
}

volatile char* poke_at = nullptr;
void poke() { *poke_at = 1; }

// What is said in a child that runs `body` and then stores at `poke_at`, an address of a known
// range. The child must end with that status.
template <typename Body>
std::string said(int status, Body body, bool on_device = false) {
  std::array<int, 2> ends;
  REQUIRE(pipe(ends.data()) == 0);
  char* const at = reserve();
  REQUIRE(at != nullptr);
  const int ended = in_child([&] {
    alarm(30);  // a handler that goes round ends too
    const Known known = know_as(7, at, on_device);
    poke_at = at + 5000;
    body(ends[1]);
    poke();
    return 0;
  });
  munmap(at, kBytes);
  close(ends[1]);
  std::string text;
  std::array<char, 4096> part;
  for (ssize_t n; (n = read(ends[0], part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<std::size_t>(n));
  close(ends[0]);
  CHECK_MESSAGE(ended == status, text);
  return text;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

constexpr const char* kReport = "byte 5000 of number 7\nvtensor: map it\n";

using Action = struct sigaction;

Action action_of(void (*handler)(int, siginfo_t*, void*), int flags = 0) {
  Action action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  return action;
}

void handle(void (*handler)(int, siginfo_t*, void*), int flags = 0, Action* before = nullptr) {
  const Action action = action_of(handler, flags);
  sigaction(SIGSEGV, &action, before);
}

// Another library's handler. It ends the process with 40 if it was handed the fault itself.
void exit_40(int, siginfo_t* info, void*) {
  _exit(info->si_code > 0 && info->si_addr == const_cast<char*>(poke_at) ? 40 : 41);
}

Action theirs_before = {};
void call_before(int number, siginfo_t* info, void* context) {
  theirs_before.sa_sigaction(number, info, context);
}
void exit_42(int) { _exit(42); }

}  // namespace

TEST_CASE("other faults, raised signals and what is forgotten are not spoken of") {
  const std::string elsewhere = said(-SIGSEGV, [](int to) {
    explain(to);
    poke_at = reserve();
  });
  CHECK(elsewhere.empty());
  const std::string raised = said(-SIGSEGV, [](int to) {
    explain(to);
    raise(SIGSEGV);
  });
  CHECK(raised.empty());
  const std::string killed = said(-SIGBUS, [](int to) {
    explain(to);
    kill(getpid(), SIGBUS);
    pause();
  });
  CHECK(killed.empty());
  const std::string forgotten = said(-SIGSEGV, [](int to) {
    explain(to);
    char* const at = reserve();
    know_as(8, at).reset();
    poke_at = at;
  });
  for (const std::size_t first : {std::size_t{0}, kBytes - 4096}) {
    const std::string beside = said(-SIGSEGV, [&](int to) {
      explain(to);
      char* const at = reserve();
      const Known part = know(std::make_unique<Named>(8),
                              reinterpret_cast<std::uintptr_t>(at) + first, 4096, false);
      poke_at = first == 0 ? at + 4096 : at + first - 1;
      poke();
    });
    CHECK(beside.empty());
  }
  CHECK(forgotten.empty());
}

TEST_CASE("the last of many ranges, the first and those between are found once others have gone") {
  for (const std::size_t looked_for : {0u, 1u, 2u, 3u, 4u, 5u}) {
    const std::string ended = said(-SIGSEGV, [&](int to) {
      std::vector<Known> known;
      std::vector<char*> at;
      for (std::size_t i = 0; i < 6; ++i) {
        at.push_back(reserve());
        known.push_back(know_as(100 + i, at.back()));
      }
      for (std::size_t i = 0; i < 6; ++i) {
        if (i != looked_for) known[i].reset();
      }
      poke_at = at[looked_for] + kBytes - 1;
      explain(to);
      poke();
    });
    CHECK(contains(ended, "byte 16383 of number " + std::to_string(100 + looked_for)));
  }
}

TEST_CASE("whoever was there before is handed the fault as the kernel would have") {
  for (const int flags : {0, SA_ONSTACK}) {
    const std::string ended = said(40, [&](int to) {
      handle(exit_40, flags);
      explain(to);
    });
    CHECK(contains(ended, kReport));
  }
  const std::string plain = said(42, [](int to) {
    signal(SIGSEGV, exit_42);
    explain(to);
  });
  CHECK(contains(plain, kReport));
  // Handed on too where it is not ours.
  const std::string elsewhere = said(40, [](int to) {
    handle(exit_40);
    explain(to);
    poke_at = reserve();
  });
  CHECK(elsewhere.empty());
}

TEST_CASE("a handler that was to serve once serves once") {
  const std::string ended = said(-SIGSEGV, [](int to) {
    handle([](int, siginfo_t*, void*) { poke_at = poke_at + 1; }, static_cast<int>(SA_RESETHAND));
    explain(to);
  });
  CHECK(count(ended, "vtensor: SIGSEGV") == 1);
}

TEST_CASE("a thread of our own takes no signal but those of its faults") {
  const std::array faults{SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  start_thread("test", ThreadRole::caller, "", [&] {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (const int fault : faults) CHECK(sigismember(&blocked, fault) == 0);
    for (const int other : {SIGINT, SIGTERM, SIGCHLD}) CHECK(sigismember(&blocked, other) == 1);
  })->join();
}

TEST_CASE("what a handler asked not to be blocked is not, and what it asked to be is") {
  const auto look = [](int, siginfo_t*, void*) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    _exit(sigismember(&blocked, SIGSEGV) + 2 * sigismember(&blocked, SIGUSR1));
  };
  for (const auto& [flags, expected] :
       {std::pair{0, 3}, std::pair{static_cast<int>(SA_NODEFER), 2}}) {
    said(expected, [&, flags = flags](int to) {
      Action theirs = action_of(look, flags);
      sigaddset(&theirs.sa_mask, SIGUSR1);
      sigaction(SIGSEGV, &theirs, nullptr);
      explain(to);
    });
  }
}

TEST_CASE("an ignored signal is still ignored where it was raised, and ends what faults") {
  const std::string ended = said(-SIGSEGV, [](int to) {
    signal(SIGSEGV, SIG_IGN);
    explain(to);
    raise(SIGSEGV);
    explain_nothing();
    raise(SIGSEGV);
    explain(to);
  });
  CHECK(count(ended, kReport) == 1);
}

// As faulthandler does it, and as libraries do that keep the handler they found.
TEST_CASE("a handler installed after ours may put ours back and raise, or call it") {
  const std::string raises = said(-SIGSEGV, [](int to) {
    explain(to);
    const auto put_back = [](int number, siginfo_t*, void*) {
      sigaction(number, &theirs_before, nullptr);
      raise(number);
    };
    handle(put_back, SA_NODEFER, &theirs_before);
  });
#if defined(__x86_64__)
  CHECK(count(raises, kReport) == 1);
#endif
  const std::string calls = said(-SIGSEGV, [](int to) {
    explain(to);
    const auto theirs = [](int number, siginfo_t* info, void* context) {
      static int times = 0;
      if (++times == 10) _exit(52);
      call_before(number, info, context);
    };
    handle(theirs, 0, &theirs_before);
    explain(to);  // does not go before it: the two would call each other for ever
  });
  CHECK(count(calls, kReport) == 1);
}

TEST_CASE("off is off, and leaves the handlers as they were") {
  const std::string gone = said(40, [](int to) {
    handle(exit_40);
    explain_nothing();
    explain(to);
    explain(to);
    explain_nothing();
    explain_nothing();
    Action now = {};
    sigaction(SIGSEGV, nullptr, &now);
    if (now.sa_sigaction != exit_40) _exit(50);
    sigaction(SIGBUS, nullptr, &now);
    if (now.sa_handler != SIG_DFL) _exit(51);
  });
  CHECK(gone.empty());
  // Behind another handler it stays, says nothing, and can be turned on again.
  for (const bool again : {false, true}) {
    const std::string kept = said(-SIGSEGV, [&](int to) {
      explain(to);
      handle(call_before, 0, &theirs_before);
      explain_nothing();
      Action now = {};
      sigaction(SIGSEGV, nullptr, &now);
      if (now.sa_sigaction != call_before) _exit(50);
      if (again) explain(to);
    });
    CHECK(count(kept, kReport) == (again ? 1 : 0));
  }
  // The program reset the signal's handler in between.
  const std::string taken = said(-SIGSEGV, [](int to) {
    explain(to);
    signal(SIGSEGV, SIG_DFL);
    explain(to);
  });
  CHECK(contains(taken, kReport));
}

TEST_CASE("memory of a device is named") {
  const std::string device = said(-SIGSEGV, [](int to) { explain(to); }, true);
  CHECK(contains(device, "vtensor: the memory is a CUDA device's"));
}

void fill_up(int to) {
  static const std::vector<char> bytes(1 << 20);
  fcntl(to, F_SETFL, O_NONBLOCK);
  while (write(to, bytes.data(), bytes.size()) > 0) {
  }
  fcntl(to, F_SETFL, 0);
}

std::array<int, 2> full_pipe() {
  std::array<int, 2> ends;
  if (pipe(ends.data()) != 0) _exit(50);
  fill_up(ends[1]);
  return ends;
}

TEST_CASE("a reader that takes nothing keeps no process from its end") {
  said(-SIGSEGV, [](int) {
    const std::array<int, 2> ends = full_pipe();
    explain(ends[1]);
  });
  said(-SIGSEGV, [](int) {
    std::array<int, 2> ends;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) _exit(50);
    fill_up(ends[1]);
    explain(ends[1]);
  });
  // A terminal that has room for a part of the report.
  said(-SIGSEGV, [](int) {
    const int reader = posix_openpt(O_RDWR | O_NOCTTY);
    if (reader < 0 || grantpt(reader) != 0 || unlockpt(reader) != 0) _exit(50);
    const int writer = open(ptsname(reader), O_RDWR | O_NOCTTY);
    fill_up(writer);
    std::array<char, 16> part;
    if (read(reader, part.data(), part.size()) <= 0) _exit(51);
    explain(writer);
  });
  // Another thread writes to the same pipe, and takes the room that poll() found.
  said(-SIGSEGV, [](int) {
    const std::array<int, 2> ends = full_pipe();
    explain(ends[1]);
    std::thread([&] {
      std::array<char, 4096> part;
      for (;;) {
        if (read(ends[0], part.data(), part.size()) <= 0) _exit(51);
        fill_up(ends[1]);
      }
    }).detach();
    poke();
  });
}

TEST_CASE("a reader that is slow is waited for") {
  const std::string ended = said(0, [](int to) {
    const std::array<int, 2> ends = full_pipe();
    handle([](int, siginfo_t*, void*) { pause(); });
    explain(ends[1]);
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::string all;
      std::array<char, 4096> part;
      while (!contains(all, kReport)) {
        const ssize_t n = read(ends[0], part.data(), part.size());
        if (n <= 0) _exit(51);
        all.append(part.data(), static_cast<std::size_t>(n));
      }
      static_cast<void>(!write(to, "all of it", 9));
      _exit(0);
    }).detach();
    poke();
  });
  CHECK(ended == "all of it");
}

TEST_CASE("a reader that has gone changes nothing") {
  for (const bool blocked : {false, true}) {
    said(blocked ? 41 : 40, [&](int) {
      std::array<int, 2> ends;
      if (pipe(ends.data()) != 0) _exit(50);
      close(ends[0]);
      sigset_t pipe_signal;
      sigemptyset(&pipe_signal);
      sigaddset(&pipe_signal, SIGPIPE);
      if (blocked) {  // and one pending already, which stays
        pthread_sigmask(SIG_BLOCK, &pipe_signal, nullptr);
        raise(SIGPIPE);
      }
      handle([](int, siginfo_t*, void*) {
        sigset_t pending;
        sigpending(&pending);
        _exit(sigismember(&pending, SIGPIPE) == 1 ? 41 : 40);
      });
      explain(ends[1]);
    });
  }
}

TEST_CASE("errno is after a report as it was before") {
  said(40, [](int) {
    handle([](int, siginfo_t* info, void*) {
      const auto page = reinterpret_cast<std::uintptr_t>(info->si_addr) & ~std::uintptr_t{4095};
      mprotect(reinterpret_cast<void*>(page), 4096, PROT_READ | PROT_WRITE);
    });
    explain(1 << 20);  // no descriptor: asking about it sets errno
    errno = ERANGE;
    poke();
    _exit(errno == ERANGE ? 40 : 41);
  });
}

// As Python's do: they note the signal, and return to what faulted.
TEST_CASE("a handler that returns, so that the fault happens again, hears of it once") {
  const std::string ended = said(42, [](int to) {
    handle([](int, siginfo_t*, void*) {
      static int times = 0;
      if (++times == 100) _exit(42);
    });
    explain(to);
  });
  CHECK(count(ended, "vtensor: SIGSEGV") == 1);
  const std::string moves_on = said(0, [](int to) {
    static sigjmp_buf on;
    handle([](int, siginfo_t*, void*) { siglongjmp(on, 1); });
    explain(to);
    for (int times = 0; times < 200; ++times) {
      poke_at = poke_at + (times % 2 == 0 ? 8 : 0);
      if (sigsetjmp(on, 1) == 0) poke();
    }
    _exit(0);
  });
  CHECK(count(moves_on, "vtensor: SIGSEGV") == 8);
}

// A handler that goes on where it likes, as a virtual machine's does: reports come one after the
// other, while threads know and forget ranges.
TEST_CASE("ranges come and go beside reports") {
  static sigjmp_buf back;
  said(0, [](int) {
    handle([](int, siginfo_t*, void*) { siglongjmp(back, 1); });
    std::array<int, 2> ends;
    if (pipe(ends.data()) != 0) _exit(50);
    explain(ends[1]);
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      threads.emplace_back([&over, i] {
        char* const at = reserve();
        for (std::size_t n = 0; !over.load(std::memory_order_relaxed); ++n) {
          const Known one = know_as(1000 + i, at);
          const Known other = know_as(1000 + i, at);
        }
      });
    }
    char* const theirs_at = reserve();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    static std::size_t done;
    for (done = 0; done < 100 || std::chrono::steady_clock::now() < until; ++done) {
      const Known mine = know_as(9, theirs_at);
      poke_at = theirs_at + 3;
      if (sigsetjmp(back, 1) == 0) poke();
      std::array<char, 1000> said;
      const ssize_t n = read(ends[0], said.data(), said.size());
      const std::string report(said.data(), static_cast<std::size_t>(n));
      if (!contains(report, "byte 3 of number 9\nvtensor: map it\n")) _exit(51);
    }
    over = true;
    for (std::thread& thread : threads) thread.join();
    _exit(0);
  });
}

TEST_CASE("a child that is forked while ranges come and go can have ranges of its own") {
  const char* const at = reserve();
  REQUIRE(at != nullptr);
  const Beside other([at] { know_as(1, at); });
  check_children(60, [&] {
    alarm(20);  // a lock that no thread has any more is never free
    static_cast<void>(know_as(2, at).release());
    return 0;
  });
}

TEST_CASE("a forked child forgets the ranges of its own, and none of its parent's") {
  const int status = in_child([] {
    watch_forks();
    Known theirs = know_as(1, reserve());
    theirs->set_asleep(true);
    return in_child([&theirs] {
      Known ours = know_as(2, reserve());
      ours->set_asleep(true);
      const std::uintptr_t at = ours->base(), before = theirs->base();
      if (!asleep_at(at)) return 1;
      ours.reset();
      theirs.reset();
      return asleep_at(at) ? 2 : asleep_at(before) ? 0 : 3;
    });
  });
  CHECK(status == 0);
}

}  // namespace vtensor::faults
