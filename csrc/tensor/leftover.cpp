#include "tensor/leftover.h"

namespace vtensor {

Interval Leftover::usable(bool anywhere) const {
  const auto usable = [](Entry entry) {
    return is_writable(entry) && entry.page()->references == 1;
  };
  const std::size_t end = range_.reserved();
  Interval pages{0, range_.first_not({0, end}, usable)};
  while (anywhere && pages.empty() && pages.end < end) {
    pages.begin = pages.end + 1;
    pages.end = range_.first_not({pages.begin, end}, usable);
  }
  return pages;
}

void Leftover::keep(Interval pages, bool dirty, std::uint64_t next) {
  cached_ = unclean_ = pages;
  range_.set_owner(next);
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t index = pages.begin; index < pages.end; ++index)
      range_.at(row, index).page()->dirty = dirty;
  }
}

std::size_t Leftover::take(bool counts) {
  std::size_t clean = range_.first_not(
      cached_, [this](Entry entry) VT_LOCKED { return range_.clean(*entry.page()); });
  // Pages missing before the cached ones are mapped before the extent reaches these.
  if (cached_.begin != 0) clean = 0;
  unclean_ = {std::max(clean, cached_.begin), cached_.end};
  reused_ = counts ? cached_ : Interval{};
  cached_ = {};
  may_keep_ = true;
  return clean;
}

void Leftover::follow(std::size_t end) {
  if (unclean_.empty()) return;
  unclean_.end = std::max(unclean_.end, range_.first_not({unclean_.begin, end}, is_writable));
}

void Leftover::cleaned(std::span<const Reservation::Run> runs) {
  for (const Reservation::Run& run : runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      range_.at(run.row, index).page()->dirty = false;
  }
}

}  // namespace vtensor
