#include "tensor/row_faults.h"

#include <algorithm>

namespace vtensor {

std::ptrdiff_t RowFaults::position_of(std::uintptr_t at) const noexcept {
  const std::size_t in_row = (at - base()) % row_bytes();
  if (in_row < shape_.phase) return -1;
  return static_cast<std::ptrdiff_t>((in_row - shape_.phase) /
                                     std::max<std::size_t>(1, shape_.item_bytes));
}

// Positions are counted from the owner's first, as it counts them.
void RowFaults::name(faults::Text& text, std::uintptr_t at) const noexcept {
  const auto begin = static_cast<std::ptrdiff_t>(begin_.load(std::memory_order_relaxed));
  const std::ptrdiff_t position = position_of(at) - begin;
  if (position < 0) {
    text << "memory before the first position";
  } else {
    text << "position " << static_cast<std::size_t>(position);
  }
  if (shape_.rows > 1) text << " of row " << (at - base()) / row_bytes();
  text << " of the VTensor at ";
  text.address(base() + shape_.phase + static_cast<std::size_t>(begin) * shape_.item_bytes);
}

void RowFaults::explain(faults::Text& text, std::uintptr_t at) const noexcept {
  if (!owned_.load(std::memory_order_relaxed)) {
    text << "no page is mapped there, because the tensor is closed: keep an alias() of what is "
            "needed longer";
    return;
  }
  const auto begin = static_cast<std::ptrdiff_t>(begin_.load(std::memory_order_relaxed));
  const auto end = static_cast<std::ptrdiff_t>(end_.load(std::memory_order_relaxed));
  const std::ptrdiff_t position = position_of(at);
  const auto length = static_cast<std::size_t>(end - begin);
  if (position < begin) {
    text << "no page is mapped there, because positions at the front were given back: keep a view "
            "of what "
            "is needed longer";
  } else if (position >= static_cast<std::ptrdiff_t>(shape_.capacity)) {
    text << "no page is ever mapped there, because the tensor's capacity ends before: check what "
            "computed the address";
  } else if (position >= end) {
    text << "no page is mapped there, because the tensor has " << length
         << " positions: call extend() first";
  } else {
    text << "the tensor has " << length
         << " positions now, so a page is there: it came after the fault, or is shared with a fork "
            "and read-only; call unshare() before such a write";
  }
}

}  // namespace vtensor
