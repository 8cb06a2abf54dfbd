// The background worker of one pool. It maps and zeroes pages ahead of need, unmaps pages that are
// no longer needed once their fences have passed, zeroes cached pages for their next owner, gives
// back free memory beyond what the pool keeps, and gives memory up for other pools of a shared
// budget. A caller that needs a page before it is ready maps it itself.
//
// It never calls Python and holds no lock while it makes driver calls or waits (I11).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace vtensor {

class PagePool;

class Mapper {
 public:
  Mapper() = default;
  ~Mapper() { stop(); }
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  // The thread keeps nothing of `pool` alive while it sleeps. Throws std::system_error.
  void start(std::weak_ptr<PagePool> pool);
  bool running() const { return running_.load(std::memory_order_acquire); }
  // From any thread; never blocks. After a call, more calls cost nothing until the mapper runs.
  void wake() noexcept;
  // Waits for the thread to end, unless this is the thread. Tasks that it had not begun are left.
  void stop() noexcept;

 private:
  using Time = std::chrono::steady_clock::time_point;

  // Shared with the thread, which outlives the Mapper if it drops the last reference to the pool.
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> woken{false};
    std::atomic<bool> stopping{false};
    std::timed_mutex at_work;  // held by the thread while it keeps the pool alive

    void wake() noexcept;
  };

  class Step;

 public:
  // May outlive the pool.
  class Waker {
   public:
    explicit Waker(std::shared_ptr<Signal> signal) : signal_(std::move(signal)) {}
    void wake() const noexcept {
      if (signal_) signal_->wake();
    }
    // Returns once the mapper keeps nothing of the pool alive, for `patience` at most.
    void outwait(std::chrono::nanoseconds patience) const {
      if (signal_) std::unique_lock at_work(signal_->at_work, patience);
    }

   private:
    std::shared_ptr<Signal> signal_;
  };
  Waker waker() const noexcept { return Waker(signal_); }

 private:
  static void run(const std::weak_ptr<PagePool>& pool, const std::shared_ptr<Signal>& signal);
  static void enter(const std::shared_ptr<PagePool>& pool);
  // Does what can be done now; returns when to look again without being woken. `pause` is how long
  // it waited last for the device.
  static Time serve(const std::shared_ptr<PagePool>& pool, const Signal& signal,
                    std::chrono::nanoseconds& pause);

  std::atomic<bool> running_{false};
  std::shared_ptr<Signal> signal_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace vtensor
