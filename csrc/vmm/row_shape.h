// How a reservation of addresses is divided.
#pragma once

#include <compare>
#include <cstddef>

namespace vtensor {

// A position is what one step of growth adds to a row.
struct RowShape {
  std::size_t rows = 0;
  std::size_t item_bytes = 0;  // of one position in one row
  std::size_t capacity = 0;    // positions
  std::size_t phase = 0;       // bytes before position 0 in a row's first page
  bool zeroed = false;         // pages are zeroed even if they come back to this buffer
  std::size_t row_stride = 0;  // pages from one row to the next; 0: they lie side by side

  friend auto operator<=>(const RowShape&, const RowShape&) = default;
};

}  // namespace vtensor
