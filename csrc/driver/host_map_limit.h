// Keeps the process away from vm.max_map_count, the kernel's limit on mappings. At the limit the
// kernel refuses every mmap, even one that leaves fewer mappings, and every munmap that splits one.
// So new mappings are refused before the limit is reached. And for unmapping and undoing, which
// must not fail there, a few mappings are kept as ballast to throw off.
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
  MapLimit(const MapLimit&) = delete;
  MapLimit& operator=(const MapLimit&) = delete;

  // Throws DriverError if `more` new mappings would reach into the headroom.
  void admit(std::ptrdiff_t more) {
    if (more <= 0) return;
    const std::ptrdiff_t then = ours_.load(std::memory_order_relaxed) + more;
    if (then > known_good_.load(std::memory_order_relaxed)) check_now(more);
  }
  // The same by the kernel's count of this moment, for an operation that it has refused already.
  void check_now(std::ptrdiff_t more);
  // Host drivers now have `delta` more mappings.
  void add(std::ptrdiff_t delta) { ours_.fetch_add(delta, std::memory_order_relaxed); }

  // Makes room after the kernel has refused. False if no ballast is left; it is taken on again when
  // there is room.
  bool throw_off_ballast();

  // For messages, after the kernel has refused `bytes` more: the limit in the way, what there is,
  // and what to do.
  std::string advice(std::size_t bytes = 0) const;

 private:
  void take_ballast();

  const Source source_;
  std::mutex mutex_;
  std::atomic<std::ptrdiff_t> ours_{0};
  // While `ours_` is at most this, the kernel's count need not be read: half of the room seen last.
  // The other half is for mappings that the rest of the process makes meanwhile.
  std::atomic<std::ptrdiff_t> known_good_{-1};
  char* ballast_ = nullptr;
};

}  // namespace vtensor
