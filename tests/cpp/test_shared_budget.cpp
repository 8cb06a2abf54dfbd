// The file that several processes share a budget in: places, charges, and what those leave who die.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
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
#include "vmm/shared_budget.h"

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

std::unique_ptr<SharedBudget> join(const std::string& name, std::uint64_t limit = kLimit) {
  return SharedBudget::join(meter, name, limit, kHost);
}

// What all living pools hold at one moment; the limit's double if there is no such budget.
std::uint64_t held_by_all(const std::string& name) {
  for (const auto& survey : SharedBudget::survey(0s).budgets) {
    if (survey.name != name) continue;
    std::uint64_t held = 0;
    for (const auto& holder : survey.holders) held += holder.bytes.held;
    return held;
  }
  return 2 * kLimit;
}

std::size_t count_holders(const std::string& name) {
  for (const auto& survey : SharedBudget::survey(0s).budgets) {
    if (survey.name == name) return survey.holders.size();
  }
  return 0;
}

// A process that runs `body`, and stands for one that was not forked.
class Process {
 public:
  explicit Process(const std::function<void()>& body) : id_(fork()) {
    if (id_ != 0) return;
    in_forked_child = false;
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
  // Until nobody else can say anything.
  void await_end() {
    close(std::exchange(ends_[1], -1));
    char said;
    while (read(ends_[0], &said, 1) > 0) {
    }
  }
  void hear() const {
    char said;
    REQUIRE(read(ends_[0], &said, 1) == 1);
  }

 private:
  std::array<int, 2> ends_{};
};

TEST_CASE("a charge is whole or nothing, and never passes the limit") {
  const std::string name = fresh_name();
  const auto one = join(name), other = join(name);
  CHECK(one->limit() == kLimit);
  CHECK(one->charge(600));
  CHECK(!other->charge(401));
  CHECK(other->held() == 0);
  CHECK(other->charge(400));
  CHECK(!one->charge(1));
  CHECK(one->held_elsewhere() == 400);
  CHECK(one->room() == 0);
  other->give_back(100);
  CHECK(one->room() == 100);
  CHECK(one->charge(100));
  CHECK(held_by_all(name) == kLimit);
  one->charge_anyway(50);
  CHECK(one->room() == 0);
  CHECK(!other->charge(0));
  one->give_back(50);
  CHECK(!other->charge(UINT64_MAX));
}

TEST_CASE("a place ends with its pool, and the file with the last") {
  const std::string name = fresh_name();
  auto one = join(name);
  {
    const auto other = join(name);
    CHECK(other->charge(kLimit));
    CHECK(!one->charge(1));
    CHECK(count_holders(name) == 2);
  }
  CHECK(one->charge(kLimit));
  CHECK(count_holders(name) == 1);
  CHECK(file_exists(name));
  one.reset();
  CHECK(!file_exists(name));
  CHECK(join(name, 7)->limit() == 7);
}

TEST_CASE("what cannot be joined is refused in words") {
  const std::string name = fresh_name();
  for (const std::string& wrong :
       {std::string(), std::string("a/b"), std::string(65, 'x'), std::string("a b")})
    CHECK_THROWS_AS(join(wrong), InvalidArgument);
  CHECK_NOTHROW(join(std::string(64, 'x') + ""));
  {
    const auto one = join(name);
    CHECK_THROWS_WITH_AS(join(name, 2000), doctest::Contains("2000 bytes was asked for"),
                         InvalidArgument);
    CHECK_THROWS_WITH_AS(join(name, 2000), doctest::Contains("has 1000"), InvalidArgument);
    // Another layout.
    const int file = open(path_of(name).c_str(), O_RDWR);
    const std::uint32_t layout = 77;
    REQUIRE(pwrite(file, &layout, sizeof layout, 8) == sizeof layout);
    close(file);
    CHECK_THROWS_WITH_AS(join(name), doctest::Contains("layout 77 where this one has 2"), Error);
    CHECK(count_holders(name) == 0);
  }
  CHECK(!file_exists(name));
}

TEST_CASE("a file that nobody living has a place in is begun afresh") {
  const std::string name = fresh_name();
  for (const std::size_t bytes : {0, 5, 100'000}) {
    const int file = open(path_of(name).c_str(), O_RDWR | O_CREAT, 0600);
    const std::vector<char> rubbish(bytes, 'x');
    REQUIRE(write(file, rubbish.data(), bytes) == static_cast<ssize_t>(bytes));
    close(file);
    CHECK(count_holders(name) == 0);
    const auto one = join(name);
    CHECK(one->charge(kLimit));
    CHECK(count_holders(name) == 1);
  }
  CHECK(!file_exists(name));
}

TEST_CASE("a file that is no file is refused") {
  const std::string name = fresh_name();
  REQUIRE(symlink("/dev/null", path_of(name).c_str()) == 0);
  CHECK_THROWS_WITH_AS(join(name), doctest::Contains("ELOOP"), DriverError);
  unlink(path_of(name).c_str());
}

TEST_CASE("there are as many places as there are") {
  const std::string name = fresh_name();
  std::vector<std::unique_ptr<SharedBudget>> all;
  for (std::size_t i = 0; i < SharedBudget::kMostPools; ++i) all.push_back(join(name));
  CHECK_THROWS_WITH_AS(join(name), doctest::Contains("128 pools"), Error);
  all.erase(all.begin() + 50);
  all.push_back(join(name));
  CHECK(all.back()->charge(kLimit));
  CHECK(count_holders(name) == SharedBudget::kMostPools);
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
      CHECK(n == 6);  // open, two locks, fallocate, mmap, madvise
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
  const int file = open(path_of(name).c_str(), O_RDWR);
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_len = 1;
  REQUIRE(fcntl(file, F_OFD_SETLK, &lock) == 0);
  CHECK_THROWS_AS(one->charge(10), TimedOut);
  CHECK(one->held() == 0);
  one->give_back(0);  // waits for no lock
  CHECK(one->room() == kLimit);
  CHECK_NOTHROW(leaving.reset());
  close(file);
  CHECK(count_holders(name) == 1);
  CHECK(one->charge(10));
}

TEST_CASE("a file that was removed is charged no more") {
  const std::string name = fresh_name();
  auto one = join(name);
  CHECK(one->charge(600));
  unlink(path_of(name).c_str());
  const auto later = join(name);
  CHECK_THROWS_WITH_AS(one->charge(1), doctest::Contains("was removed"), Error);
  CHECK(one->held() == 600);
  one->give_back(600);
  one.reset();
  CHECK(file_exists(name));  // which is another's
  CHECK(later->charge(kLimit));
}

// Seen in each of these by the next use, whichever it is.
TEST_CASE("a file that was made shorter ends no process, and is charged no more") {
  const auto all_of_it = [](SharedBudget& one) {
    one.want(7);
    one.report(1, 2);
    CHECK(one.wants());
    one.want(-7);
    one.charge_anyway(100);
    one.give_back(50);
    const std::uint32_t request = one.request();
    one.await_request(request - 1);
    CHECK(one.answered(request));
    one.answer(one.last_request());
    CHECK(!one.owes_answer());
    CHECK(one.held_elsewhere() + one.spared_elsewhere() + one.missing_elsewhere() == 0);
    CHECK(one.room() == kLimit - 650);
    CHECK_THROWS_WITH_AS(one.charge(1), doctest::Contains("was made shorter by another program"),
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
        CHECK_THROWS_WITH_AS(one->charge(1), doctest::Contains("made shorter"), Error);
      } else {
        all_of_it(*one);
      }
      CHECK_THROWS_WITH_AS(other->charge(1), doctest::Contains("made shorter"), Error);
      CHECK_THROWS_WITH_AS(join(name), doctest::Contains("close them all"), Error);
      const SharedBudget::Surveys surveys = SharedBudget::survey(0s);
      CHECK(std::any_of(surveys.skipped.begin(), surveys.skipped.end(), [&](const auto& why) {
        return why.find(name) != std::string::npos && why.find("shorter") != std::string::npos;
      }));
      one.reset();
      other.reset();
      CHECK(!file_exists(name));
      CHECK(join(name)->charge(kLimit));
    }
  }
}

// A page that has gone has no waker.
TEST_CASE("who waits for requests while the file is cut waits for a second at most") {
  const std::string name = fresh_name();
  const auto one = join(name);
  std::atomic<bool> returned{false};
  std::thread waits([&] {
    one->await_request(one->last_request());
    returned = true;
  });
  std::this_thread::sleep_for(100ms);
  REQUIRE(truncate(path_of(name).c_str(), 0) == 0);
  one->request();
  for (int i = 0; i < 500 && !returned; ++i) std::this_thread::sleep_for(10ms);
  CHECK(returned);
  if (!returned) std::abort();
  waits.join();
}

TEST_CASE("a survey passes over what is no budget, and says so") {
  const std::string name = fresh_name(), strange = fresh_name(), locked = fresh_name();
  const auto kept = join(name), other = join(locked);
  REQUIRE(mkdir(path_of(strange).c_str(), 0700) == 0);
  const int file = open(path_of(locked).c_str(), O_RDWR);
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_len = 1;
  REQUIRE(fcntl(file, F_OFD_SETLK, &lock) == 0);
  const SharedBudget::Surveys surveys = SharedBudget::survey(0s);
  close(file);
  rmdir(path_of(strange).c_str());
  const auto found = [](const auto& all, const auto& is) {
    return std::find_if(all.begin(), all.end(), is) != all.end();
  };
  CHECK(found(surveys.budgets, [&](const auto& survey) { return survey.name == name; }));
  for (const std::string& one : {strange, locked}) {
    CHECK(found(surveys.skipped,
                [&](const auto& why) { return why.find(one) != std::string::npos; }));
  }
}

TEST_CASE("who comes while the last one leaves joins no file that is gone") {
  const std::string name = fresh_name();
  const int file = open(path_of(name).c_str(), O_RDWR | O_CREAT, 0600);
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_len = 1;
  REQUIRE(fcntl(file, F_OFD_SETLK, &lock) == 0);
  std::unique_ptr<SharedBudget> late;
  std::thread comes([&] { late = join(name); });
  std::this_thread::sleep_for(100ms);  // it has opened the file, and waits for the lock
  unlink(path_of(name).c_str());
  close(file);
  comes.join();
  CHECK(file_exists(name));
  CHECK(count_holders(name) == 1);
}

TEST_CASE("threads that join, charge, give back and leave never pass the limit") {
  const std::string name = fresh_name();
  const auto kept = join(name);
  std::atomic<bool> over{false};
  std::atomic<int> looks{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int round = 0; round < 20 || looks < 100; ++round) {
        const auto own = join(name);
        for (int i = 0; i < 200; ++i) {
          if (const std::uint64_t some = random() % kLimit; !own->charge(some))
            own->give_back(own->held() / 2);
        }
      }
    });
  }
  std::thread sampler([&] {
    std::uint64_t most = 0;
    for (; !over; ++looks) most = std::max(most, held_by_all(name));
    CHECK(most <= kLimit);
    CHECK(most > 0);
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  sampler.join();
  CHECK(kept->charge(kLimit));
}

TEST_CASE("who is killed leaves nothing, whenever that is") {
  const std::string name = fresh_name();
  const auto kept = join(name);
  std::uint64_t most = 0;
  for (int round = 0; round < 20; ++round) {
    Pipe pipe;
    Process killed([&] {
      for (bool said = false;;) {
        const auto own = join(name);
        for (int i = 0; i < 50; ++i) {
          if (!own->charge(300)) own->give_back(own->held());
        }
        if (!std::exchange(said, true)) pipe.say();
      }
    });
    pipe.hear();
    for (int i = 0; i < 5 * round; ++i) most = std::max(most, held_by_all(name));
    killed.kill();
    REQUIRE(kept->charge(kLimit));
    kept->give_back(kLimit);
    REQUIRE(count_holders(name) == 1);
  }
  CHECK(most <= kLimit);
}

TEST_CASE("a forked child keeps no place alive") {
  const std::string name = fresh_name();
  const auto kept = join(name);
  Pipe pipe, life;
  Process parent([&] {
    const auto own = join(name);
    REQUIRE(own->charge(kLimit));
    const pid_t child = fork();
    pipe.say();
    if (child == 0) {
      life.await_end();
      _exit(0);
    }
    for (;;) pause();
  });
  pipe.hear();
  pipe.hear();
  CHECK(!kept->charge(1));
  parent.kill();
  CHECK(kept->charge(kLimit));
  CHECK(count_holders(name) == 1);
}

TEST_CASE("who is asked answers, or is dead") {
  const std::string name = fresh_name();
  const auto one = join(name), other = join(name);
  std::atomic<bool> woken{false};
  const std::uint32_t heard = other->last_request();
  std::thread sleeper([&] {
    while (other->last_request() == heard) other->await_request(heard);
    woken = true;
  });
  CHECK(other->charge(900));
  one->want(300);
  CHECK(other->wanted_elsewhere() == 300);
  CHECK(other->missing_elsewhere() == 200);
  CHECK(one->missing_elsewhere() == 0);
  const std::uint32_t request = one->request();
  sleeper.join();
  CHECK(woken);
  CHECK(!one->answered(request));
  CHECK(other->owes_answer());
  other->report(100, 50);
  other->answer(other->last_request());
  CHECK(!other->owes_answer());
  CHECK(one->answered(request));
  CHECK(one->spared_elsewhere() == 150);
  one->want(-300);
  CHECK(other->missing_elsewhere() == 0);

  Pipe pipe;
  Process silent([&] {
    const auto own = join(name);
    own->want(400);
    pipe.say();
    for (;;) pause();
  });
  pipe.hear();
  const std::uint32_t again = one->request();
  other->answer(other->last_request());
  CHECK(!one->answered(again));
  CHECK(one->missing_elsewhere() == 300);
  silent.kill();
  CHECK(one->answered(again));
  CHECK(one->missing_elsewhere() == 0);
  CHECK(one->wanted_elsewhere() == 0);
}

}  // namespace
}  // namespace vtensor
