// A half-open interval of page indices, positions or bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace vtensor {

struct Interval {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool contains(std::size_t i) const { return begin <= i && i < end; }

  friend bool operator==(const Interval&, const Interval&) = default;
};

inline Interval intersection(Interval a, Interval b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Interval{} : both;
}

// The smallest interval that contains both.
inline Interval hull(Interval a, Interval b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// The parts of `a` before `b` and after `b`; either may be empty.
inline std::array<Interval, 2> difference(Interval a, Interval b) {
  return {{{a.begin, std::min(a.end, b.begin)}, {std::max(a.begin, b.end), a.end}}};
}

}  // namespace vtensor
