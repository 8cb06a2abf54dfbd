// Whether memory suffices for other lengths, asked before anything is done: pages that the slots
// would need, and pages that are free or could be taken back. Changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv/slot_buffers.h"
#include "kv/slot_lengths.h"
#include "kv/slot_prefixes.h"
#include "kv/slot_swaps.h"
#include "policy/page_pool.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class SlotNeeds {
 public:
  SlotNeeds(const SlotBuffers& buffers, const SlotLengths& lengths, const SlotSwaps& swaps,
            const SlotPrefixes& prefixes)
      : buffers_(buffers), lengths_(lengths), swaps_(swaps), prefixes_(prefixes) {}

  // Whether a step of `bands` would get its pages, after a swap_in of the slots and bands that it
  // needs, from the budget and from pages that would be taken back. `alone`: as if the other pools
  // of a shared budget held nothing. Takes the lock.
  bool fit(std::span<const std::int64_t> lengths, Bands bands, bool alone) const;
  // Pages that a step of `bands` to `lengths` maps.
  std::size_t pages(std::span<const std::int64_t> lengths, Bands bands = {}) const VT_LOCKED {
    return need(lengths, bands).pages;
  }
  // Whether a step of the slots in `due` makes no driver call.
  bool are_ready(std::span<const std::int64_t> lengths, std::span<const std::size_t> due) const
      VT_LOCKED;
  // Pages of the slots in `due` that wait to be unmapped and that a step takes back.
  std::size_t leaving(std::span<const std::int64_t> lengths, std::span<const std::size_t> due) const
      VT_LOCKED;

 private:
  struct Need {
    std::size_t pages = 0;  // to be mapped
    std::size_t ready = 0;  // mapped ahead of need, so not to be taken back for this step
  };
  Need need(std::span<const std::int64_t> lengths, Bands bands) const VT_LOCKED;
  std::size_t reclaimable() const VT_LOCKED;

  const SlotBuffers& buffers_;
  const SlotLengths& lengths_;
  const SlotSwaps& swaps_;
  const SlotPrefixes& prefixes_;
};

}  // namespace vtensor
