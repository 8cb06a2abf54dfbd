#include "policy/pending_unmap.h"

#include <algorithm>

namespace vtensor {

namespace {

constexpr std::chrono::nanoseconds kRetryRefused = std::chrono::milliseconds(250);

}  // namespace

void PendingUnmap::touch(Interval slots) {
  if (slots.empty()) return;
  touched_ = touched_.empty() ? slots
                              : Interval{std::min(touched_.begin, slots.begin),
                                         std::max(touched_.end, slots.end)};
}

void PendingUnmap::begin(std::vector<Interval> slots, std::vector<FencePtr> after) {
  slots_ = std::move(slots);
  after_ = std::move(after);
  touched_ = {};
}

std::vector<Interval> PendingUnmap::first(std::size_t most) const {
  std::vector<Interval> some;
  std::size_t left = std::max<std::size_t>(1, most);
  for (const Interval slots : slots_) {
    if (left == 0) break;
    some.push_back({slots.begin, slots.begin + std::min(left, slots.size())});
    left -= some.back().size();
  }
  return some;
}

void PendingUnmap::remove(Interval slots) {
  if (slots.empty() || slots_.empty()) return;
  std::vector<Interval> rest;
  for (const Interval interval : slots_) {
    const Interval before{interval.begin, std::min(interval.end, slots.begin)};
    const Interval after{std::max(interval.begin, slots.end), interval.end};
    if (!before.empty()) rest.push_back(before);
    if (!after.empty()) rest.push_back(after);
  }
  slots_ = std::move(rest);
}

void PendingUnmap::refused(std::exception_ptr error) {
  refusal_ = std::move(error);
  retry_at_ = std::chrono::steady_clock::now() + kRetryRefused;
}

}  // namespace vtensor
