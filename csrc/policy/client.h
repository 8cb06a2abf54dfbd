// What a pool asks of the holders of its pages: the rows of a tensor, the slots of a cache, arenas.
// The pool keeps lists of its clients, and its worker does their work for them; neither knows what
// they are.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/interval.h"
#include "policy/client_list.h"
#include "vmm/caller.h"
#include "vmm/pool_lock.h"
#include "vmm/reservation.h"
#include "vmm/row_shape.h"

namespace vtensor {

class PagePool;
struct Generation;
struct PoolCounts;

class Client : public std::enable_shared_from_this<Client> {
 public:
  Client() = default;
  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  virtual const std::shared_ptr<PagePool>& pool() const = 0;
  virtual const RowShape& shape() const = 0;
  virtual Reservation& range() = 0;
  // Whether it lies in the range of another client, which bounds what it may keep.
  virtual bool placed() const = 0;

  // Link it into the pool's lists.
  struct Hooks {
    ClientList::Hook unsettled, wanting, cached, cached_alike, unclean;
    std::size_t announced = 0;  // pages that WantingClients keeps for it
  };
  Hooks hooks VT_GUARDED;

  // -- ends

  // One of its generations has ended; the owner has left.
  virtual void forget(const Generation* generation) noexcept VT_LOCKED = 0;
  virtual void leave() noexcept VT_LOCKED = 0;

  // -- what is given back

  // Gives back what nothing needs any more: now, or as soon as it may go.
  virtual void give_back_unused() noexcept VT_LOCKED = 0;
  // Unmaps what nothing needs, if its fences have passed, and frees the range after the owner has
  // left. False if something is left to do; `refusal` is what the driver refused then, if it did.
  // Lets the lock go meanwhile, unless it is null: a deleter cannot.
  virtual bool settle(PoolLock* lock) noexcept VT_LOCKED = 0;
  virtual const std::exception_ptr& refusal() const VT_LOCKED = 0;
  // An upper bound of the mapped pages that are on their way out; 0 if their unmapping was refused.
  virtual std::size_t pages_leaving() const VT_LOCKED = 0;
  // Gives up what is ready ahead of need; returns the number of pages.
  virtual std::size_t drop_ahead() VT_LOCKED = 0;

  // -- reuse

  // Whether it is cached, and nothing else of it is mapped: pages on their way out would come back
  // as the next owner's (I7).
  virtual bool reusable() const VT_LOCKED = 0;
  virtual std::chrono::steady_clock::time_point cached_at() const VT_LOCKED = 0;
  // Gives up cached pages; `aged`: because they were cached for as long as the pool keeps memory.
  virtual void evict(bool aged = false) VT_LOCKED = 0;
  // Whether some of them may still have to be zeroed.
  virtual bool to_clean() const VT_LOCKED = 0;

  // -- the worker's tasks: claimed, carried out without the lock, and entered. The client is busy
  // in between.

  // Another thread works on it, or waits to: the worker leaves it alone.
  virtual bool busy() const VT_LOCKED = 0;

  // Maps up to `pages` of the pages that it wants ahead. False if it wants none, or can have none.
  virtual bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED = 0;
  virtual void enter_ahead(Reservation::Arrival& arrival) VT_LOCKED = 0;
  // Pages that it wants and has not.
  virtual std::size_t missing_ahead() const VT_LOCKED = 0;
  virtual bool wants() const VT_LOCKED = 0;

  // Pages on their way out.
  struct Departure : Reservation::Departure {
    std::vector<Interval> indices;
  };
  enum class Claim : std::uint8_t { claimed, waits, refused, done };
  // Unmaps about `pages` pages of what is to go.
  virtual Claim claim_back(Departure& departure, std::size_t pages) noexcept VT_LOCKED = 0;
  virtual void enter_back(Departure& departure) VT_LOCKED = 0;

  // Zeroes up to `pages` pages that its last owner left, once that owner's work is done.
  virtual bool claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) VT_LOCKED = 0;
  virtual FencePtr clean(std::span<const Reservation::Run> runs) = 0;
  virtual void enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                              std::exception_ptr error) VT_LOCKED = 0;

  // -- sleep (see sleep.h)

  // The number of the sleep that it is in; 0 if it is awake. Operations are refused meanwhile.
  std::atomic<std::uint64_t> asleep{0};
  // Waits until no thread works on it, and keeps the worker and other operations off. Throws
  // TimedOut.
  virtual void hold(PoolLock& lock, const Caller& caller) VT_LOCKED = 0;
  virtual void end_hold() noexcept VT_LOCKED = 0;
  // Fences after all work launched so far that may use its pages; whether a lease announces more.
  virtual std::vector<FencePtr> fences() const VT_LOCKED = 0;
  virtual bool leased() const VT_LOCKED = 0;
  // What is mapped there is not known: it is quarantined.
  virtual void give_up_page(std::size_t row, std::size_t index) noexcept VT_LOCKED = 0;
  // For reports of faults: whether its range is asleep.
  virtual void explain_asleep(bool asleep) noexcept VT_LOCKED = 0;

  // -- reports

  // What the driver refused the worker for it, once.
  virtual std::exception_ptr take_error() VT_LOCKED = 0;
  // Makes every page copy-on-write for a child about to be forked, and adds them to `seen`.
  virtual void protect_for_child(std::vector<Page*>& seen) noexcept VT_LOCKED = 0;
  virtual void add_to(PoolCounts& counts) const VT_LOCKED = 0;
  // Throws an Error that names the violated invariant.
  virtual void check(std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED = 0;
};

}  // namespace vtensor
