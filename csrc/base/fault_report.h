// Says, where it was asked to, what a SIGSEGV or SIGBUS of the host hit among our addresses, and
// hands the signal on to the handler that was there before. Reports are made inside the handler: no
// locks, no allocation, no exceptions.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace vtensor::faults {

// A line of a report. What does not fit is cut off.
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

// What another thread may be writing: one of its values. Its owner writes it as any other.
template <typename T>
T glimpse(const T& value) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(value)).load(std::memory_order_relaxed);
}

// Addresses that were reserved. What it says is asked inside a signal handler, while any thread may
// be changing what it is about.
class Range {
 public:
  Range() = default;
  virtual ~Range() = default;
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  std::uintptr_t base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // Names what `at` is the address of, to stand behind "a write to".
  virtual void name(Text& text, std::uintptr_t at) const noexcept = 0;
  // Why nothing can be touched there, and what to do.
  virtual void explain(Text& text, std::uintptr_t at) const noexcept = 0;
  // Its memory is away, which is why, from now on or until now.
  void set_asleep(bool asleep) noexcept { asleep_.store(asleep, std::memory_order_relaxed); }
  bool asleep() const noexcept { return asleep_.load(std::memory_order_relaxed); }

 private:
  friend struct Ranges;

  std::atomic<bool> asleep_{false};

  std::uintptr_t base_ = 0;
  std::size_t bytes_ = 0;
  bool on_device_ = false;
  std::atomic<Range*> next_{nullptr};
  Range* previous_ = nullptr;
};

// Has reports forget a range. Never fails, and waits for no report.
struct Forget {
  void operator()(Range* range) const noexcept;
};
using Known = std::unique_ptr<Range, Forget>;

// Has reports know [base, base + bytes) as `range`. `on_device`: the host cannot touch what is
// mapped there.
Known know(std::unique_ptr<Range> range, std::uintptr_t base, std::size_t bytes,
           bool on_device) noexcept;

// From now on faults at our addresses are reported to the file descriptor `to`. Where another
// handler stands before ours, it is left there.
void explain(int to);
// Nothing is reported any more. Our handler goes, but where another was installed since: that one
// may hand on to ours, which then only hands on.
void explain_nothing();

}  // namespace vtensor::faults
