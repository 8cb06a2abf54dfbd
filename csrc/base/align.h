// Alignment, sizes that cannot overflow silently, and cache lines.
#pragma once

#include <cstddef>
#include <optional>

namespace vtensor {

constexpr std::size_t ceil_div(std::size_t n, std::size_t unit) {
  return n / unit + (n % unit != 0);
}

// `a - b`, or 0 if `b` is larger: std::sub_sat of C++26.
constexpr std::size_t sub_sat(std::size_t a, std::size_t b) { return a > b ? a - b : 0; }

// `a * b`, or nothing if the product passes SIZE_MAX.
inline std::optional<std::size_t> checked_multiply(std::size_t a, std::size_t b) {
  std::size_t product;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

inline constexpr std::size_t kCacheLine = 64;

// Prefetches all cache lines of an object at once; `kWrites`: for writing.
template <bool kWrites = false>
void prefetch_lines(const void* object, std::size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(object);
  for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(begin + at, kWrites);
}

}  // namespace vtensor
