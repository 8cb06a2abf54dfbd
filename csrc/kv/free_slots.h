// The free slots of a cache, and which of them a new request gets: one whose cached pages fit, or
// one with nothing mapped where shared pages are to go.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "kv/slot_buffers.h"
#include "vmm/caller.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class FreeSlots {
 public:
  explicit FreeSlots(SlotBuffers& buffers);

  // Whether `n` slots are free, counting slots whose pages are still leaving.
  bool has(std::size_t n) const { return n <= free_.size(); }
  // Throws NoFreeSlot.
  void require(const Caller& caller, std::size_t n) const;

  // A slot with its buffers placed: the one whose cached pages fit a request of `expected`
  // positions best, or if that is 0 the one with most. Waits for one while all that are free are on
  // their way out. Throws NoFreeSlot, TimedOut.
  std::size_t take(const Caller& caller, std::size_t expected);
  // A slot with its buffers placed and nothing mapped below `pages` of each row group; of these the
  // one with the fewest cached positions. Throws as `take`.
  std::size_t take_empty(const Caller& caller, std::size_t pages);
  // A slot whose buffers were abandoned.
  void add(std::size_t slot) noexcept { free_.push_back(slot); }

 private:
  static constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

  // What a free slot has mapped if every row group is vacant or reusable.
  struct Fit {
    std::size_t cached = kAll;  // positions whose pages are cached, from position 0 on
    std::size_t before = kAll;  // page indices before the first cached page, in every row group
  };
  using Choice = std::optional<std::size_t>;
  // What it costs to take a slot; nothing if it cannot be taken.
  using Cost = std::function<std::optional<std::size_t>(const Fit&)>;

  std::optional<Fit> fit(std::size_t slot) const VT_LOCKED;
  Choice cheapest(const Cost& cost) const VT_LOCKED;
  bool leaving() const VT_LOCKED;
  std::exception_ptr refusal(std::size_t slot) const VT_LOCKED;
  bool evict_one() VT_LOCKED;
  std::size_t take(const Caller& caller, const Cost& cost);

  SlotBuffers& buffers_;
  std::vector<std::size_t> free_;
};

}  // namespace vtensor
