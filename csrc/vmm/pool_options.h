// What a pool is made with.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace vtensor {

enum class ZeroPolicy : std::uint8_t {
  never,
  new_owner,  // a page shows zeros to a client that was not the last to have it
  always,     // whenever it is taken
};

inline constexpr std::size_t kCacheByBudget = std::numeric_limits<std::size_t>::max();

// Sizes in bytes.
struct PoolOptions {
  std::size_t budget = 0;  // 0: a part of the memory that is free
  // The name of the budget that all its pools share; empty: the budget is the pool's own.
  std::string shared_budget{};
  ZeroPolicy zero = ZeroPolicy::new_owner;
  // What a tensor may have mapped ahead of need. 0: the mapper only does explicit prepare() calls,
  // and unmaps what has to wait for a fence.
  std::size_t prefetch = 0;
  // What freed tensors may leave mapped for the next of the same shape. kCacheByBudget: a quarter
  // of the budget.
  std::size_t cache = 0;
  std::size_t spare = std::numeric_limits<std::size_t>::max();  // free pages that keep their memory
  std::size_t device_reserve = 0;  // of the device's memory, left to its other users
  std::chrono::nanoseconds patience = std::chrono::seconds(60);  // the bound of every wait (I12)
};

}  // namespace vtensor
