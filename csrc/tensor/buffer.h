// One reservation of addresses, divided into rows that grow together, and the pages behind it. What
// stays mapped is the owner's extent, what published generations cover, and what is ready ahead of
// the extent; everything else is given back, once the work that may touch it is done.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/fault_report.h"
#include "base/interval.h"
#include "policy/look_ahead.h"
#include "policy/range_client.h"
#include "vmm/caller.h"
#include "vmm/row_shape.h"

namespace vtensor {

class PageSet;
class RowFaults;

class Buffer final : public RangeClient {
 public:
  // Takes a cached buffer of this shape, or makes one. Throws InvalidArgument, CapacityExceeded
  // where the sizes overflow, DriverError.
  static std::shared_ptr<Buffer> create(const std::shared_ptr<PagePool>& pool,
                                        const RowShape& shape, const Caller& caller);
  // Makes one. `told`: what reports of faults say of its addresses; null where they are a tensor's.
  // Throws as `create`.
  static std::shared_ptr<Buffer> make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                      const Caller& caller,
                                      std::unique_ptr<faults::Range> told = nullptr);
  // One whose first row begins at `base` in the range of `host`, which stays reserved as long.
  // Requires: the rows lie in that range, and nothing else of them is mapped or placed.
  static std::shared_ptr<Buffer> place(const std::shared_ptr<Buffer>& host, Address base,
                                       const RowShape& shape, const Caller& caller);

  Address address_of(std::size_t row, std::size_t position) const {
    return range_.address(row, 0) + shape_.phase + position * shape_.item_bytes;
  }
  Interval indices_of(Interval positions) const;
  // The first position that lies wholly behind the pages of `positions`.
  std::size_t reach(Interval positions) const {
    return ceil_div(indices_of(positions).end * range_.page_size() - shape_.phase,
                    shape_.item_bytes);
  }

  // Makes `positions` the owner's where that needs no driver call, because what they add is mapped,
  // ready and not shared. False where it is not, and where another thread holds the lock; nothing
  // is changed then.
  bool grow_within(const Caller& caller, Interval positions);
  // Makes `positions` the owner's extent: maps what is missing, unshares the pages that `written`
  // positions share with another buffer, and zeroes `stale` positions.
  struct Growth {
    Buffer* buffer;
    Interval positions;
    Interval written;
    Interval stale = {};
  };
  // Grows several buffers of one pool, each named once: whole or nothing (I8), and mapped by one
  // batch of driver calls. `populate` makes new memory present now.
  static void grow(const Caller& caller, std::span<const Growth> growths, bool populate);
  // The same for one, which writes what it adds.
  void grow(const Caller& caller, Interval positions, bool populate, Interval stale = {});
  // Has the mapper make the positions below `end` ready, and returns at once.
  void prepare(std::size_t end);
  // The same for both in one go, for many buffers under one lock: `grow_ready` once `is_ready`.
  bool shares() const VT_LOCKED { return range_.copy_on_write() != 0; }
  bool is_ready(Interval positions) const VT_LOCKED;
  void grow_ready(const Caller& caller, Interval positions) VT_LOCKED;
  // Positions below lie in the extent or in what is ready.
  std::size_t ready_until() const VT_LOCKED { return ready_until_; }
  // The mapper is to make the positions below `end` ready: now where `soon`, else once it is awake.
  void want_until(std::size_t end, bool soon) VT_LOCKED;
  // The same now, before what looks ahead and whatever the share of look-ahead is.
  void announce(std::size_t end) VT_LOCKED;
  // Makes a smaller extent the owner's. What no generation covers is unmapped, once the caller's
  // stream and all others that used it have passed this point. Of a placed buffer, what is ready
  // behind the extent stays so below position `keep`.
  void retract(const Caller& caller, Interval positions, std::size_t keep = 0);
  // A generation over the present extent.
  Generation* publish();
  // The same; null where that would have to wait for the lock.
  Generation* try_publish();
  bool published();
  // Points behind all work launched so far that may use the pages.
  std::vector<FencePtr> work();
  // As `publish`, for work that will be launched in the caller's stream.
  Generation* lease(const Caller& caller);
  // All of that work is launched. `after` is a point behind it where the caller named the stream;
  // null where the work was captured into a graph.
  void end_lease(const Caller& caller, FencePtr after);

