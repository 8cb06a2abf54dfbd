// Slots whose bands of layers differ: one has more tokens than another, or is in host memory. A
// prompt computed layer by layer needs room for the bands that are being computed (LayerKV, arXiv
// 2410.00428). While all bands of a slot are alike it has no `bands`, and costs nothing here.
#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "kv/slot_cache.h"
#include "tensor/growing.h"

namespace vtensor {

namespace {

std::string in(const Caller& caller, std::size_t slot) {
  return "[" + std::string(caller.operation) + "] slot " + std::to_string(slot);
}

}  // namespace

std::size_t SlotCache::band_length(std::size_t slot, std::size_t band) const {
  const std::vector<Band>& bands = slots_[slot].bands;
  return bands.empty() ? length(slot) : static_cast<std::size_t>(bands[band].length);
}

void SlotCache::require_bands(const Caller& caller, std::span<const std::size_t> bands) const {
  const std::string operation = "[" + std::string(caller.operation) + "] band ";
  for (const std::size_t band : bands) {
    if (band >= shape_.bands) {
      throw InvalidArgument(operation + std::to_string(band) + " does not exist: the cache has " +
                            std::to_string(shape_.bands) + ", numbered from 0");
    }
    if (std::count(bands.begin(), bands.end(), band) != 1) {
      throw InvalidArgument(operation + std::to_string(band) +
                            " is named twice: name each band once");
    }
  }
}

void SlotCache::require_here(const Caller& caller, std::size_t slot, std::size_t band) const {
  if (!is_band_away(slot, band)) return;
  throw InvalidArgument(in(caller, slot) + ", band " + std::to_string(band) +
                        " is swapped out: call swap_in for it first");
}

void SlotCache::require_together(const Caller& caller, std::size_t slot) const {
  require_used(caller, slot);
  for (std::size_t band = 0; band < slots_[slot].bands.size(); ++band)
    require_here(caller, slot, band);
  if (slots_[slot].bands.empty()) return;
  throw InvalidArgument(in(caller, slot) +
                        " has bands of different lengths: step() all of them to one length, or "
                        "truncate the slot, first");
}

// Whether a band is to have another length than it has. The slot's own, the least of its bands,
// says that all stay as they are.
bool SlotCache::is_to_grow(const Caller& caller, std::size_t slot, std::size_t band,
                           std::int64_t length) const {
  if (length == lengths_[slot]) return false;
  const auto now =
      static_cast<std::int64_t>(states_[slot] == SlotState::used ? band_length(slot, band) : 0);
  require_length(caller, slot, length, now);
  return length != now;
}

// The slot's bands as they are, to be changed.
std::vector<SlotCache::Band> SlotCache::bands_of(std::size_t slot) const {
  std::vector<Band> bands(shape_.bands);
  for (std::size_t band = 0; band < bands.size(); ++band)
    bands[band].length = static_cast<std::int64_t>(band_length(slot, band));
  return bands;
}

void SlotCache::forget_bands(std::size_t slot) noexcept {
  for (Band& band : slots_[slot].bands) {
    if (band.swapped != nullptr) leave_swap(*std::exchange(band.swapped, nullptr));
  }
  slots_[slot].bands.clear();
  settle_bands(slot);
}

// The slot's length is the least of its bands'. Those that are alike again are one.
void SlotCache::settle_bands(std::size_t slot) noexcept {
  std::vector<Band>& bands = slots_[slot].bands;
  bool alike = true;
  for (std::size_t band = 0; band < bands.size(); ++band) {
    alike = alike && bands[band].length == bands[0].length && !is_band_away(slot, band);
    lengths_[slot] = std::min(band == 0 ? bands[0].length : lengths_[slot], bands[band].length);
  }
  room_[slot] = lengths_[slot];
  if (alike) bands.clear();
  for (std::size_t band = 0; band < shape_.bands; ++band) {
    std::int64_t& shown = now_->bands[slot * shape_.bands + band];
    shown = SlotsNow::kAsSlot;
    if (!bands.empty()) shown = is_band_away(slot, band) ? SlotsNow::kAway : bands[band].length;
  }
}

void SlotCache::step_bands(const Caller& caller, std::span<const std::int64_t> lengths,
                           std::span<const std::size_t> bands) {
  require_bands(caller, bands);
  if (lengths.size() != slots_.size()) require_lengths(caller, lengths);
  struct Due {
    std::size_t slot;
    std::vector<std::size_t> grown;
    std::vector<Band> bands;
  };
  std::vector<Due> due;
  std::vector<std::size_t> slots;
  std::vector<Growth> growths;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    std::vector<std::size_t> grown;
    const auto length = static_cast<std::size_t>(lengths[slot]);
    for (const std::size_t band : bands) {
      if (!is_to_grow(caller, slot, band, lengths[slot])) continue;
      require_here(caller, slot, band);
      grown.push_back(band);
      for (const std::size_t group : groups_of_[band]) {
        growths.push_back({slots_[slot].buffers[group].get(), needed(group, slot, length),
                           Interval{band_length(slot, band), length}});
      }
    }
    if (grown.empty()) continue;
    finish_prefix(caller, slot);
    due.push_back({slot, std::move(grown), bands_of(slot)});
    slots.push_back(slot);
  }
  settle_copies();
  use(caller);
  if (due.empty()) return;
  grow_all(caller, growths, false);
  for (const Due& it : due) {
    for (const std::size_t band : it.grown) forget_heads(caller, it.slot, groups_of_[band]);
  }
  for (Due& it : due) {
    std::vector<Band>& own = slots_[it.slot].bands;
    if (own.empty()) own.swap(it.bands);
    for (const std::size_t band : it.grown) own[band].length = lengths[it.slot];
    settle_bands(it.slot);
  }
  look_further(slots);
}

