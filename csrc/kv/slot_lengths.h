// The state and length of each slot of a cache. Outlives the cache: views of its layers keep their
// addresses, and reports of faults read the lengths.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/slot_shape.h"
#include "vmm/caller.h"

namespace vtensor {

enum class SlotState : std::uint8_t { free, used, swapped };

// Band indices. An empty list means all bands.
using Bands = std::span<const std::size_t>;
inline bool names(Bands bands, std::size_t band) {
  return bands.empty() || std::find(bands.begin(), bands.end(), band) != bands.end();
}

// The bands of a slot may differ in length, and some may be in host memory: a prompt computed layer
// by layer needs pages for the bands being computed only (LayerKV, arXiv 2410.00428). A slot whose
// bands are alike stores one length.
class SlotLengths {
 public:
  explicit SlotLengths(const SlotCacheShape& shape);

  // For each slot: its length, the shortest band's if its bands differ; 0 if it is free or swapped.
  std::span<const std::int64_t> all() const { return lengths_; }
  SlotState state(std::size_t slot) const { return states_[slot]; }
  // Slots in a state.
  std::size_t count(SlotState state) const;
  // The length of a slot, also of a swapped one.
  std::size_t length(std::size_t slot) const;
  // The length of one band of a slot.
  std::size_t length(std::size_t slot, std::size_t band) const {
    return static_cast<std::size_t>(differ_[slot] ? of(slot)[band].length : lengths_[slot]);
  }
  // Positions of a band that have pages; 0 if it is in host memory.
  std::size_t here(std::size_t slot, std::size_t band) const {
    return is_away(slot, band) ? 0 : length(slot, band);
  }
  // Whether bands of the slot differ in length, or some are in host memory.
  bool differ(std::size_t slot) const { return differ_[slot]; }
  // Whether the band is in host memory, by itself or with its slot.
  bool is_away(std::size_t slot, std::size_t band) const {
    return differ_[slot] && of(slot)[band].away;
  }
  // The slot can reach this length without another page: all of its pages up to there are mapped,
  // ready and not shared.
  std::int64_t room(std::size_t slot) const { return room_[slot]; }
  // Lists in `due` the slots whose lengths pass their room. False if a length is not possible.
  bool find_due(std::span<const std::int64_t> lengths, std::vector<std::size_t>& due) const;
  // `bands`, or all bands if it is empty.
  Bands or_all(Bands bands) const { return bands.empty() ? Bands(all_bands_) : bands; }

  // The state of a band for a report of a fault. Any thread may be changing it.
  struct Glimpse {
    SlotState state;
    std::size_t length;
    bool away, closed;
  };
  Glimpse glimpse(std::size_t slot, std::size_t band) const noexcept;

  // Checks, which throw InvalidArgument or CapacityExceeded.
  void require_used(const Caller& caller, std::size_t slot) const;
  // The slot is used, and all of its bands have pages and the same length.
  void require_whole(const Caller& caller, std::size_t slot) const;
  void require_here(const Caller& caller, std::size_t slot, std::size_t band) const;
  // `lengths` are possible for a step of `bands`. Lists in `due` the slots that it changes.
  void require_due(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                   std::vector<std::size_t>& due) const;
  // `lengths` would be possible if every swapped slot and band were back. A slot of length 0 is
  // left out.
  void require_possible(const Caller& caller, std::span<const std::int64_t> lengths,
                        Bands bands) const;
  // No slot or band, as `noun` says, is named twice.
  static void require_once(const Caller& caller, const char* noun,
                           std::span<const std::size_t> all);
  // `slots`, each named once, can be swapped out (`out`) or in.
  void require_to_swap(const Caller& caller, std::span<const std::size_t> slots, Bands bands,
                       bool out) const;

  void begin(std::size_t slot, std::size_t length) noexcept;
  void end(std::size_t slot) noexcept;
  // Sets the lengths of `bands` of the slots in `due`; without bands, of all slots.
  void step(std::span<const std::int64_t> lengths, std::span<const std::size_t> due,
            Bands bands) noexcept;
  void truncate(std::size_t slot, std::size_t length) noexcept;
  void swap_out(std::size_t slot, Bands bands) noexcept;
  void swap_in(std::size_t slot, Bands bands) noexcept;
  void set_room(std::size_t slot, std::int64_t room) noexcept { room_[slot] = room; }
  // The next step of the slot looks at its pages: they may be shared, or not mapped yet.
  void forget_room(std::size_t slot) noexcept { room_[slot] = lengths_[slot]; }
  void close() noexcept { closed_.store(true, std::memory_order_relaxed); }

 private:
  struct Band {
    std::int64_t length = 0;
    bool away = false;  // in host memory
  };

  std::span<const Band> of(std::size_t slot) const {
    return std::span(bands_).subspan(slot * all_bands_.size(), all_bands_.size());
  }
  std::span<Band> differing(std::size_t slot) noexcept;
  void derive(std::size_t slot) noexcept;
  void set_away(std::size_t slot, Bands bands, bool away) noexcept;
  void require_one_each(const Caller& caller, std::span<const std::int64_t> lengths) const;
  void require_length(const Caller& caller, std::size_t slot, std::int64_t length,
                      Bands bands) const;

  const std::size_t max_length_;
  std::vector<std::size_t> all_bands_;
  std::vector<std::int64_t> lengths_;
  std::vector<SlotState> states_;
  std::vector<std::int64_t> room_;
  std::vector<std::uint8_t> differ_;  // for each slot: its bands differ; true if it is swapped
  std::vector<Band> bands_;           // [slot][band], valid where differ_
  std::atomic<bool> closed_{false};
};

}  // namespace vtensor
