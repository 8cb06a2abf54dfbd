// The one ladder that finds memory. What goes first, second and last, and when to give up:
//
//   1  what waits to be unmapped, if its fences have passed
//   2  cached clients, the oldest first
//   3  what is ready ahead of need
//   4  what the other pools of a shared budget give up (`give_to_others`); they answer soon
//   5  waiting, for the device and for calls of other threads, as long as that may suffice
//
// find pages within the budget and beside the reserve. The pool's own pages go first: they are
// certain, and take no time of another process. If the driver refuses all the same,
//
//   6  1 and 2, or without device memory 1 to 3, of the whole pool, and what the caller's framework
//      caches; then the operation is tried once more
//   7  what the caller itself keeps for later, and then what shrinkers keep, a part a try
//
// and then the refusal is raised.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/errors.h"
#include "vmm/caller.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class PagePool;

class MakeRoom {
 public:
  explicit MakeRoom(PagePool& pool) : pool_(pool) {}

  // Rungs 1 to 5: returns with `pages` pages free, not counting `private_copies` pages that the
  // kernel copied and that these replace, and with their memory made if the driver takes long for
  // that. True if they let the lock go, to wait or to make memory: other threads may have taken
  // pages, or given some back. Throws OutOfPages, ReserveReached, DeviceOutOfMemory.
  bool ready(PoolLock& lock, const char* operation, std::size_t pages,
             std::size_t private_copies = 0) VT_LOCKED;
  // Returns with at most `pages` pages in use or kept. Throws OutOfPages, of `bytes` asked for.
  void shrink(PoolLock& lock, const char* operation, std::size_t pages, std::size_t bytes)
      VT_LOCKED;

  // For `pages` pages that are to be mapped ahead of need: begins as much of rung 2 as it takes
  // beside what is free and what is on its way out. The mapper does the unmapping. Returns how many
  // pages are still missing. Requires: a pool that looks ahead.
  std::size_t begin(std::size_t pages) VT_LOCKED;
  // The pages that `begin` would report missing, without a change.
  std::size_t missing(std::size_t pages) const VT_LOCKED;

  // Pages that rungs 2 and 3 give up, and those of them that no reader keeps.
  struct Spare {
    std::size_t pages = 0, taken_back = 0;
  };
  Spare spare() const VT_LOCKED;

  // Waits for the next change. False at once if no page is on its way out.
  bool await_leaving(PoolLock& lock) VT_LOCKED;

  // Mapped pages that nothing needs and that wait to be unmapped.
  std::size_t pages_leaving() const VT_LOCKED;
  // Rungs 2 and 3: one client's; false if there is none, or the pool is broken.
  bool give_up_spare(PoolLock& lock) VT_LOCKED;

  enum class Given : std::uint8_t {
    some,     // there may be more
    waits,    // pages go once their fences have passed, or an operation of their shrinker has ended
    nothing,  // nothing is wanted, or left
  };
  // For the other pools of a shared budget, when one of them asks: one step of rungs 1 to 3, of
  // what shrinkers have, and of giving free pages back. Waits for nothing. Answers once nothing is
  // left.
  Given give_to_others(PoolLock& lock) VT_LOCKED;
  // Rung 7, at the n-th try: some pages of shrinkers, none of whose operations it waits for. Takes
  // the lock. False if they have none.
  bool run_shrinkers(unsigned tries);

  // Rung 6; takes the lock. `spare`: also what is ready ahead. False if there was nothing.
  bool give_all_back(bool spare) noexcept;

 private:
  class Request;

  // `free`: pages that the budget has. If they suffice, it is the reserve that does not allow them.
  [[noreturn]] void refuse(const char* operation, std::size_t pages, std::size_t free) const
      VT_LOCKED;
  // Pages free for a request of `pages`; charged if they suffice.
  std::size_t free_pages(std::size_t pages, std::size_t private_copies) VT_LOCKED;
  // Pages that are free, or will be once what is on its way out has gone; not those of clients that
  // share pages, because other clients may keep them.
  std::size_t pages_to_come() const VT_LOCKED;
  // One step of rungs 1 to 5; false if nothing is left that would make up for `missing` pages.
  bool take_back(PoolLock& lock, Request& request, std::size_t missing) VT_LOCKED;
  // One step for `missing` bytes that others want.
  Given give(PoolLock& lock, std::size_t missing) VT_LOCKED;
  Given run_shrinkers(PoolLock& lock, std::size_t pages) VT_LOCKED;
  void answer(PoolLock& lock, std::uint32_t request) VT_LOCKED;

  PagePool& pool_;
};

// Gives up a part of what the caller of the core keeps for later, at the n-th try; false if there
// is nothing.
using GiveUp = std::function<bool(unsigned tries)>;

// Runs `body`, which makes driver calls, with all rungs. No lock that the mapper or a deleter takes
// is held meanwhile (I11). `empty_cache` has the caller's framework release its cache of device
// memory; false if it cannot now.
void with_memory(PagePool& pool, const Caller& caller, const std::function<void()>& body,
                 const std::function<bool()>& empty_cache, const GiveUp& give_up = {});

}  // namespace vtensor
