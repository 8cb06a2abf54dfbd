// What the slots of a cache are at this moment: free, in use or swapped out, and how long. It
// outlives the cache, because views of its layers keep their addresses, and reports of faults read
// it.
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

// Bands of layers, by their numbers; none named: all of them, as one.
using Bands = std::span<const std::size_t>;
inline bool names(Bands bands, std::size_t band) {
  return bands.empty() || std::find(bands.begin(), bands.end(), band) != bands.end();
}

// The bands of a slot may differ: one has more tokens than another, or is in host memory. A prompt
// computed layer by layer needs room for the bands that are being computed (LayerKV, arXiv
// 2410.00428). A slot whose bands are alike has one length, and costs nothing for having bands.
class SlotLengths {
 public:
  explicit SlotLengths(const SlotCacheShape& shape);

  // Of a slot whose bands differ, the least that one of them has; 0 if the slot is not in use.
  std::span<const std::int64_t> all() const { return lengths_; }
  SlotState state(std::size_t slot) const { return states_[slot]; }
  // Slots in use, and swapped ones.
  std::size_t count_used() const;
  // Positions of a swapped slot; of others, its length.
  std::size_t length(std::size_t slot) const;
  // The same of one band.
  std::size_t length(std::size_t slot, std::size_t band) const {
    return static_cast<std::size_t>(differ_[slot] ? of(slot)[band].length : lengths_[slot]);
  }
  // Positions of a band that have pages.
  std::size_t here(std::size_t slot, std::size_t band) const {
    return is_away(slot, band) ? 0 : length(slot, band);
  }
  // Whether bands of the slot do.
  bool differ(std::size_t slot) const { return differ_[slot]; }
  // Whether the band is in host memory, by itself or with its slot.
  bool is_away(std::size_t slot, std::size_t band) const {
    return differ_[slot] && of(slot)[band].away;
  }
  // Lengths up to this need no other page: every page is there, ready, and the slot's own.
  std::int64_t room(std::size_t slot) const { return room_[slot]; }
  // Lists the slots whose lengths go beyond their room. False if a length cannot be.
  bool find_due(std::span<const std::int64_t> lengths, std::vector<std::size_t>& due) const;
  // These bands, or if none are named every one.
  Bands or_all(Bands bands) const { return bands.empty() ? Bands(all_bands_) : bands; }

  // What a report of a fault says of a band. Any thread may be changing it.
  struct Glimpse {
    SlotState state;
    std::size_t length;
    bool away, closed;
  };
  Glimpse glimpse(std::size_t slot, std::size_t band) const noexcept;

  // Checks, which throw InvalidArgument or CapacityExceeded.
  void require_used(const Caller& caller, std::size_t slot) const;
  // All of its bands are here and alike.
  void require_whole(const Caller& caller, std::size_t slot) const;
  void require_here(const Caller& caller, std::size_t slot, std::size_t band) const;
  // A step of these bands could have these lengths. Lists the slots that it changes.
  void require_due(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                   std::vector<std::size_t>& due) const;
  // The same after what is away has come back. A slot of length 0 is left out.
  void require_possible(const Caller& caller, std::span<const std::int64_t> lengths,
                        Bands bands) const;
  void require_bands(const Caller& caller, Bands bands) const;
  void require_once(const Caller& caller, std::span<const std::size_t> slots) const;
  // Slots are named that can be swapped out, or in, each once.
  void require_to_swap(const Caller& caller, std::span<const std::size_t> slots, Bands bands,
                       bool out) const;

  void begin(std::size_t slot, std::size_t length) noexcept;
  void end(std::size_t slot) noexcept;
  // Bands of the slots that are due have new lengths, or all bands of all slots have.
  void step(std::span<const std::int64_t> lengths, std::span<const std::size_t> due,
            Bands bands) noexcept;
  void truncate(std::size_t slot, std::size_t length) noexcept;
  void swap_out(std::size_t slot, Bands bands) noexcept;
  void swap_in(std::size_t slot, Bands bands) noexcept;
  void set_room(std::size_t slot, std::int64_t room) noexcept { room_[slot] = room; }
  // Pages of the slot may be shared now, or are to be mapped first.
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
  void settle(std::size_t slot) noexcept;
  void set_away(std::size_t slot, Bands bands, bool away) noexcept;
  void require_one_each(const Caller& caller, std::span<const std::int64_t> lengths) const;
  void require_length(const Caller& caller, std::size_t slot, std::int64_t length,
                      Bands bands) const;

  const std::size_t max_length_;
  std::vector<std::size_t> all_bands_;
  std::vector<std::int64_t> lengths_;
  std::vector<SlotState> states_;
  std::vector<std::int64_t> room_;
  std::vector<std::uint8_t> differ_;  // whether the slot's bands do; those of a swapped one do
  std::vector<Band> bands_;           // of each slot one after the other, if they differ
  std::atomic<bool> closed_{false};
};

}  // namespace vtensor
