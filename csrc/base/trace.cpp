#include "base/trace.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>

#include "base/errors.h"
#include "base/process.h"
#include "base/recording.h"

namespace vtensor::trace {
namespace {

using Words = std::array<std::uint64_t, sizeof(Event) / sizeof(std::uint64_t)>;

// The place of one event. A cache line, so that threads do not wait for each other's lines.
//
// A writer takes a ticket, and with it a slot; `state` says which event the slot holds, as in a
// seqlock. The words are stored with release and loaded with acquire, so that a reader that sees
// one word of a new event also sees the new state afterwards: the order that the fences give in
// H.-J. Boehm's "Can seqlocks get along with programming language memory models?" (MSPC 2012),
// without the fences, which ThreadSanitizer does not know.
struct alignas(64) Slot {
  std::uint64_t state;  // 0: never written; else as `writing` and `written` say
  Words event;
};

constexpr std::uint64_t writing(std::uint64_t ticket) { return 2 * ticket + 1; }
constexpr std::uint64_t written(std::uint64_t ticket) { return 2 * ticket + 2; }

using Word = std::atomic_ref<std::uint64_t>;
static_assert(Word::is_always_lock_free);

std::uint64_t load(std::uint64_t& word) { return Word(word).load(std::memory_order_acquire); }
void store(std::uint64_t& word, std::uint64_t value) {
  Word(word).store(value, std::memory_order_release);
}

constexpr std::size_t kFewestBits = 6;  // a page of 4 KiB
constexpr std::size_t kMostBits = 28;

}  // namespace

struct Ring {
  Slot* slots = nullptr;
  std::uint64_t capacity = 0;
  alignas(64) std::atomic<std::uint64_t> next{0};  // ticket

  Slot& slot_of(std::uint64_t ticket) const { return slots[ticket & (capacity - 1)]; }
};

namespace {

// By the logarithm of their capacity. Their addresses and tickets are kept for good, so a writer
// that is held up in record() while recordings stop and start writes to its ring, and over no
// event.
std::array<Ring, kMostBits + 1> rings;
std::atomic<Ring*> current{nullptr};

std::mutex control;  // guards `running`, the opening of rings, and each Recording
bool running = false;

std::int64_t read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// How far Unix time is ahead of now(), to some ten nanoseconds: the measurement of ten that was
// interrupted least.
std::int64_t measure_unix_offset() {
  std::int64_t offset = 0, shortest = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 10; ++i) {
    const std::int64_t before = read_clock(CLOCK_MONOTONIC);
    const std::int64_t unix_time = read_clock(CLOCK_REALTIME);
    const std::int64_t after = read_clock(CLOCK_MONOTONIC);
    if (after - before >= shortest) continue;
    shortest = after - before;
    offset = unix_time - (before + shortest / 2);
  }
  return offset;
}

Ring& open_ring(std::size_t capacity) {
  const std::size_t bits =
      std::clamp<std::size_t>(std::bit_width(capacity - 1), kFewestBits, kMostBits);
  Ring& ring = rings[bits];
  if (ring.slots) return ring;
  const std::size_t bytes = sizeof(Slot) << bits;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error("[trace.record] need ", bytes,
                " bytes of addresses, the system has fewer: ask for fewer events");
  }
  // A huge page takes as long to come as a traced operation does.
  madvise(memory, bytes, MADV_NOHUGEPAGE);
  ring.slots = static_cast<Slot*>(memory);
  ring.capacity = std::uint64_t{1} << bits;
  return ring;
}

void refuse_in_child(const char* operation) {
  if (in_forked_child()) {
    throw Error("[trace.", operation,
                "] this process was forked from one that uses vtensor: nothing is recorded "
                "here; record in the parent, or in a process started by spawn");
  }
}

// The event of `ticket`, unless the slot holds another, or one that is being written.
std::optional<Event> read(Slot& slot, std::uint64_t ticket) {
  if (load(slot.state) != written(ticket)) return std::nullopt;
  Words words;
  std::transform(slot.event.begin(), slot.event.end(), words.begin(), load);
  if (load(slot.state) != written(ticket)) return std::nullopt;
  return std::bit_cast<Event>(words);
}

}  // namespace

