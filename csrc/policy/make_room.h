// The ladder that finds memory: which pages are given up, in which order, and when to give up.
//
//   1  pages that wait to be unmapped, if their fences have passed
//   2  cached clients, the oldest first
//   3  pages ahead of need
//   4  pages of the other pools of a shared budget (`give_to_others`), which answer soon
//   5  waiting, for the device and for calls of other threads, as long as that may suffice
//
// find pages within the budget and beside the reserve. The pool's own pages go first: they are
// certain, and take no time of another process. If the driver still refuses,
//
//   6  all of 1 and 2, and if the device lacks memory all of 3 and the cache of the caller's
//      framework; then the operation is tried once more
//   7  pages that the caller keeps for later, and then pages of shrinkers, some at each try
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

  // Rungs 1 to 5: returns with `pages` pages free, with memory if making it takes the driver long.
  // `private_copies`: private copies that the pages replace, and which so do not count as in use.
  // True if it released the lock, to wait or to make memory: other threads may have taken pages, or
  // given some back. Throws OutOfPages, ReserveReached, DeviceOutOfMemory.
  bool ready(PoolLock& lock, const char* operation, std::size_t pages,
             std::size_t private_copies = 0) VT_LOCKED;
  // Returns with at most `pages` pages in use or spare, for a budget of `bytes`. Throws OutOfPages.
  void shrink(PoolLock& lock, const char* operation, std::size_t pages, std::size_t bytes)
      VT_LOCKED;

  // For `pages` pages to be mapped ahead of need: begins as much of rung 2 as is needed beside free
  // and leaving pages. The mapper does the unmapping. Returns how many pages are still missing.
  // Requires: a pool that looks ahead.
  std::size_t begin(std::size_t pages) VT_LOCKED;
  // How many pages `begin` would report missing; changes nothing.
  std::size_t missing(std::size_t pages) const VT_LOCKED;

  // Pages that rungs 2 and 3 give up, and how many of them no reader keeps.
  struct Spare {
    std::size_t pages = 0, taken_back = 0;
  };
  Spare spare() const VT_LOCKED;

  // Waits for the next change. False at once if no page is leaving.
  bool await_leaving(PoolLock& lock) VT_LOCKED;

  // Mapped pages that nothing needs and that wait to be unmapped.
  std::size_t pages_leaving() const VT_LOCKED;
  // Rungs 2 and 3, of one client. False if no client has pages, or the pool is broken.
  bool give_up_spare(PoolLock& lock) VT_LOCKED;

  enum class Given : std::uint8_t {
    some,     // there may be more
    waits,    // until fences have passed, or the operation of a shrinker has ended
    nothing,  // nothing is wanted, or left
  };
  // For a request of another pool of a shared budget: one step of rungs 1 to 3, of shrinkers, and
  // of giving spare memory back. Waits for nothing. Answers the request when nothing is left to
  // give.
  Given give_to_others(PoolLock& lock) VT_LOCKED;
  // Rung 7: some pages of shrinkers, more with each of `tries`, without waiting for their
  // operations. Takes the lock. False if shrinkers have none.
  bool run_shrinkers(unsigned tries);

  // Rung 6: all of 1 and 2, and of 3 if `spare`. Takes the lock. False if there was nothing.
  bool give_all_back(bool spare) noexcept;

 private:
  class Request;

  // `free`: pages that the budget has. If they suffice, the device's reserve forbids them.
  [[noreturn]] void refuse(const char* operation, std::size_t pages, std::size_t free) const
      VT_LOCKED;
  // Pages free for a request of `pages`, which are charged if they suffice.
  std::size_t free_pages(std::size_t pages, std::size_t private_copies) VT_LOCKED;
  // Pages that are free, or free once leaving pages have gone; without clients that share pages,
  // because others may keep those.
  std::size_t pages_to_come() const VT_LOCKED;
  // One step of rungs 1 to 5. False if nothing is left that could yield `missing` pages.
  bool take_back(PoolLock& lock, Request& request, std::size_t missing) VT_LOCKED;
  // One step for `missing` bytes that other pools want.
  Given give(PoolLock& lock, std::size_t missing) VT_LOCKED;
  Given run_shrinkers(PoolLock& lock, std::size_t pages) VT_LOCKED;
  void answer(PoolLock& lock, std::uint32_t request) VT_LOCKED;

  PagePool& pool_;
};

// Gives up some of the pages that the caller of the core keeps for later, at the n-th try; false if
// there are none.
using GiveUp = std::function<bool(unsigned tries)>;

// Runs `body`, which makes driver calls, with all rungs. Holds no lock that the mapper or a deleter
// takes (I11). `empty_cache` has the caller's framework release its cache of device memory; false
// if that is not possible now.
void with_memory(PagePool& pool, const Caller& caller, const std::function<void()>& body,
                 const std::function<bool()>& empty_cache, const GiveUp& give_up = {});

}  // namespace vtensor
