// The ring of the trace (I16): what it keeps, what it loses, and who may write and read it at once.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/recording.h"
#include "base/trace.h"
#include "host_fixture.h"

namespace vtensor::trace {
namespace {

void tell(std::uint64_t number, std::uint64_t address = 0) { event(What::map, address, number); }

std::vector<std::uint64_t> numbers(const std::vector<Event>& events) {
  std::vector<std::uint64_t> found;
  for (const Event& event : events) found.push_back(event.bytes);
  return found;
}

std::uint64_t unix_now() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * 4096;
}

}  // namespace

TEST_CASE("nothing is recorded unless somebody records") {
  CHECK_FALSE(recording());
  tell(1);
  {
    const Span span(What::extend, 0, 2);
  }
  record(What::zero, now(), now(), 0, 3);
  Recording made(64);
  CHECK(recording());
  tell(4);
  made.stop();
  CHECK_FALSE(recording());
  tell(5);
  CHECK(numbers(made.events()) == std::vector<std::uint64_t>{4});
  CHECK(made.dropped() == 0);
}

TEST_CASE("an event says what, where, how much, when, for how long, and of which thread") {
  const std::uint64_t before = unix_now();
  Recording made(64);
  const std::uint64_t begin = now();
  record(What::driver_call, begin, begin + 1500, 0xabc000, 4096, 0xa00000, Call::cuMemMap);
  thread_role = ThreadRole::mapper;
  event(What::retire, 1, 2, 3);
  thread_role = ThreadRole::caller;
  pid_t other = 0;
  std::thread([&] {
    other = gettid();
    event(What::error, 0, 0);
  }).join();
  made.stop();
  const std::uint64_t after = unix_now();

  const std::vector<Event> events = made.events();
  REQUIRE(events.size() == 3);
  const Event& call = events[0];
  CHECK(call.what == What::driver_call);
  CHECK(call.call == Call::cuMemMap);
  CHECK(call.address == 0xabc000);
  CHECK(call.bytes == 4096);
  CHECK(call.subject == 0xa00000);
  CHECK(call.duration == 1500);
  CHECK(call.thread == static_cast<std::uint32_t>(gettid()));
  CHECK(call.role == ThreadRole::caller);

  CHECK(events[1].what == What::retire);
  CHECK(events[1].call == Call::count_);
  CHECK(events[1].duration == 0);
  CHECK(events[1].subject == 3);
  CHECK(events[1].role == ThreadRole::mapper);
  CHECK(events[2].thread == static_cast<std::uint32_t>(other));

  // On the wall clock, to which another clock was carried: within a microsecond.
  CHECK(made.started() + 1000 >= before);
  for (const Event& event : events) {
    CHECK(event.begin + 1000 >= before);
    CHECK(event.begin <= after + 1000);
  }
}

TEST_CASE("events come by time, the enclosing before the enclosed") {
  Recording made(64);
  const std::uint64_t begin = now();
  {
    const Span outer(What::extend, 0, 1);
    const Span inner(What::map, 0, 2);
  }  // told inner first
  record(What::zero, begin, begin + 5, 0, 3);
  record(What::copy, begin, begin + 9, 0, 4);
  made.stop();
  CHECK(numbers(made.events()) == std::vector<std::uint64_t>{4, 3, 1, 2});
}

