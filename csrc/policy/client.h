// A holder of pages: a range of addresses, how its pages come ahead of need, and how they leave
// after the work that may use them. Tensors and arenas derive from it, and say which pages these
// are. The pool keeps lists of its clients, and its worker does their work for them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/fault_report.h"
#include "base/interval.h"
#include "policy/client_list.h"
#include "policy/generation.h"
#include "policy/page_pool.h"
#include "policy/page_record.h"
#include "policy/pending_unmap.h"
#include "vmm/caller.h"
#include "vmm/pending_work.h"
#include "vmm/pool_lock.h"
#include "vmm/reservation.h"
#include "vmm/row_shape.h"

namespace vtensor {

class Client : public std::enable_shared_from_this<Client> {
 public:
  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const RowShape& shape() const { return shape_; }
  Reservation& range() { return range_; }
  const Reservation& range() const { return range_; }

  // Link it into the pool's lists.
  struct Hooks {
    ClientList::Hook unsettled, wanting, cached, cached_alike, unclean;
    std::size_t announced = 0;  // pages that WantingClients keeps for it
  };
  Hooks hooks VT_GUARDED;

  // -- for its owner

  // Throws if its pool is broken, and Asleep if it is asleep; and, once, what the driver refused
  // the mapper for it (I10).
  void raise_error();
  void raise_if_asleep() const;
  // Work in the caller's stream uses the pages: they are unmapped only after it.
  void use(const Caller& caller);
  void note(const Caller& caller) VT_LOCKED { work_.note(caller); }
  // The owner leaves: pages and addresses go as the generations over them end, or are cached. Never
  // blocks, never throws (I11). Takes effect before the lock is next let go. To be called once.
  void abandon() noexcept;
  std::vector<PageRecord> pages();

  // -- for operations that change what is mapped

