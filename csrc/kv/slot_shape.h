// The shape of a KV cache: its slots, and the rows that each of them has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace vtensor {

// What a token's item consists of, in one row or in one row a head: K or V of some layers, in equal
// parts.
struct RowContent {
  std::vector<std::size_t> layers = {0};  // in the order of computation
  bool values = false;                    // V
  std::size_t heads = 0;                  // one row a head; 0: one row for all heads

  std::size_t rows() const { return std::max<std::size_t>(1, heads); }
};

// Rows of a slot with the same bytes a token and the same window: K and V of some layers.
struct RowGroup {
  std::size_t rows = 0;                   // of a slot; each grows with the slot's length
  std::size_t item_bytes = 0;             // of one position in one row
  std::size_t window = 0;                 // last positions that are kept; 0: all
  std::vector<RowContent> contents = {};  // of the rows, in their order
  std::size_t band = 0;                   // band index of its layers

  // The first position that the next query of a slot of `length` sees.
  std::size_t first_seen(std::size_t length) const {
    return window == 0 || length < window ? 0 : length + 1 - window;
  }
};

// Lengths and positions count tokens of a request.
struct SlotCacheShape {
  std::size_t slots = 0;
  std::size_t max_length = 0;
  // A kernel reads K and V in tiles of so many tokens, so it may read tile - 1 tokens past the
  // length.
  std::size_t tile = 1;
  std::size_t lookahead = 0;  // positions that the mapper keeps ready past the length
  std::vector<RowGroup> row_groups;
  std::size_t bands = 1;  // groups of layers that grow and are swapped as a unit

  // Positions past a length that a kernel may read.
  std::size_t tail() const { return std::min(tile, max_length) - 1; }
};

}  // namespace vtensor
