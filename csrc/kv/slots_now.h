// What the slots of a cache are at this moment. It outlives the cache, because views of its layers
// keep their addresses, and reports of faults read it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vtensor {

enum class SlotState : std::uint8_t { free, used, swapped };

struct SlotsNow {
  SlotsNow(std::size_t slots, std::size_t bands)
      : lengths(slots), states(slots, SlotState::free), bands(slots * bands, kAsSlot) {}

  std::vector<std::int64_t> lengths;
  std::vector<SlotState> states;
  // Lengths of each slot's bands, one after the other, or one of these.
  static constexpr std::int64_t kAsSlot = -1, kAway = -2;
  std::vector<std::int64_t> bands;
  std::atomic<bool> closed{false};
};

}  // namespace vtensor
