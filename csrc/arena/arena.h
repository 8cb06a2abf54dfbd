// One flat range of addresses of which any pages are mapped, in any order: what engines with a
// table of blocks keep K and V in. A page is mapped while some block needs it, and stays so until
// memory is wanted elsewhere: blocks that come and go make no driver call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/interval.h"
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

// Pages of an arena, at one moment.
struct ArenaCounts {
  std::size_t active = 0;      // that some block needs
  std::size_t cached = 0;      // that none needs, left mapped
  std::size_t prefetched = 0;  // mapped before any needed them
  std::size_t pinned = 0;      // that wait to be unmapped
  std::size_t quarantined = 0;
};

class Arena final : public Client {
 public:
  // Throws CapacityExceeded, DriverError. `zeros`: a page of zeros, read-only, stands wherever
  // nothing is mapped, on drivers where reading there would fault.
  static std::shared_ptr<Arena> make(const std::shared_ptr<PagePool>& pool, std::size_t bytes,
                                     bool zeros, const Caller& caller);

  Address base() const { return range_.base(); }
  std::size_t bytes() const { return shape_.capacity; }
  // The pages that hold these bytes.
  Interval pages_of(Interval bytes) const;

  // Maps the pages of `intervals`, which are intervals of bytes, each for as long as one block
  // needs it: in one batch of driver calls, or none. Whole or nothing (I8). Says of each whether
  // all its pages were mapped before, and hold what they held; another page shows zeros, or what
  // this arena once wrote (I7). Throws OutOfPages, DriverError, TimedOut.
  std::vector<char> map(const Caller& caller, std::span<const Interval> intervals);
  // Ends what as many `map` of these blocks began. A page that no block needs stays mapped until
  // others want its memory, and until work launched so far in the streams that used it has passed.
  // Throws InvalidArgument if a page is not mapped as often; nothing is changed then.
  void unmap(const Caller& caller, std::span<const Interval> intervals);
  // Has the mapper map the pages of `intervals`, and returns at once.
  void prepare(std::span<const Interval> intervals);
  // Gives back what no block needs. Returns how many pages are on their way.
  // Throws TimedOut.
  std::size_t trim(const Caller& caller);
  // Work in the caller's stream uses the pages: they are unmapped only after it.
  void use(const Caller& caller);
  // Throws, once, what the mapper met while it worked for this arena (I10).
  void raise_error();
  // What a storage over the range holds: the addresses, and no page.
  Generation* publish();
  // The owner leaves: pages and addresses go as work and storages over them end. Never blocks,
  // never throws (I11). To be called once.
  void abandon() noexcept;

  ArenaCounts counts();
  std::vector<PageRecord> pages();

