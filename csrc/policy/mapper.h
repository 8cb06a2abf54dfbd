// The background worker of one pool. It maps and zeroes pages ahead of need, unmaps unneeded pages
// once their fences have passed, zeroes cached pages for their next owner, gives back spare memory
// beyond the pool's limit, and gives memory up for other pools of a shared budget. A caller that
// needs a page before it is ready maps the page itself.
//
// The worker never calls Python, and holds no lock while it maps, zeroes or unmaps pages, or waits
// (I11).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/wake_word.h"

namespace vtensor {

class PagePool;

// May outlive its pool, if its thread drops the last reference to the pool.
class Mapper : public std::enable_shared_from_this<Mapper> {
  using Time = WakeWord::Time;

 public:
  // `shared_word`, in a shared budget, finds the word on which the thread sleeps (vmm/ledger.h).
  explicit Mapper(std::function<WakeWord&()> shared_word) : shared_word_(std::move(shared_word)) {}

  // Starts the thread if it does not run. A sleeping thread does not keep `pool` alive. Throws
  // DriverError if the system has no thread.
  void start(std::weak_ptr<PagePool> pool);
  bool running() const { return thread_ != nullptr; }
  // From any thread; never blocks. Further calls cost nothing until the thread runs.
  void wake() noexcept;
  // Waits until the thread does not keep the pool alive, for `patience` at most.
  void outwait(std::chrono::nanoseconds patience) {
    const std::unique_lock at_work(at_work_, patience);
  }
  // Called at the end of the pool. Waits for the thread to end, unless the caller is the thread.
  void stop() noexcept;

 private:
  class Step;

  void run(const std::weak_ptr<PagePool>& pool);
  static void enter(const std::shared_ptr<PagePool>& pool);
  // Does all that can be done now; returns when to look again without being woken. `pause`: the
  // last wait for the device.
  Time serve(const std::shared_ptr<PagePool>& pool, std::chrono::nanoseconds& pause);
  void sleep(Time until) noexcept;

  const std::function<WakeWord&()> shared_word_;  // empty: the pool shares no budget
  WakeWord own_word_;         // tells wakers of this process whether to wake the shared word
  std::timed_mutex at_work_;  // held by the thread while it keeps the pool alive
  std::unique_ptr<std::thread> thread_;
};

}  // namespace vtensor
