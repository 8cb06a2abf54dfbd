#include "kv/slot_lengths.h"

#include <algorithm>
#include <numeric>

#include "base/errors.h"
#include "base/fault_report.h"

namespace vtensor {

SlotLengths::SlotLengths(const SlotCacheShape& shape)
    : max_length_(shape.max_length),
      all_bands_(shape.bands),
      lengths_(shape.slots),
      states_(shape.slots, SlotState::free),
      room_(shape.slots),
      differ_(shape.slots),
      bands_(shape.slots * shape.bands) {
  std::iota(all_bands_.begin(), all_bands_.end(), std::size_t{0});
}

std::size_t SlotLengths::length(std::size_t slot) const {
  return states_[slot] == SlotState::swapped ? length(slot, 0)
                                             : static_cast<std::size_t>(lengths_[slot]);
}

std::size_t SlotLengths::count(SlotState state) const {
  return static_cast<std::size_t>(std::count(states_.begin(), states_.end(), state));
}

bool SlotLengths::find_due(std::span<const std::int64_t> lengths,
                           std::vector<std::size_t>& due) const {
  due.clear();
  if (lengths.size() != lengths_.size()) return false;
  const auto most = static_cast<std::int64_t>(max_length_);
  for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
    const std::int64_t length = lengths[slot];
    if (length < lengths_[slot] || length > most) return false;
    if (length <= room_[slot]) continue;
    if (states_[slot] != SlotState::used) return false;  // free and swapped slots have room 0
    due.push_back(slot);
  }
  return true;
}

SlotLengths::Glimpse SlotLengths::glimpse(std::size_t slot, std::size_t band) const noexcept {
  const Band& own = of(slot)[band];
  const bool differ = faults::glimpse(differ_[slot]) != 0;
  const std::int64_t length = faults::glimpse(differ ? own.length : lengths_[slot]);
  return {faults::glimpse(states_[slot]), static_cast<std::size_t>(length),
          differ && faults::glimpse(own.away), closed_.load(std::memory_order_relaxed)};
}

void SlotLengths::require_used(const Caller& caller, std::size_t slot) const {
  if (states_[slot] == SlotState::swapped)
    throw InvalidArgument("[", caller.operation, "] slot ", slot,
                          " is swapped out: call swap_in first");
  if (states_[slot] == SlotState::free)
    throw InvalidArgument("[", caller.operation, "] slot ", slot,
                          " is free: alloc() names the slots in use");
}

void SlotLengths::require_whole(const Caller& caller, std::size_t slot) const {
  require_used(caller, slot);
  if (!differ_[slot]) return;
  for (const std::size_t band : all_bands_) require_here(caller, slot, band);
  throw InvalidArgument("[", caller.operation, "] slot ", slot,
                        " has bands of different lengths: step() all of them to one "
                        "length, or truncate the slot, first");
}

void SlotLengths::require_here(const Caller& caller, std::size_t slot, std::size_t band) const {
  if (!is_away(slot, band)) return;
  throw InvalidArgument("[", caller.operation, "] slot ", slot, ", band ", band,
                        " is swapped out: call swap_in for it first");
}

void SlotLengths::require_once(const Caller& caller, const char* noun,
                               std::span<const std::size_t> all) {
  for (const std::size_t one : all) {
    if (std::count(all.begin(), all.end(), one) == 1) continue;
    throw InvalidArgument("[", caller.operation, "] ", noun, " ", one,
                          " is named twice: name each ", noun, " once");
  }
}

void SlotLengths::require_one_each(const Caller& caller,
                                   std::span<const std::int64_t> lengths) const {
  if (lengths.size() == lengths_.size()) return;
  throw InvalidArgument("[", caller.operation, "] ", lengths.size(), " lengths were given for ",
                        lengths_.size(),
                        " slots: give one for each slot, 0 where it is not in use");
}

void SlotLengths::require_length(const Caller& caller, std::size_t slot, std::int64_t length,
                                 Bands bands) const {
  // The slot's own length says that all of its bands stay as they are.
  if (length == lengths_[slot]) return;
  if (length > static_cast<std::int64_t>(max_length_)) {
    throw CapacityExceeded("[", caller.operation, "] slot ", slot, " is to have ", length,
                           " tokens, max_len is ", max_length_,
                           ": make the cache with a larger max_len");
  }
  if (states_[slot] == SlotState::free)
    throw InvalidArgument("[", caller.operation, "] slot ", slot, " is free, and is to have ",
                          length, " tokens: call alloc() first, or give it length 0");
  if (states_[slot] == SlotState::swapped)
    throw InvalidArgument("[", caller.operation, "] slot ", slot,
                          " is swapped out: its length must be 0 until swap_in");
  std::int64_t now = bands.empty() ? lengths_[slot] : 0;
  for (const std::size_t band : bands)
    now = std::max(now, static_cast<std::int64_t>(this->length(slot, band)));
  if (length >= now) return;
  throw InvalidArgument("[", caller.operation, "] slot ", slot, " has ", now,
                        " tokens and is to have ", length,
                        ": lengths do not shrink by a step; call truncate(slot, length)");
}

