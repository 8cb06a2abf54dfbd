// The ring of the trace (I16): what it keeps, what it loses, and what may write and read it at
// once.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/trace.h"
#include "host_fixture.h"

namespace vtensor::trace {
namespace {

void tell(std::uint64_t number) { event(What::map, 0, number); }

std::vector<std::uint64_t> numbers(const std::vector<Event>& events) {
  std::vector<std::uint64_t> found;
  for (const Event& event : events) found.push_back(event.bytes);
  return found;
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * 4096;
}

}  // namespace

TEST_CASE("events come by time, the enclosing before the enclosed") {
  Recording made(64);
  const std::uint64_t begin = now();
  {
    const Span outer(What::extend, 0, 1);
    const Span inner(What::map, 0, 2);
  }  // told inner first
  record({.begin = begin, .duration = 5, .address = 0, .bytes = 3, .what = What::zero});
  record({.begin = begin, .duration = 9, .address = 0, .bytes = 4, .what = What::copy});
  made.stop();
  CHECK(numbers(made.events()) == std::vector<std::uint64_t>{4, 3, 1, 2});
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

TEST_CASE("a recording that is full keeps the newest events") {
  Recording made(64);
  for (std::uint64_t i = 0; i < 100; ++i) tell(i);
  made.stop();
  std::vector<std::uint64_t> newest(64);
  std::iota(newest.begin(), newest.end(), 36);
  CHECK(numbers(made.events()) == newest);
  CHECK(made.dropped() == 36);
}

TEST_CASE("a recording that is let go stops") {
  {
    const Recording made(64);
  }
  CHECK_FALSE(recording());
}

// Differences, because a sanitizer has memory of its own for each byte that was touched.
TEST_CASE("memory comes with events and goes with the recording") {
  constexpr std::size_t kEvents = std::size_t{1} << 19;
  static_assert(kEvents * sizeof(Event) == std::size_t{24} << 20);
  constexpr std::size_t kMost = std::size_t{18} << 20, kLittle = std::size_t{4} << 20;
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
        record({.begin = begin,
                .duration = word,
                .address = ~word,
                .bytes = word,
                .subject = word * 3,
                .what = static_cast<What>(word % 7)});
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
  CHECK(made.events().size() == 64);
  CHECK(made.events().size() + made.dropped() == told);
}

TEST_CASE("recordings start and stop beside writers") {
  const auto write = [i = std::uint64_t{0}]() mutable {
    const Span span(What::extend, ~i, i);
    ++i;
  };
  const Beside writer(write), another(write);
  for (int round = 0; round < 200; ++round) {
    Recording made(round % 2 == 0 ? 64 : 1024);
    std::this_thread::yield();
    made.stop();
    for (const Event& event : made.events()) {
      CHECK(event.address == ~event.bytes);
      CHECK(event.begin >= made.started());
    }
  }
}

TEST_CASE("a child forked while another thread reads waits for nothing") {  // I12, I13
  Recording made(1024);
  for (std::uint64_t i = 0; i < 1024; ++i) tell(i);
  const Beside other([&] { made.events(); });
  check_children(20, [&] {
    alarm(20);
    made.stop();
    return recording() ? 1 : 0;
  });
}

}  // namespace vtensor::trace
