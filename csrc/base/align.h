// Alignment, and sizes that cannot overflow silently.
#pragma once

#include <cstddef>
#include <optional>

namespace vtensor {

constexpr std::size_t ceil_div(std::size_t n, std::size_t unit) {
  return n / unit + (n % unit != 0);
}

// `a - b`, or 0 if that is less than 0; as C++26 has it.
constexpr std::size_t sub_sat(std::size_t a, std::size_t b) { return a > b ? a - b : 0; }

// `a * b`, or nothing if the product passes SIZE_MAX.
inline std::optional<std::size_t> checked_multiply(std::size_t a, std::size_t b) {
  std::size_t product;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

}  // namespace vtensor
