// The file that several processes share a budget in: places, charges, requests, and what a
// process that dies leaves.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "base/wake_word.h"
#include "support.h"
#include "vmm/ledger.h"

namespace vtensor {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kLimit = 1000;
constexpr Device kHost{1, 0};

CallMeter meter;

// A name of this test's own.
std::string fresh_name() {
  static int n = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(n++);
}

std::string path_of(const std::string& name) {
  return "/dev/shm/vtensor-" + std::to_string(geteuid()) + "-" + name;
}

bool file_exists(const std::string& name) { return access(path_of(name).c_str(), F_OK) == 0; }

std::unique_ptr<Ledger> join(const std::string& name, std::uint64_t limit = kLimit) {
  return Ledger::join(meter, name, limit, kHost);
}

std::uint64_t held_elsewhere(const Ledger& ledger) { return ledger.balance().held_elsewhere; }

// What other pools want beyond the room that is left.
std::uint64_t missing(const Ledger& ledger) {
  const Ledger::Balance balance = ledger.balance();
  return balance.wanted_elsewhere - std::min(balance.wanted_elsewhere, balance.room);
}

// The living pools at one moment.
std::vector<Ledger::Holder> holders(const std::string& name) {
  for (const auto& survey : Ledger::survey(0s).first) {
    if (survey.name == name) return survey.holders;
  }
  return {};
}

std::uint64_t held_by_all(const std::string& name) {
  std::uint64_t held = 0;
  for (const auto& holder : holders(name)) held += holder.held;
  return held;
}

// Locks the file for another process, until it is closed.
int lock_file(const std::string& name) {
  const int file = open(path_of(name).c_str(), O_RDWR | O_CREAT, 0600);
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_len = 1;
  REQUIRE(fcntl(file, F_OFD_SETLK, &lock) == 0);
  return file;
}

// A process that runs `body`, and stands for one that was not forked.
class Process {
 public:
  explicit Process(const std::function<void()>& body) : id_(fork()) {
    if (id_ != 0) return;
    fork_depth = 0;
    body();
    _exit(0);
  }
  ~Process() {
    if (id_ > 0) kill();
  }
  void kill() {
    ::kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
    id_ = 0;
  }

 private:
  pid_t id_;
};

// Bytes that come from a child.
class Pipe {
 public:
  Pipe() { REQUIRE(pipe2(ends_.data(), O_CLOEXEC) == 0); }
  ~Pipe() {
    for (const int end : ends_) close(end);
  }
  void say() const { REQUIRE(write(ends_[1], "!", 1) == 1); }
  void hear() const {
    char said;
    REQUIRE(read(ends_[0], &said, 1) == 1);
  }