void SlotLengths::require_due(const Caller& caller, std::span<const std::int64_t> lengths,
                              Bands bands, std::vector<std::size_t>& due) const {
  require_once(caller, "band", bands);
  if (!bands.empty() || !find_due(lengths, due)) {
    require_one_each(caller, lengths);
    due.clear();
    for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
      require_length(caller, slot, lengths[slot], bands);
      if (lengths[slot] != lengths_[slot] || room_[slot] < 0) due.push_back(slot);
    }
  }
  for (const std::size_t slot : due) {
    if (!differ_[slot]) continue;
    require_length(caller, slot, lengths[slot], or_all(bands));
    for (const std::size_t band : or_all(bands)) {
      if (bands.empty() || of(slot)[band].length != lengths[slot]) require_here(caller, slot, band);
    }
  }
}

void SlotLengths::require_possible(const Caller& caller, std::span<const std::int64_t> lengths,
                                   Bands bands) const {
  require_once(caller, "band", bands);
  require_one_each(caller, lengths);
  for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
    const std::int64_t length = lengths[slot];
    if (states_[slot] != SlotState::swapped) {
      if (length != 0 || bands.empty()) require_length(caller, slot, length, bands);
      continue;
    }
    const std::int64_t away = of(slot)[0].length, most = static_cast<std::int64_t>(max_length_);
    if (length == 0 || (away <= length && length <= most)) continue;
    throw InvalidArgument("[", caller.operation, "] slot ", slot, " has ", away,
                          " tokens in host memory, max_len is ", most, ", and it is to have ",
                          length, ": give 0, or a length in between");
  }
}

void SlotLengths::require_to_swap(const Caller& caller, std::span<const std::size_t> slots,
                                  Bands bands, bool out) const {
  require_once(caller, "band", bands);
  for (const std::size_t slot : slots) {
    const bool swapped = states_[slot] == SlotState::swapped;
    if (bands.empty() && swapped == out) {
      throw InvalidArgument("[", caller.operation, "] slot ", slot,
                            out ? " is swapped out already: name slots in use"
                                : " is not swapped out: call swap_out first");
    }
    if (bands.empty() && out) require_whole(caller, slot);
    if (!bands.empty()) require_used(caller, slot);
    for (const std::size_t band : bands) {
      if (is_away(slot, band) != out) continue;
      throw InvalidArgument("[", caller.operation, "] slot ", slot, ", band ", band,
                            out ? " is swapped out already: name bands that are here"
                                : " is not swapped out: call swap_out for it first");
    }
  }
  require_once(caller, "slot", slots);
}

void SlotLengths::begin(std::size_t slot, std::size_t length) noexcept {
  states_[slot] = SlotState::used;
  lengths_[slot] = static_cast<std::int64_t>(length);
}

void SlotLengths::end(std::size_t slot) noexcept {
  states_[slot] = SlotState::free;
  lengths_[slot] = room_[slot] = 0;
  differ_[slot] = false;
}

void SlotLengths::step(std::span<const std::int64_t> lengths, std::span<const std::size_t> due,
                       Bands bands) noexcept {
  if (bands.empty()) {
    for (const std::size_t slot : due) differ_[slot] = false;
    std::copy(lengths.begin(), lengths.end(), lengths_.begin());
    return;
  }
  for (const std::size_t slot : due) {
    const std::span<Band> own = differing(slot);
    for (const std::size_t band : bands) own[band].length = lengths[slot];
    derive(slot);
  }
}

void SlotLengths::truncate(std::size_t slot, std::size_t length) noexcept {
  for (Band& band : differing(slot)) band.length = static_cast<std::int64_t>(length);
  derive(slot);
}

void SlotLengths::swap_out(std::size_t slot, Bands bands) noexcept {
  set_away(slot, bands, true);
  if (!bands.empty()) return;
  states_[slot] = SlotState::swapped;
  lengths_[slot] = room_[slot] = 0;
}

void SlotLengths::swap_in(std::size_t slot, Bands bands) noexcept {
  states_[slot] = SlotState::used;
  set_away(slot, bands, false);
}

void SlotLengths::set_away(std::size_t slot, Bands bands, bool away) noexcept {
  const std::span<Band> own = differing(slot);
  for (const std::size_t band : or_all(bands)) own[band].away = away;
  derive(slot);
}

// The slot's bands, for a change of some of them; begins to store a length for each.
std::span<SlotLengths::Band> SlotLengths::differing(std::size_t slot) noexcept {
  const std::size_t bands = all_bands_.size();
  const std::span<Band> own = std::span(bands_).subspan(slot * bands, bands);
  if (!differ_[slot]) std::fill(own.begin(), own.end(), Band{lengths_[slot]});
  differ_[slot] = true;
  return own;
}

// Sets the slot's length to its shortest band's, and differ_ to whether its bands differ.
void SlotLengths::derive(std::size_t slot) noexcept {
  const std::span<const Band> own = of(slot);
  const auto shorter = [](const Band& a, const Band& b) { return a.length < b.length; };
  const std::int64_t least = std::min_element(own.begin(), own.end(), shorter)->length;
  lengths_[slot] = room_[slot] = least;
  differ_[slot] = std::any_of(own.begin(), own.end(), [least](const Band& band) {
    return band.away || band.length != least;
  });
}

}  // namespace vtensor
