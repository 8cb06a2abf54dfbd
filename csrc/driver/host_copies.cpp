#include "driver/host_copies.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/thread.h"

namespace vtensor {
namespace {

// Bytes that a thread copies at a time: page tables are locked in pieces of this size.
constexpr std::size_t kPiece = std::size_t{2} << 20;

// Copies with stores that bypass the cache: a piece is larger than a core's cache, and this takes
// half the time of memcpy.
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
  _mm_sfence();  // the stores are visible before the copy's fence passes
  to += done;
  from += done;
  bytes -= done;
#endif
  std::memcpy(to, from, bytes);
}

class CopyFence final : public Fence {
 public:
  CopyFence(std::shared_ptr<const std::atomic<std::uint64_t>> done, std::uint64_t queued)
      : done_(std::move(done)), queued_(queued) {}
  bool passed() const { return done_->load(std::memory_order_acquire) >= queued_; }

 private:
  const std::shared_ptr<const std::atomic<std::uint64_t>> done_;
  const std::uint64_t queued_;  // pieces before the fence
};

}  // namespace

HostCopies::~HostCopies() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (const auto& thread : threads_) thread->join();
}

bool HostCopies::may_begin() const {
  return !waiting_.empty() && (waiting_.front().direction == direction_ || *done_ == begun_);
}

void HostCopies::copy(CopyDirection direction, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  threads_.reserve(kThreads);
  while (threads_.size() < kThreads) {
    try {
      threads_.push_back(start_thread(
          "vtensor-copies", ThreadRole::caller,
          "[host copy] a thread for copies was refused with EAGAIN: raise the limit on threads "
          "(ulimit -u) or on address space (ulimit -v), or end some threads",
          [this, thread = threads_.size()] { work(thread); }));
    } catch (const DriverError&) {
      if (threads_.empty()) throw;
      break;  // one thread suffices; the next call tries again
    }
  }
  std::list<Piece> pieces;
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    pieces.push_back({direction, static_cast<std::byte*>(to) + at,
                      static_cast<const std::byte*>(from) + at, std::min(kPiece, bytes - at)});
  }
  queued_ += pieces.size();
  waiting_.splice(waiting_.end(), pieces);
  changed_.notify_all();
}

FencePtr HostCopies::fence() {
  const std::lock_guard lock(mutex_);
  if (*done_ == queued_) return nullptr;
  return std::make_shared<const CopyFence>(done_, queued_);
}

bool HostCopies::passed(const Fence& fence) {
  return static_cast<const CopyFence&>(fence).passed();
}

void HostCopies::work(std::size_t thread) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return may_begin() || (stopping_ && waiting_.empty()); });
    if (waiting_.empty()) return;
    const Piece piece = waiting_.front();
    waiting_.pop_front();
    direction_ = piece.direction;
    copying_[thread] = begun_++;
    lock.unlock();
    if (piece.direction == CopyDirection::in) {
      populate_(piece.to, piece.bytes);
      copy_past_caches(piece.to, piece.from, piece.bytes);
    } else {
      // memcpy: new host memory is in the cache, because the kernel has just cleared it.
      std::memcpy(piece.to, piece.from, piece.bytes);
    }
    lock.lock();
    copying_[thread] = kNone;
    done_->store(std::min(begun_, std::ranges::min(copying_)), std::memory_order_release);
    changed_.notify_all();
  }
}

}  // namespace vtensor