 private:
  std::array<int, 2> ends_{};
};

TEST_CASE("a link is not followed") {
  const std::string name = fresh_name(), other = fresh_name();
  const auto one = join(other);
  REQUIRE(symlink(path_of(other).c_str(), path_of(name).c_str()) == 0);
  CHECK_THROWS_WITH_AS(join(name), doctest::Contains("ELOOP"), DriverError);
  unlink(path_of(name).c_str());
}

TEST_CASE("there are as many places as there are") {
  const std::string name = fresh_name();
  std::vector<std::unique_ptr<Ledger>> all;
  for (std::size_t i = 0; i < Ledger::kMostPools; ++i) all.push_back(join(name));
  CHECK_THROWS_WITH_AS(join(name), doctest::Contains("128 pools"), Error);
  all.erase(all.begin() + 50);
  all.push_back(join(name));
  CHECK(all.back()->charge(kLimit));
  CHECK(holders(name).size() == Ledger::kMostPools);
}

TEST_CASE("a refused call leaves nothing") {
  const std::string name = fresh_name();
  for (int n = 0;; ++n) {
    meter.fail_after(n);
    bool joined = true;
    try {
      join(name);
    } catch (const DriverError& error) {
      joined = false;
      CHECK(std::string(error.what()).starts_with("[shared budget] "));
    }
    meter.disarm();
    if (n != 1) CHECK(!file_exists(name));  // what cannot be locked cannot be removed
    if (joined) {
      CHECK(n == 5);  // open, two locks, fallocate, mmap
      break;
    }
  }
  const auto one = join(name);
  meter.fail_after(0);
  CHECK_THROWS_AS(one->charge(10), DriverError);
  meter.disarm();
  CHECK(one->held() == 0);
}

TEST_CASE("a lock that is held for ever is waited for with a bound") {
  const std::string name = fresh_name();
  const auto one = join(name);
  auto leaving = join(name);
  CHECK(one->charge(10));
  const int file = lock_file(name);
  CHECK_THROWS_AS(one->charge(20), TimedOut);
  CHECK(one->held() == 10);
  one->hold(0);  // waits for no lock
  CHECK(one->balance().room == kLimit);
  CHECK_NOTHROW(leaving.reset());
  const std::vector<std::string> skipped = Ledger::survey(0s).second;
  CHECK(std::any_of(skipped.begin(), skipped.end(),
                    [&](const std::string& why) { return why.find(name) != std::string::npos; }));
  close(file);
  CHECK(holders(name).size() == 1);
  CHECK(one->charge(10));
}

// Seen in each of these by the next use, whichever it is.
TEST_CASE("a file that was made shorter ends no process, and is charged no more") {
  const auto all_of_it = [](Ledger& one) {
    one.want(7);
    CHECK(one.wants());
    one.want(-7);
    one.hold(650);
    CHECK(one.answered(one.request()));
    one.answer(one.unanswered().value(), 1, 2);
    CHECK(!one.unanswered());
    one.wake_word()().wake();
    CHECK(held_elsewhere(one) + one.balance().spared_elsewhere + missing(one) == 0);
    CHECK(one.balance().room == kLimit - 650);
    CHECK_THROWS_WITH_AS(one.charge(700), doctest::Contains("was made shorter by another program"),
                         Error);
    CHECK(one.held() == 650);
  };
  for (const off_t bytes : {0, 12, 4096, 20'000}) {
    for (const bool made_longer_again : {false, true}) {
      CAPTURE(bytes);
      CAPTURE(made_longer_again);
      const std::string name = fresh_name();
      auto one = join(name), other = join(name);
      CHECK(one->charge(600));
      CHECK(other->charge(300));
      REQUIRE(truncate(path_of(name).c_str(), bytes) == 0);
      if (made_longer_again) {
        REQUIRE(truncate(path_of(name).c_str(), 100'000) == 0);
        CHECK_THROWS_WITH_AS(one->charge(601), doctest::Contains("made shorter"), Error);
      } else {
        all_of_it(*one);
      }
      CHECK_THROWS_WITH_AS(other->charge(301), doctest::Contains("made shorter"), Error);
      CHECK_THROWS_WITH_AS(join(name), doctest::Contains("close them all"), Error);
      one.reset();
      other.reset();
      CHECK(!file_exists(name));
    }
  }
}

TEST_CASE("a pool that joins while the last one leaves joins no file that is gone") {
  const std::string name = fresh_name();
  const int file = lock_file(name);
  std::unique_ptr<Ledger> late;
  std::thread comes([&] { late = join(name); });
  std::this_thread::sleep_for(100ms);  // it has opened the file, and waits for the lock
  unlink(path_of(name).c_str());
  close(file);
  comes.join();
  CHECK(file_exists(name));
  CHECK(holders(name).size() == 1);
}

TEST_CASE("threads that join, charge, give back and leave never pass the limit") {
  const std::string name = fresh_name();
  const auto kept = join(name);
  std::atomic<bool> over{false};
  std::atomic<int> looks{0};
  std::thread sampler([&] {
    std::uint64_t most = 0;
    for (; !over; ++looks) most = std::max(most, held_by_all(name));
    CHECK(most <= kLimit);
    CHECK(most > 0);
  });
  in_threads(3, [&](std::size_t seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int round = 0; round < 20 || looks < 100; ++round) {
      const auto own = join(name);
      for (int i = 0; i < 200; ++i) {
        if (!own->charge(own->held() + 1 + random() % kLimit)) own->hold(own->held() / 2);
      }
    }
  });
  over = true;
  sampler.join();
  CHECK(kept->charge(kLimit));
}

TEST_CASE("a killed process leaves nothing, whenever that is") {
  const std::string name = fresh_name();
  const auto kept = join(name);
  std::uint64_t most = 0;
  for (int round = 0; round < 20; ++round) {
    Pipe pipe;
    Process killed([&] {
      for (bool said = false;;) {
        const auto own = join(name);
        for (int i = 0; i < 50; ++i) {
          if (!own->charge(own->held() + 300)) own->hold(0);
        }
        if (!std::exchange(said, true)) pipe.say();
      }
    });
    pipe.hear();
    for (int i = 0; i < 5 * round; ++i) most = std::max(most, held_by_all(name));
    killed.kill();
    REQUIRE(kept->charge(kLimit));
    kept->hold(0);
    REQUIRE(held_elsewhere(*kept) == 0);
    REQUIRE(holders(name).size() == 1);
  }
  CHECK(most <= kLimit);
}

TEST_CASE("a pool that is asked is woken and answers, or is dead") {
  const std::string name = fresh_name();
  const auto one = join(name), other = join(name);
  CHECK(other->charge(900));
  one->want(300);
  CHECK(other->balance().wanted_elsewhere == 300);
  CHECK(missing(*other) == 200);
  CHECK(missing(*one) == 0);
  std::thread sleeper([word = other->wake_word()] { word().sleep(WakeWord::Time::max()); });
  std::this_thread::sleep_for(20ms);
  const std::uint32_t request = one->request();
  sleeper.join();
  CHECK(!one->answered(request));
  CHECK(other->unanswered() == request);
  other->answer(request, 100, 50);
  CHECK(!other->unanswered());
  CHECK(one->answered(request));
  CHECK(one->balance().spared_elsewhere == 150);
  one->want(-300);
  CHECK(missing(*other) == 0);

  Pipe pipe;
  Process silent([&] {
    const auto own = join(name);
    own->want(400);
    pipe.say();
    for (;;) pause();
  });
  pipe.hear();
  const std::uint32_t again = one->request();
  other->answer(again, 0, 0);
  CHECK(!one->answered(again));
  CHECK(missing(*one) == 300);
  silent.kill();
  CHECK(one->answered(again));
  CHECK(one->balance().wanted_elsewhere == 0);
}

TEST_CASE("a word that is woken is never slept through") {
  WakeWord word;
  std::atomic<int> told{0};
  constexpr int kTold = 20'000;
  std::vector<std::thread> wakers;
  for (int n = 0; n < 2; ++n) {
    wakers.emplace_back([&] {
      for (int i = 0; i < kTold; ++i) {
        told.fetch_add(1, std::memory_order_relaxed);
        word.wake();
      }
    });
  }
  int heard = 0;
  for (const auto late = std::chrono::steady_clock::now() + 60s; heard != 2 * kTold;) {
    word.reset();
    heard = told.load(std::memory_order_relaxed);
    if (heard == 2 * kTold) break;
    word.sleep(late);
    REQUIRE(std::chrono::steady_clock::now() < late);
  }
  for (std::thread& waker : wakers) waker.join();
}

}  // namespace
}  // namespace vtensor
