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
  explicit SlotsNow(std::size_t slots) : lengths(slots), states(slots, SlotState::free) {}

  std::vector<std::int64_t> lengths;
  std::vector<SlotState> states;
  std::atomic<bool> closed{false};
};

}  // namespace vtensor
