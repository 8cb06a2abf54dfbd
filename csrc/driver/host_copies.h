// The copying stream of the host: threads of our own that make the copies which callers queue.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "driver/driver.h"

namespace vtensor {

// Copies in one direction run side by side. A copy in the other direction waits for those queued
// before it, so their order is kept as far as it can be seen.
class HostCopies {
 public:
  // Makes the memory of mapped pages present, before a copy comes in; called in any thread.
  using Populate = std::function<void(std::byte* at, std::size_t bytes)>;

  explicit HostCopies(Populate populate);
  ~HostCopies() { stop(); }
  HostCopies& operator=(HostCopies&&) = delete;

  // Queues one copy; the threads start with the first. Throws std::system_error, with nothing
  // queued, if no thread can be made.
  void copy(CopyDirection direction, void* to, const void* from, std::size_t bytes);
  // A point after all copies queued so far; null if all are done.
  FencePtr fence() const;
  static bool passed(const Fence& fence);
  // Waits. False if the fence has not passed by then.
  static bool wait(const Fence& fence, std::chrono::nanoseconds patience);
  // Returns when all queued copies are done and the threads have ended.
  void stop();

 private:
  struct Queue;
  static void work(Queue& queue, std::size_t thread);

  const std::shared_ptr<Queue> queue_;
  std::vector<std::unique_ptr<std::thread>> threads_;
};

}  // namespace vtensor
