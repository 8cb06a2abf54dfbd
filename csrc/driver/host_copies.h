// The copying stream of the host: threads of our own that copy what callers queue, beside them.
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

// Copies happen in the order in which they were queued, as far as that can be seen: those in one
// direction run side by side, and those in the other wait for them.
class HostCopies {
 public:
  enum class Direction : std::uint8_t { out, in };

  // How a piece of a copy that comes in is written; from any thread.
  using Write = std::function<void(std::byte* to, const std::byte* from, std::size_t bytes)>;

  explicit HostCopies(Write write);
  ~HostCopies() { stop(); }
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Queues one copy; the threads start with the first. Throws std::system_error where there can be
  // no thread: nothing is queued then.
  void copy(Direction direction, void* to, const void* from, std::size_t bytes);
  // A point behind what is queued; null where all of that is copied.
  FencePtr fence() const;
  static bool passed(const Fence& fence);
  // False where it has not passed by then.
  static bool wait(const Fence& fence, std::chrono::nanoseconds patience);
  // Returns once what is queued is copied and the threads have ended.
  void stop();

 private:
  struct Queue;
  static void work(Queue& queue);

  const std::shared_ptr<Queue> queue_;
  std::vector<std::unique_ptr<std::thread>> threads_;
};

}  // namespace vtensor
