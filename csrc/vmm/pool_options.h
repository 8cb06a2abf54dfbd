// What a pool is made with.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace vtensor {

enum class ZeroPolicy : std::uint8_t {
  never,
  new_owner,  // a page shows zeros to a buffer that was not the last to have it
  always,     // whenever it is taken
};

inline constexpr std::size_t kParkByBudget = std::numeric_limits<std::size_t>::max();

// Sizes in bytes.
struct PoolOptions {
  std::size_t budget = 0;  // 0: what the driver says is available and no other pool was promised
  ZeroPolicy zero = ZeroPolicy::new_owner;
  // What a tensor may have mapped ahead of need. 0: the background does nothing but explicit
  // prepare() calls and what has to wait for a fence.
  std::size_t ahead = 0;
  // What freed tensors may leave mapped for the next of the same shape. kParkByBudget: a quarter of
  // the budget.
  std::size_t park = 0;
  std::size_t low = 0;  // free memory that the mapper keeps made
  std::size_t high = std::numeric_limits<std::size_t>::max();  // free memory kept at most
  std::chrono::nanoseconds max_age{0};                         // of free memory; 0: any
  std::size_t reserve = 0;  // of the device's memory, left to others
  std::chrono::nanoseconds patience = std::chrono::seconds(60);  // the bound of every wait (I12)
};

}  // namespace vtensor
