// Reports of faults: what they say, and to whom signals are handed on.
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

struct Ended {
  int status;
  std::string said;
};

// What `body` says in a child, where an address of a known range is at `poke_at`, and how it ends.
template <typename Body>
Ended child(Body body, bool on_device = false) {
  std::array<int, 2> ends;
  REQUIRE(pipe(ends.data()) == 0);
  char* const at = reserve();
  REQUIRE(at != nullptr);
  const int status = in_child([&] {
    alarm(30);  // a handler that goes round ends too
    const Known known = know_as(7, at, on_device);
    poke_at = at + 5000;
    body(ends[1]);
    return 0;
  });
  munmap(at, kBytes);
  close(ends[1]);
  Ended ended{status, {}};
  std::array<char, 4096> part;
  for (ssize_t n; (n = read(ends[0], part.data(), part.size())) > 0;)
    ended.said.append(part.data(), static_cast<std::size_t>(n));
  close(ends[0]);
  return ended;
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

// A handler of somebody else. It ends the process with 40 if it was handed the fault itself.
void exit_40(int, siginfo_t* info, void*) {
  _exit(info->si_code > 0 && info->si_addr == const_cast<char*>(poke_at) ? 40 : 41);
}

Action theirs_before = {};
void exit_42(int) { _exit(42); }

}  // namespace

TEST_CASE("other faults, raised signals and what is forgotten are not spoken of") {
  const auto elsewhere = child([](int to) {
    explain(to);
    poke_at = reserve();
    poke();
  });
  CHECK(elsewhere.status == -SIGSEGV);
  CHECK(elsewhere.said.empty());
  const auto raised = child([](int to) {
    explain(to);
    raise(SIGSEGV);
  });
  CHECK(raised.status == -SIGSEGV);
  CHECK(raised.said.empty());
  const auto killed = child([](int to) {
    explain(to);
    kill(getpid(), SIGBUS);
    pause();
  });
  CHECK(killed.status == -SIGBUS);
  CHECK(killed.said.empty());
  const auto forgotten = child([](int to) {
    explain(to);
    char* const at = reserve();
    know_as(8, at).reset();
    poke_at = at;
    poke();
  });
  for (const std::size_t first : {std::size_t{0}, kBytes - 4096}) {
    const auto beside = child([&](int to) {
      explain(to);
      char* const at = reserve();
      const Known part = know(std::make_unique<Named>(8),
                              reinterpret_cast<std::uintptr_t>(at) + first, 4096, false);
      poke_at = first == 0 ? at + 4096 : at + first - 1;
      poke();
    });
    CHECK(beside.status == -SIGSEGV);
    CHECK(beside.said.empty());
  }
  CHECK(forgotten.status == -SIGSEGV);
  CHECK(forgotten.said.empty());
}