  // Parts the shared pages behind `positions`, so that writes there reach the page.
  void unshare(const Caller& caller, Interval positions);
  // Zeroes `positions` of every row; they are mapped and owned.
  void zero(const Caller& caller, Interval positions);
  // A buffer of `shape` whose row i has the pages of row rows[i]. No byte is copied; the pages are
  // copy-on-write in both unless `exclusive`, which is for an owner that leaves this buffer and
  // that no generation covers. Waits for the work of all streams that use this buffer.
  std::shared_ptr<Buffer> share(const Caller& caller, const RowShape& shape,
                                std::span<const std::size_t> rows, bool exclusive);
  // The pages behind `indices` of every row, to be mapped copy-on-write elsewhere; they are
  // copy-on-write here from now on. One page set for each of `indices`, which lie in the extent.
  // Waits for the work of all streams that use this buffer. Whole or nothing.
  std::vector<std::shared_ptr<PageSet>> offer(const Caller& caller,
                                              std::span<const Interval> indices);
  // The same without a wait, and without a driver call that maps: pages stay writable here until
  // another buffer accepts them. Requires: nothing is written there before `protect`. As `offer`
  // where some of them are copy-on-write already, because the kernel may have copied these.
  std::vector<std::shared_ptr<PageSet>> offer_writable(const Caller& caller,
                                                       std::span<const Interval> indices);
  // Makes what others were offered of `indices`, and is still writable here, copy-on-write. Waits
  // for the work of all streams that use this buffer if there is any. Whole or nothing.
  void protect(const Caller& caller, Interval indices);
  // Maps the pages of `page_sets`, which lie behind one another and hold `positions`, copy-on-write
  // at their pages: they are the owner's then. Waits for what is on its way out there. Whole or
  // nothing, but that pages may have become copy-on-write where they come from. Requires: nothing
  // is owned, and nothing ready or cached there.
  void accept(const Caller& caller, Interval positions,
              std::span<const std::shared_ptr<PageSet>> page_sets);
  // The same in two steps. `expect`: the pages are the owner's to have, and are kept for it. The
  // mapper maps them first if it is to look ahead. `accept_expected` maps what it has not, and does
  // nothing where nothing is expected.
  void expect(const Caller& caller, Interval positions,
              std::span<const std::shared_ptr<PageSet>> page_sets);
  void accept_expected(const Caller& caller);
  // Row i gets the pages of row rows[i], at the same addresses; in all of these buffers or, where
  // the driver refuses, in none. Requires: buffers of one pool, each named once, no generation of
  // which is alive, and a driver that remaps in one step, because a page that cannot be put back
  // would leave the owner without it.
  struct Reindexing {
    Buffer* buffer;
    std::span<const std::size_t> rows;
  };
  static void reindex(const Caller& caller, std::span<const Reindexing> all);
  // A cached buffer whose owner left gets a new one; false where it is not cached, or something
  // else of it is still mapped. Waits for the mapper's step.
  bool reuse_cached(const Caller& caller);

  // Whether a write to some page of ours does not reach its handle.
  bool copy_on_write();
  std::size_t mapped_pages();
  // As that, at once: no lock is waited for and nothing taken back, so that it may be a moment old.
  std::size_t mapped_pages_seen() const noexcept { return range_.mapped() + range_.quarantined(); }

