// Keeps the process away from vm.max_map_count. At that limit the kernel refuses every mmap, even
// one that leaves fewer mappings, and every munmap that splits one. So new mappings are refused
// before it, and a few are kept as ballast for unmapping and undoing, which must not fail.
//
// Drivers count the most that their operations may add. The kernel's own count takes time by the
// mapping, so it is read once half of the room seen last is used up; the rest of the process makes
// mappings too.
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
  // Where the facts come from: the kernel, or a test.
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
  // Counts mappings that may be made in any case. Returns how many are left to be counted.
  std::ptrdiff_t add(std::size_t more) {
    const auto n = static_cast<std::ptrdiff_t>(more);
    return left_.fetch_sub(n, std::memory_order_relaxed) - n;
  }
  // As `admit`, by the kernel's count of this moment, for an operation that it has refused already.
  void check_now(std::size_t more);

  // Makes room after the kernel has refused. False if no ballast is left; it is taken on again when
  // there is room.
  bool throw_off_ballast();

  // For the handlers of fork(2): a child, which may make a driver of its own, finds it unlocked.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // For messages, after the kernel has refused `bytes` more: the limit in the way, what there is,
  // and what to do.
  std::string advice(std::size_t bytes = 0) const;

 private:
  void take_ballast();

  const Source source_;
  std::mutex mutex_;
  std::atomic<std::ptrdiff_t> left_{0};  // to be counted before the kernel's count is read
  char* ballast_ = nullptr;
};

}  // namespace vtensor
