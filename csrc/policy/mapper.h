// The background worker of one pool. It maps and zeroes pages ahead of need, unmaps pages that are
// no longer needed once their fences have passed, zeroes cached pages for their next owner, gives
// back free memory beyond what the pool keeps, and gives memory up for other pools of a shared
// budget. A caller that needs a page before it is ready maps it itself.
//
// It never calls Python and holds no lock while it makes driver calls or waits (I11).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/wake_word.h"

namespace vtensor {

class PagePool;

class Mapper {
  using Time = WakeWord::Time;

 public:
  // What the thread sleeps on. May outlive the pool, and the Mapper: the thread does if it drops
  // the last reference to the pool.
  class Signal {
   public:
    explicit Signal(std::function<WakeWord&()> shared_word)
        : shared_word_(std::move(shared_word)) {}

    // From any thread; never blocks. After a call, more calls cost nothing until the thread runs.
    void wake() noexcept;
    // Returns once the thread keeps nothing of the pool alive, for `patience` at most.
    void outwait(std::chrono::nanoseconds patience) {
      const std::unique_lock at_work(at_work_, patience);
    }

   private:
    friend class Mapper;
    // The thread looks at what there is to do. False if it is to end: then the shared word may be
    // another pool's.
    bool begin() noexcept;
    void sleep(Time until) noexcept;

    const std::function<WakeWord&()> shared_word_;  // empty: the pool shares no budget
    WakeWord own_word_;  // tells wakers of this process whether to look at the shared one
    std::atomic<bool> stopping_{false};
    std::timed_mutex at_work_;  // held by the thread while it keeps the pool alive
  };

  // In a shared budget the thread sleeps on the word that `shared_word` finds (vmm/ledger.h).
  explicit Mapper(std::function<WakeWord&()> shared_word)
      : signal_(std::make_shared<Signal>(std::move(shared_word))) {}

  // The thread keeps nothing of `pool` alive while it sleeps. Throws DriverError if the system has
  // no thread.
  void start(std::weak_ptr<PagePool> pool);
  bool running() const { return thread_ != nullptr; }
  const std::shared_ptr<Signal>& signal() const { return signal_; }
  // Waits for the thread to end, unless this is the thread. Tasks that it had not begun are left.
  void stop() noexcept;

 private:
  class Step;

  static void run(const std::weak_ptr<PagePool>& pool, const std::shared_ptr<Signal>& signal);
  static void enter(const std::shared_ptr<PagePool>& pool);
  // Does what can be done now; returns when to look again without being woken. `pause` is how long
  // it waited last for the device.
  static Time serve(const std::shared_ptr<PagePool>& pool, const Signal& signal,
                    std::chrono::nanoseconds& pause);

  const std::shared_ptr<Signal> signal_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace vtensor
