// The options of a pool.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace vtensor {

enum class ZeroPolicy : std::uint8_t {
  never,
  new_owner,  // when its owner is not the last one that had it
  always,     // whenever a page is taken
};

inline constexpr std::size_t kCacheByBudget = std::numeric_limits<std::size_t>::max();

// Sizes in bytes.
struct PoolOptions {
  std::size_t budget = 0;  // 0: a part of the memory that is free
  // The name of a budget that pools share; empty: the budget is the pool's own.
  std::string shared_budget{};
  ZeroPolicy zero = ZeroPolicy::new_owner;
  // The most that a tensor has mapped ahead of need. 0: the mapper only serves prepare() calls, and
  // unmaps pages that wait for a fence.
  std::size_t prefetch = 0;
  // The most that freed tensors leave mapped for tensors of their shape. kCacheByBudget: a quarter
  // of the budget.
  std::size_t cache = 0;
  std::size_t spare = std::numeric_limits<std::size_t>::max();  // of free pages
  std::size_t device_reserve = 0;  // of the device's memory, left to its other users
  std::chrono::nanoseconds patience = std::chrono::seconds(60);  // the bound of every wait (I12)
};

}  // namespace vtensor
