// The free slots of a cache, and which of them a new request gets: one whose cached pages fit, or
// one with nothing mapped where shared pages are to go.
//
// The pool takes cached pages back without asking the cache, so a slot that is listed is confirmed
// when it is chosen.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kv/slot_buffers.h"
#include "vmm/caller.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class FreeSlots {
 public:
  explicit FreeSlots(SlotBuffers& buffers);

  // Whether `n` slots are free, counting slots whose pages are still leaving.
  bool has(std::size_t n) const { return n <= count(); }
  // Throws NoFreeSlot.
  void require(const Caller& caller, std::size_t n) const;

  // A slot with its buffers placed: the one whose cached pages fit a request of `expected`
  // positions best, or if that is 0 the one with most. Waits for one while all that are free are on
  // their way out. Throws NoFreeSlot, TimedOut.
  std::size_t take(const Caller& caller, std::size_t expected);
  // A slot with its buffers placed and nothing mapped below page index `pages`. Throws as `take`.
  std::size_t take_empty(const Caller& caller, std::size_t pages);
  // A slot whose buffers were abandoned.
  void add(std::size_t slot) noexcept { unready_.push_back(slot); }

 private:
  // What a free slot has mapped.
  struct Fit {
    bool ready = false;      // every row group is vacant or reusable
    std::size_t cached = 0;  // positions whose pages are cached, from position 0 on
    std::size_t before = 0;  // page indices before the first cached page, in every row group
  };
  // Slots that can be taken, as (cached positions, slot). The positions may be out of date.
  using Ready = std::set<std::pair<std::size_t, std::size_t>>;
  using Choice = std::optional<Ready::value_type>;

  std::size_t count() const { return ready_.size() + unready_.size(); }
  Fit fit(std::size_t slot) const VT_LOCKED;
  void admit_ready() VT_LOCKED;
  bool confirm(Ready::iterator listed, Fit& seen) VT_LOCKED;
  Choice choose(std::size_t expected) VT_LOCKED;
  Choice choose_empty(std::size_t pages) VT_LOCKED;
  bool leaving() const VT_LOCKED;
  std::exception_ptr refusal(std::size_t slot) const VT_LOCKED;
  bool evict_one() VT_LOCKED;
  std::size_t take(const Caller& caller, const std::function<Choice()>& choose);

  SlotBuffers& buffers_;
  Ready ready_;
  std::vector<std::size_t> unready_;  // free slots whose pages are still leaving
  std::size_t next_probe_ = 0;        // round-robin position in unready_
};

}  // namespace vtensor
