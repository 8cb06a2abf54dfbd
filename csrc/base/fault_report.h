// Reports which object of the library a SIGSEGV or SIGBUS hit, and passes the signal to the handler
// that was installed before. Reports are made inside the handler: no locks, no allocation, no
// exceptions, and a bounded wait for their reader.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace vtensor::faults {

// The text of a report, cut off where its memory ends.
class Text {
 public:
  Text& operator<<(std::string_view text) noexcept;
  Text& operator<<(std::size_t number) noexcept { return write(number, 10); }
  Text& address(std::uintptr_t at) noexcept { return (*this << "0x").write(at, 16); }
  std::string_view view() const noexcept { return {characters_.data(), size_}; }

 private:
  Text& write(std::size_t number, int digits) noexcept;

  std::array<char, 1000> characters_;
  std::size_t size_ = 0;
};

// Reads a value that another thread may be writing without an atomic.
template <typename T>
T glimpse(const T& value) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(value)).load(std::memory_order_relaxed);
}

// Reserved addresses, and how reports describe a fault there. Signal handlers call the functions,
// while any thread may change what the functions read.
class Range {
 public:
  virtual ~Range() = default;
  Range& operator=(Range&&) = delete;

  std::uintptr_t base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // The host cannot access the memory.
  bool on_device() const noexcept { return on_device_; }
  // Names the thing at `at`, to follow "a write to".
  virtual void name(Text& text, std::uintptr_t at) const noexcept = 0;
  // Says why an access to `at` faults, and what to do.
  virtual void explain(Text& text, std::uintptr_t at) const noexcept = 0;
  // A range that is asleep has no memory, which explains any fault.
  void set_asleep(bool asleep) noexcept { asleep_.store(asleep, std::memory_order_relaxed); }
  bool asleep() const noexcept { return asleep_.load(std::memory_order_relaxed); }
  // Whether to report a fault at `at`: true once an address, for a few addresses. When a handler
  // returns, as Python's do, the same fault happens again for ever.
  bool is_first_report(std::uintptr_t at) noexcept;

 private:
  friend class Ranges;
  friend struct Forget;

  std::array<std::atomic<std::uintptr_t>, 8> reported_{};

  std::atomic<bool> asleep_{false};
  std::uintptr_t base_ = 0;
  std::size_t bytes_ = 0;
  bool on_device_ = false;
  std::uint32_t made_in_ = 0;  // fork_depth of the process that made the range
  std::atomic<Range*> next_{nullptr};
  Range* previous_ = nullptr;
};

// Ends reports of a range. Never fails, and waits for no report.
struct Forget {
  void operator()(Range* range) const noexcept;
};
using Known = std::unique_ptr<Range, Forget>;

// Reports faults in [base, base + bytes) as `range` says.
Known know(std::unique_ptr<Range> range, std::uintptr_t base, std::size_t bytes,
           bool on_device) noexcept;

// Whether the address lies in a range that is asleep.
bool asleep_at(std::uintptr_t at) noexcept;

// Starts reporting faults at our addresses to the file descriptor `to`. A handler that was
// installed after ours stays.
void explain(int to);
// Starts reporting in a forked child, where our addresses fault: to the parent's file descriptor,
// or else to standard error. Makes system calls only, because a thread of the parent may hold any
// lock.
void explain_in_child() noexcept;
// Stops reporting. Removes our handler, unless another one was installed later: the other may call
// ours, and ours then only passes the signal on.
void explain_nothing();

}  // namespace vtensor::faults
