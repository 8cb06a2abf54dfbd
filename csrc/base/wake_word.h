// A word on which one thread sleeps until another thread wakes it, of this process or of one that
// maps the word too. Zeroed memory is a valid word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace vtensor {

class WakeWord {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Makes no system call unless the thread sleeps.
  void wake() noexcept {
    if (set()) syscall(SYS_futex, &state_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
  // Sleeps until `wake` is called; returns at once if it was called since `reset`. Sleeps until
  // `until` at most, and may return for no reason.
  void sleep(Time until) noexcept {
    if (!arm()) return;
    // FUTEX_WAIT_BITSET takes the time of CLOCK_MONOTONIC, which is that of steady_clock.
    const auto since_boot = until.time_since_epoch();
    const auto seconds = std::chrono::floor<std::chrono::seconds>(since_boot);
    const timespec at{.tv_sec = seconds.count(), .tv_nsec = (since_boot - seconds).count()};
    syscall(SYS_futex, &state_, FUTEX_WAIT_BITSET, asleep, until == Time::max() ? nullptr : &at,
            nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  // Called before the thread looks for work: a `wake` from here on ends the next sleep.
  void reset() noexcept { state_.exchange(awake); }

  // The first halves of `wake` and `sleep`, for a thread that sleeps on another word than this one.
  // `set` says whether the thread sleeps, or is about to; `arm` whether it may sleep.
  bool set() noexcept { return state_.exchange(woken) == asleep; }
  bool arm() noexcept {
    std::uint32_t expected = awake;
    return state_.compare_exchange_strong(expected, asleep);
  }

 private:
  enum State : std::uint32_t { awake, woken, asleep };

  std::atomic<std::uint32_t> state_{awake};
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
};

}  // namespace vtensor
