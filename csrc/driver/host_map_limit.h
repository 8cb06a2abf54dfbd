// Keeps the process away from vm.max_map_count, the kernel's limit on mappings. At the limit even
// an munmap inside a merged mapping fails, so headroom is kept for what a rollback or a close may
// split.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>

namespace vtensor {

// One for all host drivers of the process.
class MapLimit {
 public:
  // Where the facts come from: the kernel, or a test.
  struct Source {
    std::function<std::size_t()> limit;  // vm.max_map_count
    std::function<std::size_t()> count;  // mappings of this process, everybody's
  };
  static Source kernel();
  static MapLimit& of_process();

  explicit MapLimit(Source source) : source_(std::move(source)) {}

  // Throws DriverError where `more` new mappings would reach into the headroom.
  void admit(std::ptrdiff_t more) {
    if (ours_.load(std::memory_order_relaxed) + more >
        known_good_.load(std::memory_order_relaxed)) {
      sample(more);
    }
  }
  // Tells that host drivers now have `delta` more mappings.
  void add(std::ptrdiff_t delta) { ours_.fetch_add(delta, std::memory_order_relaxed); }

 private:
  void sample(std::ptrdiff_t more);

  const Source source_;
  std::mutex sampling_;
  std::atomic<std::ptrdiff_t> ours_{0};
  // While `ours_` stays below, no look at the kernel's count is needed: half of the room seen last.
  // The other half is for mappings that others make meanwhile.
  std::atomic<std::ptrdiff_t> known_good_{-1};
};

}  // namespace vtensor