void SlotCache::swap_out_bands(const Caller& caller, std::span<const std::size_t> slots,
                               std::span<const std::size_t> bands, const AllocateHost& allocate) {
  require_bands(caller, bands);
  for (const std::size_t slot : slots) {
    require_used(caller, slot);
    for (const std::size_t band : bands) {
      if (!is_band_away(slot, band)) continue;
      throw InvalidArgument(in(caller, slot) + ", band " + std::to_string(band) +
                            " is swapped out already: name bands that are here");
    }
  }
  require_named_once(caller, slots);
  settle_copies();
  for (const std::size_t slot : slots) finish_prefix(caller, slot);
  std::vector<Part> parts;
  std::vector<std::vector<Band>> fresh;
  for (const std::size_t slot : slots) {
    fresh.push_back(bands_of(slot));
    for (const std::size_t band : bands) {
      parts.push_back({slot, groups_of_[band], std::make_unique<Swapped>()});
      parts.back().swapped->length = band_length(slot, band);
    }
  }
  copy_out(caller, parts, nullptr, allocate);
  // From here on nothing is refused.
  auto part = parts.begin();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = slots_[slots[i]];
    if (slot.bands.empty()) slot.bands.swap(fresh[i]);
    for (const std::size_t band : bands) {
      slot.bands[band].swapped = std::move(part->swapped);
      std::erase_if(slot.arriving, [band](const Arriving& copy) { return copy.band == band; });
      send_back(caller, slots[i], (part++)->groups);
    }
    settle_bands(slots[i]);
  }
}

void SlotCache::swap_in_bands(const Caller& caller, std::span<const std::size_t> slots,
                              std::span<const std::size_t> bands) {
  require_bands(caller, bands);
  for (const std::size_t slot : slots) {
    require_used(caller, slot);
    for (const std::size_t band : bands) {
      if (is_band_away(slot, band)) continue;
      throw InvalidArgument(in(caller, slot) + ", band " + std::to_string(band) +
                            " is not swapped out: call swap_out for it first");
    }
  }
  require_named_once(caller, slots);
  settle_copies();
  arriving_.reserve(arriving_.size() + slots.size());
  std::vector<std::vector<Arriving>> arriving(slots.size());
  std::vector<std::pair<std::size_t, std::size_t>> here;  // slots and their bands, by this call
  here.reserve(slots.size() * bands.size());
  try {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      arriving[i] = slots_[slots[i]].arriving;
      for (const std::size_t band : bands) {
        const Swapped& swapped = *slots_[slots[i]].bands[band].swapped;
        const std::vector<Arriving> copies =
            bring_in(caller, slots[i], groups_of_[band], swapped, band_length(slots[i], band));
        here.emplace_back(slots[i], band);
        arriving[i].insert(arriving[i].end(), copies.begin(), copies.end());
      }
    }
  } catch (...) {
    for (const auto& [slot, band] : here) send_back(caller, slot, groups_of_[band]);
    throw;
  }
  // From here on nothing is refused.
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = slots_[slots[i]];
    slot.arriving.swap(arriving[i]);
    arriving_.push_back(slots[i]);
    for (const std::size_t band : bands) {
      const std::unique_ptr<Swapped> left = std::move(slot.bands[band].swapped);
      leave_swap(*left);
      if (slot.bands[band].length != 0) continue;
      for (const std::size_t group : groups_of_[band])
        slot.begins[group] = 0;  // truncated meanwhile
    }
    settle_bands(slots[i]);
  }
  look_further(slots);
}

}  // namespace vtensor