std::uint64_t now() noexcept { return static_cast<std::uint64_t>(read_clock(CLOCK_MONOTONIC)); }

void record(What what, std::uint64_t begin, std::uint64_t end, std::uint64_t address,
            std::uint64_t bytes, std::uint64_t subject, Call call) noexcept {
  if (!on.load(std::memory_order_acquire)) return;
  thread_local std::uint32_t thread = 0;
  if (thread == 0) thread = static_cast<std::uint32_t>(syscall(SYS_gettid));

  Ring& ring = *current.load(std::memory_order_acquire);
  const std::uint64_t ticket = ring.next.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = ring.slot_of(ticket);
  // This event is lost if the slot's last writer is still held up in it, a whole round later, or if
  // this writer was, and a newer event has come. No writer waits.
  std::uint64_t before = load(slot.state);
  if (before % 2 != 0 || before > ticket * 2 ||
      !Word(slot.state)
           .compare_exchange_strong(before, writing(ticket), std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
    return;
  }
  const Event event{begin, end - begin, address, bytes, subject, thread, what, call, thread_role};
  const auto words = std::bit_cast<Words>(event);
  for (std::size_t i = 0; i < words.size(); ++i) store(slot.event[i], words[i]);
  store(slot.state, written(ticket));
}

Recording::Recording(std::size_t capacity) {
  refuse_in_child("record");
  watch_forks();
  const std::lock_guard lock(control);
  if (running) {
    throw Error(
        "[trace.record] another recording runs, and one runs at a time: leave its `with` first, or "
        "read its events() so far");
  }
  ring_ = &open_ring(capacity);
  unix_offset_ = measure_unix_offset();
  current.store(ring_, std::memory_order_release);
  first_ = ring_->next.load(std::memory_order_relaxed);
  start_ = now();
  running = true;
  on.store(true, std::memory_order_release);
}

Recording::~Recording() { finish(false); }

void Recording::stop() { finish(true); }

void Recording::finish(bool keep) {
  if (in_forked_child()) return;
  const std::lock_guard lock(control);
  if (stopped_) return;
  stopped_ = true;
  running = false;
  on.store(false, std::memory_order_relaxed);
  const std::uint64_t end = ring_->next.load(std::memory_order_relaxed);
  const std::unique_ptr<Ring, void (*)(Ring*)> give_back(ring_, [](Ring* ring) {
    madvise(ring->slots, ring->capacity * sizeof(Slot), MADV_DONTNEED);
  });
  if (keep) kept_ = collect(end, dropped_);
}

std::vector<Event> Recording::collect(std::uint64_t end, std::uint64_t& lost) const {
  std::vector<Event> events;
  const std::uint64_t kept = std::min(end - first_, ring_->capacity);
  events.reserve(kept);
  lost = end - first_ - kept;
  for (std::uint64_t ticket = end - kept; ticket != end; ++ticket) {
    auto event = read(ring_->slot_of(ticket), ticket);
    if (!event) {
      ++lost;
    } else if (event->begin >= start_) {
      event->begin = to_unix(event->begin);
      events.push_back(*event);
    }
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.duration > b.duration;
  });
  return events;
}

std::size_t Recording::capacity() const { return ring_->capacity; }

std::vector<Event> Recording::events() {
  refuse_in_child("events");
  const std::lock_guard lock(control);
  if (stopped_) return kept_;
  std::uint64_t lost = 0;
  return collect(ring_->next.load(std::memory_order_relaxed), lost);
}

std::uint64_t Recording::dropped() {
  refuse_in_child("dropped");
  const std::lock_guard lock(control);
  if (stopped_) return dropped_;
  const std::uint64_t events = ring_->next.load(std::memory_order_relaxed) - first_;
  return events - std::min(events, ring_->capacity);
}

}  // namespace vtensor::trace
