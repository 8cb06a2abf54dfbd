#include "policy/pending_unmap.h"

#include <algorithm>

namespace vtensor {

namespace {

constexpr std::chrono::nanoseconds kRetryRefused = std::chrono::milliseconds(250);

}  // namespace

void PendingUnmap::touch(Interval indices) {
  if (indices.empty()) return;
  touched_ = touched_.empty() ? indices
                              : Interval{std::min(touched_.begin, indices.begin),
                                         std::max(touched_.end, indices.end)};
}

void PendingUnmap::begin(std::vector<Interval> indices, std::vector<FencePtr> after) {
  indices_ = std::move(indices);
  after_ = std::move(after);
  touched_ = {};
}

std::vector<Interval> PendingUnmap::first(std::size_t most) const {
  std::vector<Interval> some;
  std::size_t left = std::max<std::size_t>(1, most);
  for (const Interval indices : indices_) {
    if (left == 0) break;
    some.push_back({indices.begin, indices.begin + std::min(left, indices.size())});
    left -= some.back().size();
  }
  return some;
}

void PendingUnmap::remove(Interval indices) {
  if (indices.empty() || indices_.empty()) return;
  std::vector<Interval> rest;
  for (const Interval interval : indices_) {
    const Interval before{interval.begin, std::min(interval.end, indices.begin)};
    const Interval after{std::max(interval.begin, indices.end), interval.end};
    if (!before.empty()) rest.push_back(before);
    if (!after.empty()) rest.push_back(after);
  }
  indices_ = std::move(rest);
}

void PendingUnmap::refused(std::exception_ptr error) {
  refusal_ = std::move(error);
  retry_at_ = std::chrono::steady_clock::now() + kRetryRefused;
}

}  // namespace vtensor
