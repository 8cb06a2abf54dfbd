// Whether memory suffices, asked before anything is done: what slots need to have other lengths,
// and what could be had for them. Changes nothing.
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

  // Whether a step of these bands would be granted, after slots or bands that are away have come
  // back for it: by what the budget leaves, and by what would be given up. `alone`: as if the other
  // pools of a shared budget held nothing. Takes the lock.
  bool fit(std::span<const std::int64_t> lengths, Bands bands, bool alone) const;
  // Pages that such a step maps.
  std::size_t pages(std::span<const std::int64_t> lengths, Bands bands = {}) const VT_LOCKED {
    return need(lengths, bands).pages;
  }
  // Whether a step of the slots that are `due` makes no driver call for them.
  bool are_ready(std::span<const std::int64_t> lengths, std::span<const std::size_t> due) const
      VT_LOCKED;
  // Pages on their way out that these slots take back, and that no other client gets.
  std::size_t leaving(std::span<const std::int64_t> lengths, std::span<const std::size_t> due) const
      VT_LOCKED;

 private:
  struct Need {
    std::size_t pages = 0;  // that are not mapped yet
    std::size_t ready = 0;  // that are, and are needed from then on
  };
  Need need(std::span<const std::int64_t> lengths, Bands bands) const VT_LOCKED;
  std::size_t reclaimable() const VT_LOCKED;

  const SlotBuffers& buffers_;
  const SlotLengths& lengths_;
  const SlotSwaps& swaps_;
  const SlotPrefixes& prefixes_;
};

}  // namespace vtensor
