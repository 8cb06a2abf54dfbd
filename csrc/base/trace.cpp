#include "base/trace.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"

namespace vtensor::trace {
namespace {

constexpr std::size_t kFewest = 64, kMost = std::size_t{1} << 28;

std::mutex control;            // guards `running` and the events of every Recording
Recording* running = nullptr;  // null unless `on`

std::int64_t read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// How far Unix time is ahead of now(), to some ten nanoseconds: by the shortest of ten
// measurements, which was interrupted least.
std::uint64_t measure_unix_offset() {
  std::int64_t offset = 0, shortest = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 10; ++i) {
    const std::int64_t before = read_clock(CLOCK_MONOTONIC);
    const std::int64_t unix_time = read_clock(CLOCK_REALTIME);
    const std::int64_t after = read_clock(CLOCK_MONOTONIC);
    if (after - before >= shortest) continue;
    shortest = after - before;
    offset = unix_time - (before + shortest / 2);
  }
  return static_cast<std::uint64_t>(offset);
}

}  // namespace

std::uint64_t now() noexcept { return static_cast<std::uint64_t>(read_clock(CLOCK_MONOTONIC)); }

void record(Event event) noexcept {
  if (!recording()) return;
  thread_local const auto thread = static_cast<std::uint32_t>(syscall(SYS_gettid));
  event.thread = thread;
  event.role = thread_role;
  const std::lock_guard lock(control);
  if (running == nullptr || event.begin < running->start_) return;
  running->ring_[running->count_++ % running->capacity_] = event;
}

Recording::Recording(std::size_t capacity)
    : capacity_(std::bit_ceil(std::clamp(capacity, kFewest, kMost))) {
  refuse_in_forked_child("trace.record");
  watch_forks();
  const std::lock_guard lock(control);
  if (running != nullptr) {
    throw Error(
        "[trace.record] another recording runs, and one runs at a time: leave its `with` first, or "
        "read its events() so far");
  }
  const std::size_t bytes = capacity_ * sizeof(Event);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error("[trace.record] need ", bytes,
                " bytes of addresses, the system has fewer: ask for fewer events");
  }
  // The first touch of a huge page takes as long as a traced operation.
  madvise(memory, bytes, MADV_NOHUGEPAGE);
  ring_ = static_cast<Event*>(memory);
  unix_offset_ = measure_unix_offset();
  start_ = now();
  running = this;
  on.store(true, std::memory_order_relaxed);
}

Recording::~Recording() {
  stop();
  munmap(ring_, capacity_ * sizeof(Event));
}

void Recording::stop() {
  if (in_forked_child()) return;  // a thread of the parent may have the lock
  const std::lock_guard lock(control);
  if (running != this) return;
  running = nullptr;
  on.store(false, std::memory_order_relaxed);
}

std::vector<Event> Recording::events() const {
  refuse_in_forked_child("trace.events");
  std::vector<Event> events;
  {
    const std::lock_guard lock(control);
    events.assign(ring_, ring_ + std::min<std::uint64_t>(count_, capacity_));
  }
  for (Event& event : events) event.begin += unix_offset_;
  std::ranges::sort(events, [](const Event& a, const Event& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.duration > b.duration;
  });
  return events;
}

std::uint64_t Recording::dropped() const {
  refuse_in_forked_child("trace.dropped");
  const std::lock_guard lock(control);
  return sub_sat(count_, capacity_);
}

}  // namespace vtensor::trace
