// The shape of a KV cache: its slots, and the rows that each of them has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace vtensor {

// What each token's item in a row, or in some neighbouring ones, consists of: K or V of some
// layers, in equal parts.
struct RowContent {
  std::vector<std::size_t> layers = {0};  // the first is the first that reads the row
  bool values = false;                    // V
  std::size_t heads = 0;                  // rows, one of each head; 0: one row of all heads

  std::size_t rows() const { return std::max<std::size_t>(1, heads); }
};

// Rows that are alike: K and V of some layers, or heads of them.
struct RowGroup {
  std::size_t rows = 0;                   // of a slot; each grows with the slot's length
  std::size_t item_bytes = 0;             // of one position in one row
  std::size_t window = 0;                 // positions that are kept behind the length; 0: all
  std::vector<RowContent> contents = {};  // in their order; if empty, K of layer 0 in each
  std::size_t band = 0;                   // which its layers belong to

  // Where what the window can still see begins, for queries behind `length` positions.
  std::size_t first_seen(std::size_t length) const {
    return window == 0 || length < window ? 0 : length + 1 - window;
  }
};

// Lengths and positions are those of a request: its tokens.
struct SlotCacheShape {
  std::size_t slots = 0;
  std::size_t max_length = 0;
  // What a kernel touches past the length lies in one tile with the last token, wherever tiles
  // begin.
  std::size_t tile = 1;
  std::size_t lookahead = 0;  // positions kept ready behind the length, by the mapper
  std::vector<RowGroup> row_groups;
  std::size_t bands = 1;  // of layers; those of one grow, leave and come back together

  // Positions behind a length that a kernel may touch.
  std::size_t tail() const { return std::min(tile, max_length) - 1; }
};

}  // namespace vtensor
