// A client with a range of addresses of its own: how its pages come ahead of need, and leave behind
// the work that may use them. Which pages these are, tensors and arenas say.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include "base/fault_report.h"
#include "policy/client.h"
#include "policy/generation.h"
#include "policy/page_pool.h"
#include "policy/page_record.h"
#include "policy/pending_unmap.h"
#include "vmm/caller.h"
#include "vmm/pending_work.h"
#include "vmm/reservation.h"
#include "vmm/row_shape.h"

namespace vtensor {

class RangeClient : public Client {
 public:
  // Throws Asleep if it is; and, once, what the mapper met while it worked for this client (I10).
  void raise_error();
  // Work in the caller's stream uses the pages: they are unmapped only after it.
  void use(const Caller& caller);
  // The owner leaves: pages and addresses go as the generations over them end, or are cached. Never
  // blocks, never throws (I11). Takes effect before the lock is next let go. To be called once.
  void abandon() noexcept;
  std::vector<PageRecord> pages();

  // What its pool asks of it: see Client.
  const std::shared_ptr<PagePool>& pool() const final { return pool_; }
  const RowShape& shape() const final { return shape_; }
  Reservation& range() final { return range_; }
  const Reservation& range() const { return range_; }
  void give_back_unused() noexcept override VT_LOCKED;
  bool settle(PoolLock* lock) noexcept final VT_LOCKED;
  const std::exception_ptr& refusal() const final VT_LOCKED { return unmap_.refusal(); }
  bool busy() const final VT_LOCKED { return busy_ || waiting_ != 0; }
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) final VT_LOCKED;
  Claim claim_back(Departure& departure, std::size_t pages) noexcept final VT_LOCKED;
  void enter_back(Departure& departure) override VT_LOCKED;
  std::exception_ptr take_error() final VT_LOCKED;
  void hold(PoolLock& lock, const Caller& caller) final VT_LOCKED;
  void end_hold() noexcept final VT_LOCKED;
  std::vector<FencePtr> fences() const final VT_LOCKED;
  bool leased() const final VT_LOCKED;
  void enter_ahead(Reservation::Arrival& arrival) final VT_LOCKED;
  void give_up_page(std::size_t row, std::size_t index) noexcept override VT_LOCKED {
    range_.quarantine(row, index);
  }
  void explain_asleep(bool asleep) noexcept final VT_LOCKED {
    if (known_) known_->set_asleep(asleep);
  }

  // -- for operations that change what is mapped

  // Marks the client busy, so that the mapper keeps off and the lock can be let go.
  class Busy {
   public:
    Busy(RangeClient& client, PoolLock& lock, const Caller& caller) VT_LOCKED;
    ~Busy() VT_LOCKED;
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    RangeClient& client_;
  };
  // Waits until no thread makes driver calls for it; the mapper begins none meanwhile. False if
  // there was nothing to wait for.
  bool await_turn(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Throws if the caller's stream is being captured, because driver work would become part of the
  // graph, or break it, and if it is not the driver's own.
  void require_no_capture(const Caller& caller) const;
  // As `use`.
  void note(const Caller& caller) VT_LOCKED { work_.note(caller); }
  // Whether all work has passed that must be done before ready or cached pages are used.
  bool is_quiet() VT_LOCKED { return all_passed(driver_, ready_after_); }
  // Has work that is launched in `stream` from now on wait for that.
  void order(Stream stream) const VT_LOCKED {
    for (const FencePtr& fence : ready_after_) driver_.order(stream, *fence);
  }

 protected:
  RangeClient(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  // What it is, for messages.
  virtual const char* noun() const = 0;
  // What its users are to do where a capture refuses driver calls.
  virtual const char* capture_advice() const = 0;
  // Of a mapped page that its owner does not use, why it is mapped; null where the owner does.
  virtual const char* why_mapped(std::size_t index) const VT_LOCKED = 0;
  // Of what was touched, mapped pages that nothing needs.
  virtual std::vector<Interval> uncovered() const VT_LOCKED = 0;
  // Whether it is out of reach, and its range is to go.
  virtual bool ends() const VT_LOCKED { return !owned_ && reserved_ && generations_.empty(); }
  virtual void free_range() VT_LOCKED;
  // Adds empty pages that it wants ahead, up to `pages`, with what is to stand there if that is
  // shared. False if it has to give up.
  virtual bool find_missing(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED = 0;
  // Nothing is left to do ahead, or to do it with.
  virtual void give_up_ahead() VT_LOCKED = 0;
  // Pages that it wanted ahead have come, or were refused.
  virtual void arrived_ahead(const Reservation::Arrival& arrival) VT_LOCKED = 0;

  void raise_if_asleep() const;
  // What a storage holds that needs these pages of every row, or the pages of these bytes.
  Generation* publish_locked(Interval indices, Interval bytes = {}) VT_LOCKED;
  void failed(std::exception_ptr error) VT_LOCKED;
  // For `find_missing`: adds the empty pages of `indices` of every row, as far as `pages` reaches,
  // which counts them down. False if a page there is not empty and not mapped.
  bool add_missing(Reservation::Arrival& arrival, Interval indices, std::size_t& pages) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  faults::Known known_;               // its range, to reports of faults; null where placed
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

  std::unique_ptr<Generation> owner_end_ =
      std::make_unique<Generation>();  // made ahead: leaving cannot fail

 private:
  // Whether something is on its way out. Notes what must be done before it may go.
  bool begin_unmapping() VT_LOCKED;
  // Frees the range of a client that ends. False if something is left in it.
  bool release_range() VT_LOCKED;
  bool claim_departure(Departure& departure, std::size_t pages) VT_LOCKED;

  std::exception_ptr error_ VT_GUARDED;  // of the mapper, not yet raised
  std::atomic<bool> failed_{false};      // there is one: read without the lock
};

}  // namespace vtensor