  // Marks the client busy, so that the mapper keeps off and the lock can be let go. Throws
  // TimedOut.
  class Busy {
   public:
    Busy(Client& client, PoolLock& lock, const Caller& caller) VT_LOCKED : client_(client) {
      client.hold(lock, caller);
    }
    ~Busy() VT_LOCKED { client_.end_hold(); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    Client& client_;
  };
  // The same in two steps.
  void hold(PoolLock& lock, const Caller& caller) VT_LOCKED;
  void end_hold() noexcept VT_LOCKED;
  // Waits until no thread makes driver calls for it, and what operations that failed had mapped is
  // unmapped; the mapper begins nothing meanwhile. False if there was nothing to wait for. Throws
  // what the driver refuses, and TimedOut.
  bool await_turn(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Throws if the caller's stream is being captured, because driver work would become part of the
  // graph, or break it, and if it is not the driver's own.
  void require_no_capture(const Caller& caller) const;
  // Whether all work has passed that must be done before ready or cached pages are used.
  bool is_quiet() VT_LOCKED { return all_passed(driver_, ready_after_); }
  // Work that is launched in `stream` from now on waits for that.
  void order(Stream stream) const VT_LOCKED {
    for (const FencePtr& fence : ready_after_) driver_.order(stream, *fence);
  }

  // -- ends

  // One of its generations has ended; the owner has left.
  virtual void forget(const Generation* generation) noexcept VT_LOCKED = 0;
  virtual void leave() noexcept VT_LOCKED = 0;

  // -- what is given back

  // Gives back what nothing needs any more: now, or as soon as it may go.
  virtual void give_back_unused() noexcept VT_LOCKED;
  // Unmaps what nothing needs, if its fences have passed, and frees the range after the owner has
  // left. False if something is left to do; `refusal` is what the driver refused then, if it did.
  // Lets the lock go meanwhile, unless it is null: a deleter cannot.
  bool settle(PoolLock* lock) noexcept VT_LOCKED;
  const std::exception_ptr& refusal() const VT_LOCKED { return unmap_.refusal(); }
  // An upper bound of the mapped pages that are on their way out; 0 if their unmapping was refused.
  virtual std::size_t pages_leaving() const VT_LOCKED = 0;
  // Gives up what is ready ahead of need; returns the number of pages.
  virtual std::size_t drop_ahead() VT_LOCKED = 0;

  // -- reuse

  // Whether it lies in the range of another client, which bounds what it may keep.
  virtual bool placed() const = 0;
  // Whether it is cached, and nothing else of it is mapped: pages on their way out would come back
  // as the next owner's (I7).
  virtual bool reusable() const VT_LOCKED { return false; }
  // Gives up cached pages.
  virtual void evict() VT_LOCKED = 0;

  // -- the worker's tasks: claimed, carried out without the lock, and entered. The client is busy
  // in between.

  // Another thread works on it, or waits to: the worker leaves it alone.
  bool busy() const VT_LOCKED { return busy_ || waiting_ != 0; }

  // Maps up to `pages` of the pages that it wants ahead. False if it wants none, or can have none.
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED;
  void enter_ahead(Reservation::Arrival& arrival) VT_LOCKED;
  // Pages that it wants and has not.
  virtual std::size_t missing_ahead() const VT_LOCKED = 0;
  virtual bool wants() const VT_LOCKED = 0;

  // Pages on their way out.
  struct Departure : Reservation::Departure {
    std::vector<Interval> indices;
  };
  enum class Claim : std::uint8_t { claimed, waits, refused, done };
  // Unmaps about `pages` pages of what is to go.
  Claim claim_back(Departure& departure, std::size_t pages) noexcept VT_LOCKED;
  virtual void enter_back(Departure& departure) VT_LOCKED;

  // Zeroes up to `pages` pages that its last owner left, once that owner's work is done. Whether
  // there may be some; the task.
  virtual bool to_clean() const VT_LOCKED { return false; }
  virtual bool claim_cleaning(std::vector<Reservation::Run>&, std::size_t /*pages*/) VT_LOCKED {
    return false;
  }
  virtual FencePtr clean(std::span<const Reservation::Run>) { return nullptr; }
  virtual void enter_cleaning(std::span<const Reservation::Run>, FencePtr /*zeroed*/,
                              std::exception_ptr) VT_LOCKED {}

  // -- sleep (see sleep.h)

  // The number of the sleep that it is in; 0 if it is awake. Operations are refused meanwhile.
  std::atomic<std::uint64_t> asleep{0};
  // Fences after all work launched so far that may use its pages; whether a lease announces more.
  std::vector<FencePtr> fences() const VT_LOCKED;
  bool leased() const VT_LOCKED;
  // It woke without its contents: each page shows zeros, as if it had come just now.
  virtual void lose_contents() noexcept VT_LOCKED {}
  // For reports of faults: whether its range is asleep.
  void explain_asleep(bool asleep) noexcept VT_LOCKED {
    if (known_) known_->set_asleep(asleep);
  }

  // -- reports

  // What the driver refused the worker for it, once.
  std::exception_ptr take_error() VT_LOCKED;
  // Adds its pages. Those that sleep are no mapped ones.
  void count(PoolCounts& counts) const VT_LOCKED;
  // Throws an Error that names the violated invariant.
  virtual void check(std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED = 0;

 protected:
  // 2^47 bytes are the addresses of a process on x86-64.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 47;

  Client(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  // Joins the pool with the addresses reserved for its rows. Returns its id, which owns the pages.
  // `report`: what reports of faults say of them.
  std::uint64_t join(Address base, std::unique_ptr<faults::Range> report, const Caller& caller)
      VT_LOCKED;

  // Adds its page table's entries, asleep or not.
  virtual void add_to(PoolCounts& counts) const VT_LOCKED = 0;
  // What it is, for messages.
  virtual const char* noun() const = 0;
  // What its users are to do if a capture refuses driver calls.
  virtual const char* capture_advice() const = 0;
  // Of a mapped page that its owner does not use, why it is mapped; null if the owner does.
  virtual const char* why_mapped(std::size_t index) const VT_LOCKED = 0;
  // Of what was touched, mapped pages that nothing needs.
  virtual std::vector<Interval> uncovered() const VT_LOCKED = 0;
  // Whether it is out of reach, and its range is to go.
  virtual bool ends() const VT_LOCKED { return !owned_ && reserved_ && generations_.empty(); }
  virtual void free_range() VT_LOCKED;
  // Adds empty pages that it wants ahead, up to `pages`, and the pages to be mapped there if these
  // are shared.
  virtual void find_missing(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED = 0;
  // It wants nothing more ahead, or can have nothing.
  virtual void give_up_ahead() VT_LOCKED = 0;
  // Pages that it wanted ahead have come, or were refused.
  virtual void arrived_ahead(const Reservation::Arrival& arrival) VT_LOCKED = 0;

  void failed(std::exception_ptr error) VT_LOCKED;
  // What a storage holds that needs these pages of every row, or the pages of these bytes.
  Generation* publish_locked(Interval indices, Interval bytes = {}) VT_LOCKED;
  // For `find_missing`: adds the empty pages of `indices` of every row, as far as `pages` reaches,
  // which counts them down.
  void add_missing(Reservation::Arrival& arrival, Interval indices, std::size_t& pages) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  faults::Known known_;               // its range, to reports of faults; null if it is placed
  bool owned_ VT_GUARDED = true;      // the owner has not left
  bool reserved_ VT_GUARDED = false;  // the range is ours
  bool busy_ VT_GUARDED = false;      // a thread makes driver calls for it without the lock
  // Callers that wait until it is not busy; the mapper lets them go first.
  std::size_t waiting_ VT_GUARDED = 0;
  PendingUnmap unmap_ VT_GUARDED;
  // What must be done before ready or cached pages are used.
  std::vector<FencePtr> ready_after_ VT_GUARDED;
  PendingWork work_ VT_GUARDED;
  Generations generations_ VT_GUARDED;
  // Made ahead: leaving cannot fail.
  std::unique_ptr<Generation> owner_end_ = std::make_unique<Generation>();

 private:
  // Whether something is on its way out. Notes what must be done before it may go.
  bool begin_unmapping() VT_LOCKED;
  // Frees the range of a client that ends. False if something is left in it.
  bool release_range() VT_LOCKED;
  // About `pages` pages of what waits. False if the work that may touch them is not done.
  bool claim_departure(Departure& departure, std::size_t pages) VT_LOCKED;

  std::exception_ptr error_ VT_GUARDED;  // of the mapper, not yet raised
  std::atomic<bool> failed_{false};      // there is one: read without the lock
};

}  // namespace vtensor
