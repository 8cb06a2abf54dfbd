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
      : lengths(slots), states(slots, SlotState::free), away(slots * bands) {}

  std::vector<std::int64_t> lengths;
  std::vector<SlotState> states;
  std::vector<std::uint8_t> away;  // 1 for each band of a slot, one after the other, in host memory
  std::atomic<bool> closed{false};
};

}  // namespace vtensor
