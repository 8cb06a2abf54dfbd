// What a pool gives up for the other pools of its shared budget, when one of them asks: one step of
// rungs 1 to 3 of make_room.h, of what shrinkers have, and of giving free pages back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vmm/pool_lock.h"

namespace vtensor {

class PagePool;

class Reclaim {
 public:
  explicit Reclaim(PagePool& pool) : pool_(pool) {}

  enum class Result : std::uint8_t {
    progress,  // there may be more
    waits,  // pages go once their fences have passed, or an operation of their shrinker has ended
    done,   // nothing is wanted, or left
  };
  // One step, which waits for nothing. Answers the others once it is done.
  Result step(PoolLock& lock) VT_LOCKED;

  // For this pool: some pages of shrinkers, none of whose operations it waits for. Takes the lock.
  // False if they have none. Requires: no lock of a shrinker is held.
  bool shrink();

 private:
  Result give_up(PoolLock& lock) VT_LOCKED;
  Result shrink(PoolLock& lock, std::size_t pages) VT_LOCKED;
  void answer(PoolLock& lock, std::uint32_t request) VT_LOCKED;

  PagePool& pool_;
};

}  // namespace vtensor
