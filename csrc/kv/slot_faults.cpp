#include "kv/slot_faults.h"

#include <utility>

namespace vtensor {

SlotFaults::SlotFaults(const SlotCacheShape& shape, RowGroup group,
                       std::shared_ptr<const SlotLengths> lengths)
    : slots_(shape.slots),
      max_length_(shape.max_length),
      group_(std::move(group)),
      lengths_(std::move(lengths)) {}

SlotFaults::Place SlotFaults::place_of(std::uintptr_t at) const noexcept {
  const std::size_t row_bytes = bytes() / (group_.rows * slots_);
  const std::size_t offset = at - base();
  const std::size_t row = offset / row_bytes, in_row = offset % row_bytes;
  return {row / slots_, row % slots_, in_row / group_.item_bytes, in_row % group_.item_bytes};
}

void SlotFaults::name(faults::Text& text, std::uintptr_t at) const noexcept {
  const Place place = place_of(at);
  std::size_t first_row = 0;
  auto content = group_.contents.begin();
  while (first_row + content->rows() <= place.row) first_row += (content++)->rows();
  const std::size_t part_bytes = group_.item_bytes / content->layers.size();
  const std::size_t part = place.byte / part_bytes;
  const std::size_t layer = content->layers[part];
  text << (content->values ? "V" : "K") << " of layer " << layer;
  if (content->heads != 0) text << ", head " << place.row - first_row;
  text << ", slot " << place.slot << ", token " << place.token << " of the KVCache of " << slots_
       << " slots of " << max_length_ << " tokens with cache[" << layer << "]["
       << (content->values ? "1" : "0") << "] at ";
  text.address(base() + bytes() / group_.rows * first_row + part * part_bytes);
}

void SlotFaults::explain(faults::Text& text, std::uintptr_t at) const noexcept {
  const Place place = place_of(at);
  const auto [state, length, away, closed] = lengths_->glimpse(place.slot, group_.band);
  if (closed) {
    text << "no page is mapped there, because the cache is closed: make a new one";
    return;
  }
  if (place.token >= max_length_) {
    text << "no page is ever mapped there: check what computed the address";
  } else if (state == SlotState::free) {
    text
        << "no page is mapped there, because the slot is free: alloc() names the slots in use, and "
           "step() gives them pages";
  } else if (state == SlotState::swapped) {
    text << "no page is mapped there, because the slot is swapped out: call swap_in() first";
  } else if (away) {
    text << "no page is mapped there, because band " << group_.band
         << " of the slot is swapped out: call swap_in() for it first";
  } else if (place.token >= length) {
    text << "no page is mapped there, because the slot has " << length
         << " tokens: call step() first, with a length of at least " << place.token + 1
         << " for it";
  } else if (place.token < group_.first_seen(length)) {
    text << "no page is mapped there, because the layer's window of " << group_.window
         << " has given back what is before token " << group_.first_seen(length)
         << ": write what the window can still see";
  } else {
    text << "the slot has " << length
         << " tokens now, so a page is there: it came after the fault, or is shared and read-only; "
            "call unshare() before such a write";
  }
}

}  // namespace vtensor