TEST_CASE("a span ends with its scope, by a throw too, and lasts as long as that") {
  Recording made(64);
  try {
    const Span span(What::wait, 0, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    throw std::runtime_error("refused");
  } catch (const std::runtime_error&) {
  }
  made.stop();
  REQUIRE(made.events().size() == 1);
  CHECK(made.events()[0].duration >= 2'000'000);
  CHECK(made.events()[0].duration < 60'000'000'000);
}

TEST_CASE("a recording holds what began and ended in it") {
  Recording before(64);
  tell(1);
  auto early = std::make_unique<Span>(What::extend, 0, 2);
  before.stop();
  Recording made(64);
  tell(3);
  auto late = std::make_unique<Span>(What::extend, 0, 4);
  early.reset();
  made.stop();
  Recording next(64);
  late.reset();
  tell(5);
  CHECK(numbers(before.events()) == std::vector<std::uint64_t>{1});
  CHECK(numbers(made.events()) == std::vector<std::uint64_t>{3});
  CHECK(numbers(next.events()) == std::vector<std::uint64_t>{5});
  CHECK(before.dropped() + made.dropped() + next.dropped() == 0);
}

TEST_CASE("the newest stay, and those lost are counted") {
  Recording made(100);
  CHECK(made.capacity() == 128);
  for (std::uint64_t i = 0; i < 1000; ++i) tell(i);
  CHECK(made.dropped() == 1000 - 128);
  CHECK(made.events().size() == 128);
  made.stop();
  CHECK(made.dropped() == 1000 - 128);
  const auto kept = numbers(made.events());
  REQUIRE(kept.size() == 128);
  for (std::size_t i = 0; i < kept.size(); ++i) CHECK(kept[i] == 1000 - 128 + i);

  Recording exact(128);
  for (std::uint64_t i = 0; i < 128; ++i) tell(i);
  exact.stop();
  CHECK(exact.dropped() == 0);
  CHECK(exact.events().size() == 128);
}

TEST_CASE("a second recording is refused while one runs") {
  Recording first(128);
  tell(1);
  CHECK_THROWS_AS(Recording(64), Error);
  CHECK(recording());
  tell(2);
  first.stop();
  CHECK(numbers(first.events()) == std::vector<std::uint64_t>{1, 2});
  Recording second(1024);
  CHECK(second.capacity() == 1024);
  for (std::uint64_t i = 0; i < 1024; ++i) tell(i);  // over what a shared ring would have
  CHECK(second.dropped() == 0);
  CHECK(first.events().size() == 2);
}

TEST_CASE("a recording that is let go stops") {
  {
    const Recording made(64);
  }
  CHECK_FALSE(recording());
}

// Differences, because a sanitizer has memory of its own for each byte that was touched.
TEST_CASE("memory comes with events and goes with the recording") {
  constexpr std::size_t kEvents = std::size_t{1} << 19;  // 32 MiB
  constexpr std::size_t kMost = std::size_t{24} << 20, kLittle = std::size_t{4} << 20;
  std::size_t full = 0;
  {
    const std::size_t before = resident_bytes();
    const Recording first(kEvents);
    CHECK(resident_bytes() < before + kLittle);
    for (std::uint64_t i = 0; i < kEvents; ++i) tell(i);
    full = resident_bytes();
    CHECK(full >= before + kMost);
  }
  CHECK(resident_bytes() + kMost < full);
}

// Each event's words agree with one another, so that one torn from two shows.
TEST_CASE("many write and one reads, and no event is torn") {
  constexpr int kWriters = 4;
  Recording made(64);
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> told{0};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      std::uint64_t i = 0;
      for (; !done; ++i) {
        const std::uint64_t word = i * kWriters + static_cast<std::uint64_t>(writer);
        const std::uint64_t begin = now();
        record(static_cast<What>(word % 7), begin, begin + word, ~word, word, word * 3);
      }
      told += i;
    });
  }
  const auto wrong_of = [](const std::vector<Event>& events) {
    return std::count_if(events.begin(), events.end(), [](const Event& event) {
      return event.duration != event.bytes || event.address != ~event.bytes ||
             event.subject != event.bytes * 3 || event.what != static_cast<What>(event.bytes % 7);
    });
  };
  std::size_t seen = 0, most = 0;
  std::ptrdiff_t wrong = 0;
  const std::uint64_t limit = now() + 60'000'000'000;
  while (seen < 300'000 && now() < limit) {
    const std::vector<Event> events = made.events();
    seen += events.size();
    most = std::max(most, events.size());
    wrong += wrong_of(events);
  }
  done = true;
  for (std::thread& writer : writers) writer.join();
  CHECK(wrong == 0);
  CHECK(most <= 64);
  CHECK(seen >= 300'000);
  made.stop();
  CHECK(wrong_of(made.events()) == 0);
  CHECK(made.events().size() + made.dropped() == told);
  // Nearly all of the ring: a slot is lost only to a writer that was held up for a whole round.
  CHECK(made.events().size() >= 32);
}

TEST_CASE("recordings start and stop beside writers") {
  std::atomic<bool> done{false};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&done] {
      for (std::uint64_t i = 0; !done; ++i) {
        const Span span(What::extend, ~i, i);
      }
    });
  }
  for (int round = 0; round < 200; ++round) {
    Recording made(round % 2 == 0 ? 64 : 1024);
    std::this_thread::yield();
    made.stop();
    for (const Event& event : made.events()) {
      CHECK(event.address == ~event.bytes);
      CHECK(event.begin >= made.started());
    }
  }
  done = true;
  for (std::thread& writer : writers) writer.join();
}

TEST_CASE("a forked child records nothing, and the parent goes on (I13)") {  // I13
  Recording made(64);
  tell(1);
  const int status = in_child([&] {
    if (recording()) return 1;
    tell(2);
    {
      const Span span(What::extend, 0, 3);
    }
    made.stop();
    const auto says_forked = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const Error& error) {
        return contains(error.what(), "[trace.") && contains(error.what(), "forked");
      }
      return false;
    };
    if (!says_forked([] { const Recording other(64); })) return 2;
    if (!says_forked([&] { made.events(); })) return 3;
    if (!says_forked([&] { made.dropped(); })) return 4;
    return 0;
  });
  CHECK(status == 0);
  CHECK(recording());
  tell(4);
  made.stop();
  CHECK(numbers(made.events()) == std::vector<std::uint64_t>{1, 4});
}

TEST_CASE("a child forked while another thread reads waits for nothing") {  // I12, I13
  Recording made(1024);
  for (std::uint64_t i = 0; i < 1024; ++i) tell(i);
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) made.events();
  });
  for (int child = 0; child < 20; ++child) {
    const int status = in_child([&] {
      alarm(20);
      made.stop();
      return recording() ? 1 : 0;
    });
    CHECK(status == 0);
  }
  done = true;
  other.join();
}

}  // namespace vtensor::trace
