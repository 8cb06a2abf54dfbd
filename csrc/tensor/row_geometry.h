// Where the positions of a row lie in its pages.
#pragma once

#include <cstddef>

#include "base/align.h"
#include "base/interval.h"
#include "vmm/reservation.h"

namespace vtensor {

class RowGeometry {
 public:
  RowGeometry(const RowShape& shape, std::size_t page_size)
      : item_bytes_(shape.item_bytes), phase_(shape.phase), page_size_(page_size) {}

  // Bytes from the beginning of a row's first page to a position.
  std::size_t offset(std::size_t position) const { return phase_ + position * item_bytes_; }
  std::size_t bytes(Interval positions) const { return positions.size() * item_bytes_; }
  // The pages that hold `positions`.
  Interval indices_of(Interval positions) const {
    if (positions.empty()) return {};
    return {offset(positions.begin) / page_size_, ceil_div(offset(positions.end), page_size_)};
  }
  // How many positions from 0 on lie wholly in pages below `index`.
  std::size_t whole_below(std::size_t index) const {
    const std::size_t end = index * page_size_;
    return end > phase_ ? (end - phase_) / item_bytes_ : 0;
  }
  // The first position that lies wholly past the pages of `positions`.
  std::size_t reach(Interval positions) const {
    const std::size_t end = indices_of(positions).end * page_size_;
    return end > phase_ ? ceil_div(end - phase_, item_bytes_) : 0;
  }

 private:
  std::size_t item_bytes_;
  std::size_t phase_;
  std::size_t page_size_;
};

}  // namespace vtensor
