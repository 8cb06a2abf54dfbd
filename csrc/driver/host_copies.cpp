#include "driver/host_copies.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>

#include "base/process.h"
#include "base/thread.h"

namespace vtensor {
namespace {

// One core does not fill the memory's bandwidth, and two leave others to the program.
constexpr std::size_t kThreads = 2;
// A thread copies this much at a time: page tables are locked in pieces of this size.
constexpr std::size_t kPiece = std::size_t{2} << 20;

struct Copy {
  CopyDirection direction;
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
  std::size_t begun = 0;  // bytes that some thread copies or has copied
  std::size_t left;       // bytes that are not copied yet
};

}  // namespace

struct HostCopies::Queue {
  explicit Queue(Write write) : write(std::move(write)) {}

  const Write write;
  std::mutex mutex;  // guards what follows except `done`
  std::condition_variable changed;
  std::deque<Copy> copies;
  std::uint64_t queued = 0;
  std::atomic<std::uint64_t> done{0};  // how many of the first ones queued
  bool stopping = false;

  // The first copy that is not begun in full and need not wait; null if there is none.
  Copy* next() {
    for (Copy& copy : copies) {
      if (copy.direction != copies.front().direction) return nullptr;
      if (copy.begun < copy.bytes) return &copy;
    }
    return nullptr;
  }
  void finish(Copy& copy, std::size_t bytes) {
    copy.left -= bytes;
    const std::uint64_t before = done.load(std::memory_order_relaxed);
    std::uint64_t now = before;
    for (; !copies.empty() && copies.front().left == 0; ++now) copies.pop_front();
    if (now == before) return;
    done.store(now, std::memory_order_release);
    changed.notify_all();
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

HostCopies::HostCopies(Write write) : queue_(std::make_shared<Queue>(std::move(write))) {
  threads_.reserve(kThreads);
}

void HostCopies::stop() {
  if (in_forked_child) {
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
          start_thread("vtensor-copies", ThreadRole::caller, [queue = queue_] { work(*queue); }));
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      break;  // one thread copies, and the next call tries again
    }
  }
  queue_->copies.push_back({direction, static_cast<std::byte*>(to),
                            static_cast<const std::byte*>(from), bytes, 0, bytes});
  ++queue_->queued;
  queue_->changed.notify_all();
}

FencePtr HostCopies::fence() const {
  const std::lock_guard lock(queue_->mutex);
  if (queue_->copies.empty()) return nullptr;
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

void HostCopies::work(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    Copy* copy = queue.next();
    if (copy == nullptr) {
      if (queue.stopping && queue.copies.empty()) return;
      queue.changed.wait(lock);
      continue;
    }
    const std::size_t at = copy->begun;
    const std::size_t bytes = std::min(kPiece, copy->bytes - at);
    copy->begun += bytes;
    const CopyDirection direction = copy->direction;
    std::byte* const to = copy->to + at;
    const std::byte* const from = copy->from + at;
    lock.unlock();
    if (direction == CopyDirection::in) {
      queue.write(to, from, bytes);
    } else {
      std::memcpy(to, from, bytes);
    }
    lock.lock();
    queue.finish(*copy, bytes);
  }
}

}  // namespace vtensor
