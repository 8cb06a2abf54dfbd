// Keeps the process away from vm.max_map_count. At that limit the kernel refuses every mmap, even
// one that leaves fewer mappings, and every munmap that splits one. So the library refuses new
// mappings before the limit, and keeps a few as ballast: unmapping and undoing must not fail.
//
// Drivers count the most mappings that their operations may add. The kernel's count takes time by
// the mapping, so it is read again when half of the room seen last is used up: the rest of the
// process makes mappings too.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

namespace vtensor {

// One for all host drivers of the process. Safe from any thread.
class MapLimit {
 public:
  // The source of the facts: the kernel, or a test.
  struct Source {
    std::function<std::size_t()> limit;  // vm.max_map_count
    std::function<std::size_t()> count;  // all mappings of this process
  };
  static Source kernel();
  static MapLimit& of_process();

  explicit MapLimit(Source source) : source_(std::move(source)) {}
  ~MapLimit() { throw_off_ballast(); }
  MapLimit& operator=(MapLimit&&) = delete;

  // Counts `more` new mappings. Throws DriverError if they would reach into the headroom.
  void admit(std::size_t more) {
    if (add(more) < 0) check_now(more);
  }
  // Counts `more` new mappings that may be made in any case. Returns how many may follow before the
  // next reading of the kernel's count; negative: one is due.
  std::ptrdiff_t add(std::size_t more) {
    const auto n = static_cast<std::ptrdiff_t>(more);
    return left_.fetch_sub(n, std::memory_order_relaxed) - n;
  }
  // `admit`, by the kernel's count of this moment: after a refusal of the kernel.
  void check_now(std::size_t more);

  // Unmaps the ballast, after the kernel has refused a call. False if there is none; check_now()
  // makes it again when there is room.
  bool throw_off_ballast();

  // For fork handlers: the child, which may make a driver, finds the mutex free.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // For messages, after the kernel has refused `bytes` more: which limit, how much is used, and
  // what to do.
  std::string advice(std::size_t bytes = 0) const;

 private:
  void take_ballast();

  const Source source_;
  std::mutex mutex_;
  std::atomic<std::ptrdiff_t> left_{0};  // mappings before the kernel's count is read again
  char* ballast_ = nullptr;
};

}  // namespace vtensor
