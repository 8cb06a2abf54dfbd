#include "driver/host_copies.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <system_error>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/process.h"
#include "base/thread.h"

namespace vtensor {
namespace {

// One core does not fill the memory's bandwidth, and two leave others to the program.
constexpr std::size_t kThreads = 2;
// A thread copies this much at a time: page tables are locked in pieces of this size.
constexpr std::size_t kPiece = std::size_t{2} << 20;

// Copies with stores that do not load what they replace: a piece is larger than a core's cache, so
// that takes half the time of memcpy.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) {
#ifdef __SSE2__
  constexpr std::size_t kLine = 64;
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; bytes - done >= kLine; done += kLine) {
    auto* const line = reinterpret_cast<__m128i*>(to + done);
    const auto* const source = reinterpret_cast<const __m128i*>(from + done);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(line + i, _mm_loadu_si128(source + i));
  }
  _mm_sfence();  // before the fence of the copy passes
  to += done;
  from += done;
  bytes -= done;
#endif
  std::memcpy(to, from, bytes);
}

struct Piece {
  CopyDirection direction;
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

}  // namespace

// Pieces are numbered in the order in which they were queued, and begun in that order.
struct HostCopies::Queue {
  explicit Queue(Populate populate) : populate(std::move(populate)) {}

  const Populate populate;
  std::mutex mutex;  // guards what follows except `done`
  std::condition_variable changed;
  std::list<Piece> waiting;
  std::uint64_t queued = 0;
  std::uint64_t begun = 0;
  CopyDirection direction = CopyDirection::out;                  // of the pieces that threads copy
  std::array<std::uint64_t, kThreads> copying = {kNone, kNone};  // the piece of each thread
  std::atomic<std::uint64_t> done{0};  // the first ones, so many, are copied
  bool stopping = false;

  bool may_begin() const {
    return !waiting.empty() && (waiting.front().direction == direction || done == begun);
  }
};

namespace {

class CopyFence final : public Fence {
 public:
  CopyFence(std::shared_ptr<const std::atomic<std::uint64_t>> done, std::uint64_t queued)
      : done_(std::move(done)), queued_(queued) {}
  bool passed() const { return done_->load(std::memory_order_acquire) >= queued_; }

 private:
  const std::shared_ptr<const std::atomic<std::uint64_t>> done_;
  const std::uint64_t queued_;  // before the fence
};

}  // namespace

HostCopies::HostCopies(Populate populate) : queue_(std::make_shared<Queue>(std::move(populate))) {
  threads_.reserve(kThreads);
}

void HostCopies::stop() {
  if (in_forked_child()) {
    // The threads are the parent's, and one may hold the lock or wait: queue and threads are
    // leaked.
    for (auto& thread : threads_) {
      [[maybe_unused]] const std::thread* const parents = thread.release();
    }
    static_cast<void>(new std::shared_ptr<Queue>(queue_));
    threads_.clear();
    return;
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stopping = true;
  }
  queue_->changed.notify_all();
  for (const auto& thread : threads_) thread->join();
  threads_.clear();
}

void HostCopies::copy(CopyDirection direction, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(queue_->mutex);
  while (threads_.size() < kThreads) {
    try {
      threads_.push_back(
          start_thread("vtensor-copies", ThreadRole::caller,
                       [queue = queue_, thread = threads_.size()] { work(*queue, thread); }));
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      break;  // one thread copies, and the next call tries again
    }
  }
  std::list<Piece> pieces;
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    pieces.push_back({direction, static_cast<std::byte*>(to) + at,
                      static_cast<const std::byte*>(from) + at, std::min(kPiece, bytes - at)});
  }
  queue_->queued += pieces.size();
  queue_->waiting.splice(queue_->waiting.end(), pieces);
  queue_->changed.notify_all();
}

FencePtr HostCopies::fence() const {
  const std::lock_guard lock(queue_->mutex);
  if (queue_->done == queue_->queued) return nullptr;
  return std::make_shared<const CopyFence>(
      std::shared_ptr<const std::atomic<std::uint64_t>>(queue_, &queue_->done), queue_->queued);
}

bool HostCopies::passed(const Fence& fence) {
  return static_cast<const CopyFence&>(fence).passed();
}

bool HostCopies::wait(const Fence& fence, std::chrono::nanoseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  for (; !passed(fence); std::this_thread::sleep_for(std::chrono::microseconds(50))) {
    if (std::chrono::steady_clock::now() >= until) return false;
  }
  return true;
}

void HostCopies::work(Queue& queue, std::size_t thread) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.changed.wait(
        lock, [&] { return queue.may_begin() || (queue.stopping && queue.waiting.empty()); });
    if (queue.waiting.empty()) return;
    const Piece piece = queue.waiting.front();
    queue.waiting.pop_front();
    queue.direction = piece.direction;
    queue.copying[thread] = queue.begun++;
    lock.unlock();
    if (piece.direction == CopyDirection::in) {
      queue.populate(piece.to, piece.bytes);
      copy_past_caches(piece.to, piece.from, piece.bytes);
    } else {
      // Into new memory, whose pages the kernel clears at each first store: they are in the cache.
      std::memcpy(piece.to, piece.from, piece.bytes);
    }
    lock.lock();
    queue.copying[thread] = kNone;
    queue.done.store(std::min(queue.begun, std::ranges::min(queue.copying)),
                     std::memory_order_release);
    queue.changed.notify_all();
  }
}

}  // namespace vtensor