  // What its pool asks of it: see Client.
  const std::shared_ptr<PagePool>& pool() const override { return pool_; }
  const RowShape& shape() const override { return shape_; }
  Reservation& range() override { return range_; }
  bool placed() const override { return true; }
  void forget(const Generation* generation) noexcept VT_LOCKED override {
    generations_.remove(generation);
  }
  void leave() noexcept VT_LOCKED override;
  void give_back_unused() noexcept VT_LOCKED override;
  bool settle(PoolLock* lock) noexcept VT_LOCKED override;
  const std::exception_ptr& refusal() const VT_LOCKED override { return unmap_.refusal(); }
  std::size_t pages_leaving() const VT_LOCKED override;
  std::size_t drop_ahead() VT_LOCKED override;
  bool reusable() const VT_LOCKED override { return false; }
  std::chrono::steady_clock::time_point cached_at() const VT_LOCKED override;
  void evict(bool aged = false) VT_LOCKED override;
  bool to_clean() const VT_LOCKED override { return false; }
  bool busy() const VT_LOCKED override { return busy_ || waiting_ != 0; }
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED override;
  void enter_ahead(Reservation::Arrival& arrival) VT_LOCKED override;
  std::size_t missing_ahead() const VT_LOCKED override;
  bool wants() const VT_LOCKED override { return !wanted_.empty(); }
  Claim claim_back(Departure& departure, std::size_t pages) noexcept VT_LOCKED override;
  void enter_back(Departure& departure) VT_LOCKED override;
  bool claim_cleaning(std::vector<Reservation::Run>&, std::size_t) VT_LOCKED override {
    return false;
  }
  FencePtr clean(std::span<const Reservation::Run>) override { return nullptr; }
  void enter_cleaning(std::span<const Reservation::Run>, FencePtr, std::exception_ptr)
      VT_LOCKED override {}
  std::exception_ptr take_error() VT_LOCKED override { return std::exchange(error_, nullptr); }
  void protect_for_child(std::vector<Page*>& seen) noexcept VT_LOCKED override;
  void add_to(PoolCounts& counts) const VT_LOCKED override;
  void check(std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED override;

 private:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::uint32_t kNone = UINT32_MAX;

  // Of a page that no block needs, why it is mapped.
  enum class Idle : std::uint8_t { no, cached, prefetched, leaving };
  struct State {
    std::uint32_t uses = 0;  // blocks that need it
    Idle idle = Idle::no;
    std::uint32_t older = kNone, newer = kNone;  // among the cached
    Time cached_at;
  };

  class Busy;
  Arena(const std::shared_ptr<PagePool>& pool, std::size_t bytes, std::size_t pages);

  std::vector<Interval> pages_of(std::span<const Interval> intervals) const;
  ArenaCounts counts_now() const VT_LOCKED;
  void await_turn(PoolLock& lock, const Caller& caller) VT_LOCKED;
  void require_no_capture(const Caller& caller) const;
  std::vector<Reservation::Run> missing(const char* operation,
                                        std::span<const Interval> pages) const VT_LOCKED;
  std::vector<char> map_missing(PoolLock& lock, const Caller& caller,
                                std::span<const Interval> pages) VT_LOCKED;
  void begin_use(std::span<const Interval> pages) noexcept VT_LOCKED;
  void end_use(std::span<const Interval> pages) noexcept VT_LOCKED;
  bool may_cache() const VT_LOCKED;
  void enlist() VT_LOCKED;
  void cache(std::size_t page, Time now) noexcept VT_LOCKED;
  void uncache(std::size_t page) noexcept VT_LOCKED;
  // A page that no block needs is to go.
  void let_go(std::size_t page) noexcept VT_LOCKED;
  void touch(Interval pages) noexcept VT_LOCKED;
  bool begin_unmapping() VT_LOCKED;
  bool claim_departure(Departure& departure, std::size_t pages) VT_LOCKED;
  bool release_range() VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  bool owned_ VT_GUARDED = true;      // the owner has not left
  bool reserved_ VT_GUARDED = false;  // the range is ours
  bool busy_ VT_GUARDED = false;      // a thread makes driver calls for it without the lock
  bool mapping_ VT_GUARDED = false;   // pages are counted that map() has yet to map
  std::size_t waiting_ VT_GUARDED = 0;
  std::vector<State> states_ VT_GUARDED;                                 // of every page
  std::uint32_t oldest_ VT_GUARDED = kNone, newest_ VT_GUARDED = kNone;  // of the cached
  std::size_t cached_ VT_GUARDED = 0;                                    // pages on that list
  std::vector<Interval> wanted_ VT_GUARDED;  // pages that the mapper is to map
  Interval touched_ VT_GUARDED;              // within which pages are to go
  PendingUnmap unmap_ VT_GUARDED;
  bool aged_ VT_GUARDED = false;                  // what goes has been free for long
  std::vector<FencePtr> ready_after_ VT_GUARDED;  // the zeroing of prefetched pages
  PendingWork work_ VT_GUARDED;
  Generations generations_ VT_GUARDED;
  std::unique_ptr<Generation> owner_end_ = std::make_unique<Generation>();
  std::exception_ptr error_ VT_GUARDED;  // of the mapper, not yet raised
};

}  // namespace vtensor