  // What its pool asks of it: see Client.
  bool placed() const override { return host_ != nullptr; }
  void forget(const Generation* generation) noexcept override VT_LOCKED;
  void leave() noexcept override VT_LOCKED;
  void give_back_unused() noexcept override VT_LOCKED;
  std::size_t pages_leaving() const override VT_LOCKED;
  // Of those, the ones that stand at `indices`.
  std::size_t pages_leaving(Interval indices) const VT_LOCKED;
  std::size_t drop_ahead() override VT_LOCKED;
  bool reusable() const override VT_LOCKED;
  std::chrono::steady_clock::time_point cached_at() const override VT_LOCKED { return cached_at_; }
  void evict(bool aged = false) override VT_LOCKED;
  bool to_clean() const override VT_LOCKED;
  void enter_ahead(Reservation::Arrival& arrival) override VT_LOCKED;
  std::size_t missing_ahead() const override VT_LOCKED;
  bool wants() const override VT_LOCKED { return wanting_; }
  bool claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) override VT_LOCKED;
  FencePtr clean(std::span<const Reservation::Run> runs) override;
  void enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                      std::exception_ptr error) override VT_LOCKED;
  void protect_for_child(std::vector<Page*>& seen) noexcept override VT_LOCKED;
  void add_to(PoolCounts& counts) const override VT_LOCKED;
  void check(std::unordered_map<const Page*, PageUse>& uses) const override VT_LOCKED;

  // Cached pages are to go, and none are to be cached when the worker is done with a buffer whose
  // owner left.
  void keep_nothing() VT_LOCKED;
  // How many pages at the beginning of both extents are the same in every row.
  std::size_t shared_with(const Buffer& other) const VT_LOCKED;
  // Positions from `position` on and below this are owned, and behind pages of our own.
  std::size_t writable_until(std::size_t position) const VT_LOCKED;
  Interval extent() const VT_LOCKED { return extent_; }
  // The page that is shared with others at an index, or is to be; null where none is.
  const Page* shared_at(std::size_t row, std::size_t index) const VT_LOCKED;
  // Pages below are the owner's, or will be without another page.
  std::size_t owned_until() const VT_LOCKED {
    return expected_ == nullptr ? extent_end() : expected_->indices.end;
  }
  Interval positions() const { return positions_; }
  // Of a placed one: nothing of its rows is mapped, or can still come to be, so that the place may
  // be used again.
  bool vacant() const VT_LOCKED { return !reserved_ && range_.quarantined() == 0; }
  Interval cached() const VT_LOCKED { return cached_; }
  // A cached buffer gets a new owner, whose growth waits for the work of the last one. Requires:
  // reusable. Throws where the driver refuses; it stays cached then.
  void reuse(const Caller& caller) VT_LOCKED;

 private:
  const char* noun() const override { return "tensor"; }
  const char* capture_advice() const override {
    return "grow before the capture, or extend(n) and truncate(length) once so that the pages are "
           "ready";
  }
  const char* why_mapped(std::size_t index) const override VT_LOCKED;
  std::vector<Interval> uncovered() const override VT_LOCKED;
  bool is_quiet() override VT_LOCKED;
  bool ends() const override VT_LOCKED;
  bool has_fences() const override VT_LOCKED;
  void free_range() override VT_LOCKED;
  bool find_missing(Reservation::Arrival& arrival, std::size_t pages) override VT_LOCKED;
  void give_up_ahead() override VT_LOCKED;

  class Growing;
  // Pages of others that the owner is to have, row after row, each with a reference.
  struct Expected {
    Interval positions;
    Interval indices;
    std::vector<Page*> pages;
  };
  Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  void set_positions(Interval positions) VT_LOCKED;
  std::vector<Reservation::Bytes> bytes_of(Interval positions) const;
  // Throws where pages of the extent are quarantined.
  void require_whole(const char* operation) const VT_LOCKED;
  static std::size_t fresh_pages_for(std::span<const Growing> all) VT_LOCKED;
  void unshare(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
               Interval stale = {}) VT_LOCKED;
  std::unique_ptr<Busy> quieten(PoolLock& lock, const Caller& caller) VT_LOCKED;
  void add_page_sets(std::vector<std::shared_ptr<PageSet>>& to, std::span<const Interval> indices)
      VT_LOCKED;
  std::vector<Reservation::Run> offered_in(Interval indices) const VT_LOCKED;
  bool find_expected(Reservation::Arrival& arrival) const VT_LOCKED;
  void enter_expected() VT_LOCKED;
  void forget_expected() noexcept VT_LOCKED;
  void protect_origins(const Caller& caller, std::span<const std::shared_ptr<PageSet>> page_sets);

  // Where the pages behind the extent begin.
  std::size_t extent_end() const VT_LOCKED { return extent_.empty() ? 0 : extent_.end; }
  // The pages from `begin` on, up to `end`, that are mapped writable in every row and clean.
  Interval usable(std::size_t begin, std::size_t end) const VT_LOCKED;
  std::size_t limit_lead(std::size_t position) const VT_LOCKED;
  void mark_pace() VT_LOCKED;
  void look_ahead() VT_LOCKED;
  void want(std::size_t index_end, bool soon) VT_LOCKED;
  void set_ready(Interval indices) VT_LOCKED;
  void await_streams(PoolLock& lock, const Caller& caller) VT_LOCKED;
  void try_to_cache() VT_LOCKED;
  // Of cached pages, those that count against what freed tensors may leave: what a host's places
  // keep is bounded by the host.
  std::size_t pages_to_count(std::size_t pages) const { return host_ == nullptr ? pages : 0; }
  // What the mapper zeroes: cached pages, or those that were, ahead of their new owner.
  Interval to_zero() const VT_LOCKED { return owned_ ? unclean_ : cached_; }
  bool is_to_zero(const Entry& entry) const VT_LOCKED;
  // Has memory for what `missing` counts, with the lock held since it was last asked. Requires: not
  // busy, so that what this buffer itself no longer needs may go meanwhile.
  void require_ready(PoolLock& lock, const Caller& caller,
                     const std::function<std::pair<std::size_t, std::size_t>()>& missing) VT_LOCKED;
  Interval ahead() const VT_LOCKED;

  RowFaults* follower_ = nullptr;    // what known_ has, where that is a tensor's
  Generation* host_ = nullptr;       // where it is placed: what keeps the range there reserved
  bool wanting_ VT_GUARDED = false;  // on the pool's list
  // What growing over ready pages looks at lies together: many buffers grow in one step, and their
  // memory is cold.
  std::size_t want_end_ VT_GUARDED = 0;  // pages below are wanted ready
  std::size_t ready_until_ VT_GUARDED = 0;
  Interval positions_;          // changed with the lock; the owner reads it without it too
  Interval extent_ VT_GUARDED;  // pages that positions_ need
  Interval ready_ VT_GUARDED;   // pages behind the extent, mapped and clean in every row
  // Pages of a reused buffer that may hold its last owner's bytes.
  Interval unclean_ VT_GUARDED;
  std::unique_ptr<const Expected> expected_ VT_GUARDED;  // null once they are mapped
  Interval reused_ VT_GUARDED;  // of a placed one, pages that were cached as its owner came
  Interval cached_ VT_GUARDED;  // pages that wait for the next owner, mapped in every row
  std::vector<FencePtr> cached_after_ VT_GUARDED;
  std::chrono::steady_clock::time_point cached_at_ VT_GUARDED;
  FencePtr cleaned_after_ VT_GUARDED;  // the zeroing of cached pages; null if complete
  bool may_cache_ VT_GUARDED = true;   // once, when the owner has left
  LookAhead pace_ VT_GUARDED;
};

}  // namespace vtensor