TEST_CASE("the last of many ranges, the first and those between are found once others have gone") {
  for (const std::size_t looked_for : {0u, 1u, 2u, 3u, 4u, 5u}) {
    const Ended ended = child([&](int to) {
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
    CHECK(contains(ended.said, "byte 16383 of number " + std::to_string(100 + looked_for)));
  }
}

TEST_CASE("whoever was there before is handed the fault as the kernel would have") {
  for (const int flags : {0, SA_ONSTACK}) {
    const Ended ended = child([&](int to) {
      const Action theirs = action_of(exit_40, flags);
      sigaction(SIGSEGV, &theirs, nullptr);
      explain(to);
      poke();
    });
    CHECK(ended.status == 40);
    CHECK(contains(ended.said, kReport));
  }
  const Ended plain = child([](int to) {
    signal(SIGSEGV, exit_42);
    explain(to);
    poke();
  });
  CHECK(plain.status == 42);
  CHECK(contains(plain.said, kReport));
  // Handed on too where it is not ours.
  const Ended elsewhere = child([](int to) {
    const Action theirs = action_of(exit_40);
    sigaction(SIGSEGV, &theirs, nullptr);
    explain(to);
    poke_at = reserve();
    poke();
  });
  CHECK(elsewhere.status == 40);
  CHECK(elsewhere.said.empty());
}

TEST_CASE("a handler that was to serve once serves once") {
  const Ended ended = child([](int to) {
    const Action theirs = action_of([](int, siginfo_t*, void*) { poke_at = poke_at + 1; },
                                    static_cast<int>(SA_RESETHAND));
    sigaction(SIGSEGV, &theirs, nullptr);
    explain(to);
    poke();
  });
  CHECK(ended.status == -SIGSEGV);
  CHECK(count(ended.said, "vtensor: SIGSEGV") == 1);
}

TEST_CASE("what a handler asked not to be blocked is not, and what it asked to be is") {
  const auto look = [](int, siginfo_t*, void*) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    _exit(sigismember(&blocked, SIGSEGV) + 2 * sigismember(&blocked, SIGUSR1));
  };
  for (const auto& [flags, expected] :
       {std::pair{0, 3}, std::pair{static_cast<int>(SA_NODEFER), 2}}) {
    const Ended ended = child([&, flags = flags](int to) {
      Action theirs = action_of(look, flags);
      sigaddset(&theirs.sa_mask, SIGUSR1);
      sigaction(SIGSEGV, &theirs, nullptr);
      explain(to);
      poke();
    });
    CHECK(ended.status == expected);
  }
}

TEST_CASE("an ignored signal is still ignored where it was raised, and ends what faults") {
  const Ended ended = child([](int to) {
    signal(SIGSEGV, SIG_IGN);
    explain(to);
    raise(SIGSEGV);
    explain_nothing();
    raise(SIGSEGV);
    explain(to);
    poke();
  });
  CHECK(ended.status == -SIGSEGV);
  CHECK(count(ended.said, kReport) == 1);
}

// As faulthandler does it, and as libraries do that keep the handler they found.
TEST_CASE("a handler installed after ours may put ours back and raise, or call it") {
  const Ended raises = child([](int to) {
    explain(to);
    const Action theirs = action_of(
        [](int number, siginfo_t*, void*) {
          sigaction(number, &theirs_before, nullptr);
          raise(number);
        },
        SA_NODEFER);
    sigaction(SIGSEGV, &theirs, &theirs_before);
    poke();
  });
  CHECK(raises.status == -SIGSEGV);
#if defined(__x86_64__)
  CHECK(count(raises.said, kReport) == 1);
#endif
  const Ended calls = child([](int to) {
    explain(to);
    const Action theirs = action_of([](int number, siginfo_t* info, void* context) {
      static int times = 0;
      if (++times == 10) _exit(52);
      theirs_before.sa_sigaction(number, info, context);
    });
    sigaction(SIGSEGV, &theirs, &theirs_before);
    explain(to);  // does not go before it: the two would call each other for ever
    poke();
  });
  CHECK(calls.status == -SIGSEGV);
  CHECK(count(calls.said, kReport) == 1);
}

TEST_CASE("off is off, and leaves the handlers as they were") {
  const Ended gone = child([](int to) {
    const Action theirs = action_of(exit_40);
    sigaction(SIGSEGV, &theirs, nullptr);
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
    poke();
  });
  CHECK(gone.status == 40);
  CHECK(gone.said.empty());
  // Behind another handler it stays, says nothing, and can be turned on again.
  for (const bool again : {false, true}) {
    const Ended kept = child([&](int to) {
      explain(to);
      const Action theirs = action_of([](int number, siginfo_t* info, void* context) {
        theirs_before.sa_sigaction(number, info, context);
      });
      sigaction(SIGSEGV, &theirs, &theirs_before);
      explain_nothing();
      Action now = {};
      sigaction(SIGSEGV, nullptr, &now);
      if (now.sa_sigaction != theirs.sa_sigaction) _exit(50);
      if (again) explain(to);
      poke();
    });
    CHECK(kept.status == -SIGSEGV);
    CHECK(count(kept.said, kReport) == (again ? 1 : 0));
  }
  // Somebody took it away without a word.
  const Ended taken = child([](int to) {
    explain(to);
    signal(SIGSEGV, SIG_DFL);
    explain(to);
    poke();
  });
  CHECK(taken.status == -SIGSEGV);
  CHECK(contains(taken.said, kReport));
}

TEST_CASE("memory of a device is named") {
  const Ended device = child(
      [](int to) {
        explain(to);
        poke();
      },
      true);
  CHECK(device.status == -SIGSEGV);
  CHECK(contains(device.said, "vtensor: the memory is a CUDA device's"));
}

void fill_up(int to) {
  static const std::vector<char> bytes(1 << 20);
  fcntl(to, F_SETFL, O_NONBLOCK);
  while (write(to, bytes.data(), bytes.size()) > 0) {
  }
  fcntl(to, F_SETFL, 0);
}

TEST_CASE("a reader that takes nothing keeps no process from its end") {
  const Ended pipe_full = child([](int) {
    std::array<int, 2> ends;
    if (pipe(ends.data()) != 0) _exit(50);
    fill_up(ends[1]);
    explain(ends[1]);
    poke();
  });
  CHECK(pipe_full.status == -SIGSEGV);
  const Ended socket_full = child([](int) {
    std::array<int, 2> ends;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) _exit(50);
    fill_up(ends[1]);
    explain(ends[1]);
    poke();
  });
  CHECK(socket_full.status == -SIGSEGV);
  // A terminal that has room for a part of the report.
  const Ended terminal = child([](int) {
    const int reader = posix_openpt(O_RDWR | O_NOCTTY);
    if (reader < 0 || grantpt(reader) != 0 || unlockpt(reader) != 0) _exit(50);
    const int writer = open(ptsname(reader), O_RDWR | O_NOCTTY);
    fill_up(writer);
    std::array<char, 16> part;
    if (read(reader, part.data(), part.size()) <= 0) _exit(51);
    explain(writer);
    poke();
  });
  CHECK(terminal.status == -SIGSEGV);
  // Another thread writes to the same pipe, and takes the room that poll() found.
  const Ended contended = child([](int) {
    std::array<int, 2> ends;
    if (pipe(ends.data()) != 0) _exit(50);
    fill_up(ends[1]);
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
  CHECK(contended.status == -SIGSEGV);
}

TEST_CASE("a reader that is slow is waited for") {
  const Ended ended = child([](int to) {
    std::array<int, 2> ends;
    if (pipe(ends.data()) != 0) _exit(50);
    fill_up(ends[1]);
    const Action wait = action_of([](int, siginfo_t*, void*) { pause(); });
    sigaction(SIGSEGV, &wait, nullptr);
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
  CHECK(ended.status == 0);
  CHECK(ended.said == "all of it");
}

TEST_CASE("a reader that has gone changes nothing") {
  for (const bool blocked : {false, true}) {
    const Ended ended = child([&](int) {
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
      const Action look = action_of([](int, siginfo_t*, void*) {
        sigset_t pending;
        sigpending(&pending);
        _exit(sigismember(&pending, SIGPIPE) == 1 ? 41 : 40);
      });
      sigaction(SIGSEGV, &look, nullptr);
      explain(ends[1]);
      poke();
    });
    CHECK(ended.status == (blocked ? 41 : 40));
  }
}

TEST_CASE("errno is after a report as it was before") {
  const Ended ended = child([](int) {
    const Action theirs = action_of([](int, siginfo_t* info, void*) {
      const auto page = reinterpret_cast<std::uintptr_t>(info->si_addr) & ~std::uintptr_t{4095};
      mprotect(reinterpret_cast<void*>(page), 4096, PROT_READ | PROT_WRITE);
    });
    sigaction(SIGSEGV, &theirs, nullptr);
    explain(1 << 20);  // no descriptor: asking about it sets errno
    errno = ERANGE;
    poke();
    _exit(errno == ERANGE ? 40 : 41);
  });
  CHECK(ended.status == 40);
}

// As Python's do: they note the signal, and return to what faulted.
TEST_CASE("a handler that returns, so that the fault happens again, hears of it once") {
  const Ended ended = child([](int to) {
    const Action theirs = action_of([](int, siginfo_t*, void*) {
      static int times = 0;
      if (++times == 100) _exit(42);
    });
    sigaction(SIGSEGV, &theirs, nullptr);
    explain(to);
    poke();
  });
  CHECK(ended.status == 42);
  CHECK(count(ended.said, "vtensor: SIGSEGV") == 1);
  const Ended moves_on = child([](int to) {
    static sigjmp_buf on;
    const Action theirs = action_of([](int, siginfo_t*, void*) { siglongjmp(on, 1); });
    sigaction(SIGSEGV, &theirs, nullptr);
    explain(to);
    for (int times = 0; times < 200; ++times) {
      poke_at = poke_at + (times % 2 == 0 ? 8 : 0);
      if (sigsetjmp(on, 1) == 0) poke();
    }
    _exit(0);
  });
  CHECK(moves_on.status == 0);
  CHECK(count(moves_on.said, "vtensor: SIGSEGV") == 8);
}

// A handler that goes on where it likes, as a virtual machine's does: reports come one after the
// other, while threads know and forget ranges.
TEST_CASE("ranges come and go beside reports") {
  static sigjmp_buf back;
  const Ended ended = child([](int) {
    const Action theirs = action_of([](int, siginfo_t*, void*) { siglongjmp(back, 1); });
    sigaction(SIGSEGV, &theirs, nullptr);
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
  });
  CHECK(ended.status == 0);
}

TEST_CASE("a child that is forked while ranges come and go can have ranges of its own") {
  const char* const at = reserve();
  REQUIRE(at != nullptr);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) know_as(1, at);
  });
  int wrong = 0;
  for (int i = 0; i < 60 && wrong == 0; ++i) {
    wrong += in_child([&] {
               alarm(20);  // a lock that no thread has any more is never free
               static_cast<void>(know_as(2, at).release());
               return 0;
             }) != 0;
  }
  stop = true;
  other.join();
  CHECK(wrong == 0);
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
