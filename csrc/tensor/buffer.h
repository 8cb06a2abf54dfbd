// One reservation of addresses, divided into rows that grow together, and the pages behind it. What
// stays mapped is the owner's extent, what published generations cover, and what is ready ahead of
// the extent; everything else is given back, once the work that may touch it is done.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fault_report.h"
#include "base/interval.h"
#include "policy/client.h"
#include "tensor/ahead.h"
#include "tensor/leftover.h"
#include "tensor/page_set.h"
#include "tensor/row_geometry.h"
#include "vmm/caller.h"
#include "vmm/row_shape.h"

namespace vtensor {

class RowFaults;

class Buffer final : public Client {
 public:
  // Takes a cached buffer of this shape, or makes one. Throws InvalidArgument, CapacityExceeded
  // if the sizes overflow, DriverError.
  static std::shared_ptr<Buffer> create(const std::shared_ptr<PagePool>& pool,
                                        const RowShape& shape, const Caller& caller);
  // Makes one. `report`: what reports of faults say of its addresses; null if they are a tensor's.
  // Throws as `create`.
  static std::shared_ptr<Buffer> make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                      const Caller& caller,
                                      std::unique_ptr<faults::Range> report = nullptr);
  // One whose first row begins at `base` in the range of `host`, which stays reserved as long.
  // Requires: the rows lie in that range, and nothing else of them is mapped or placed.
  static std::shared_ptr<Buffer> place(const std::shared_ptr<Buffer>& host, Address base,
                                       const RowShape& shape, const Caller& caller);

  const RowGeometry& geometry() const { return geometry_; }
  Address address_of(std::size_t row, std::size_t position) const {
    return range_.address(row, 0) + geometry_.offset(position);
  }
  Interval indices_of(Interval positions) const { return geometry_.indices_of(positions); }

  // -- lengths

  // The owner's positions, which other threads read with the lock.
  Interval positions() const { return positions_; }
  // The pages that they need.
  Interval extent() const VT_LOCKED { return extent_; }
  // Makes `positions` the owner's if that needs no driver call, because what they add is mapped,
  // ready and not shared. False if it does, and if another thread holds the lock; nothing is
  // changed then.
  bool grow_within(const Caller& caller, Interval positions);
  // The same in two steps, for many buffers under one lock: `grow_ready` once `is_ready`.
  bool is_ready(Interval positions) const VT_LOCKED;
  void grow_ready(const Caller& caller, Interval positions) VT_LOCKED;
  // Has the processor begin to load it. Of many buffers before the first is looked at, all loads
  // are under way at once.
  void warm() const {
    const auto* const begin = reinterpret_cast<const std::byte*>(this);
    for (std::size_t at = 0; at < sizeof *this; at += kCacheLine) __builtin_prefetch(begin + at);
  }
  // Makes `positions` the owner's, as one `Growth` which writes what it adds (see growing.h).
  void grow(const Caller& caller, Interval positions, bool populate, Interval stale = {});
  // Has the mapper make the positions below `end` ready, and returns at once.
  void prepare(std::size_t end);
  // The same with the lock held: now if `soon`, else once the mapper is awake.
  void want_until(std::size_t end, bool soon) VT_LOCKED;
  // The same now, before what looks ahead and whatever the share of look-ahead is.
  void announce(std::size_t end) VT_LOCKED;
  // Positions below lie in the extent or in what is ready.
  std::size_t ready_until() const VT_LOCKED { return ahead_.ready_until(); }
  // Makes a smaller extent the owner's. What no generation covers is unmapped, once the caller's
  // stream and all others that used it have passed this point. Of a placed buffer, what is ready
  // behind the extent stays so below position `keep`.
  void retract(const Caller& caller, Interval positions, std::size_t keep = 0);
  // Zeroes `positions` of every row; they are mapped and owned.
  void zero(const Caller& caller, Interval positions);

  // -- publication

  // A generation over the present extent.
  Generation* publish();
  // The same; null if that would have to wait for the lock.
  Generation* try_publish();
  bool published();
  // Points behind all work launched so far that may use the pages.
  std::vector<FencePtr> work();
  // As `publish`, for work that will be launched in the caller's stream.
  Generation* lease(const Caller& caller);
  // All of that work is launched. `after` is a point behind it if the caller named the stream;
  // null if the work was captured into a graph.
  void end_lease(const Caller& caller, FencePtr after);

  // -- what others share with it (see sharing.h)

  // Whether a write to some page of the buffer does not reach its handle.
  bool copy_on_write();
  bool shares() const VT_LOCKED { return range_.copy_on_write() != 0; }
  // The page that is shared with others at an index, or is to be; null if none is.
  const Page* shared_at(std::size_t row, std::size_t index) const VT_LOCKED;
  // How many pages at the beginning of both extents are the same in every row.
  std::size_t shared_with(const Buffer& other) const VT_LOCKED;
  // Positions from `position` on and below this are owned, and behind writable pages.
  std::size_t writable_until(std::size_t position) const VT_LOCKED;
  // Pages below are the owner's, or will be without another page.
  std::size_t owned_until() const VT_LOCKED {
    return expected_ == nullptr ? extent_.end : expected_->indices.end;
  }

  // -- reuse

  // A cached buffer whose owner left gets a new one; false if it is not cached, or something else
  // of it is still mapped. Waits for the mapper's step.
  bool reuse_cached(const Caller& caller);
  Interval cached() const VT_LOCKED { return leftover_.cached(); }
  // Cached pages are to go, and none are to be cached when the worker is done with a buffer whose
  // owner left.
  void keep_nothing() VT_LOCKED;
  // Of a placed one: nothing of its rows is mapped, or can still come to be, so that the place may
  // be used again.
  bool vacant() const VT_LOCKED { return !reserved_ && range_.quarantined() == 0; }

  // -- for growing and sharing

  bool owned() const VT_LOCKED { return owned_; }
  // The owner has `positions` from now on, behind the pages of `extent`; pages below `ready_end`
  // are ready. Requires: all of them are mapped.
  void assign(Interval positions, Interval extent, std::size_t ready_end = 0) VT_LOCKED;
  // The same for a growth, which is counted, and may have more looked ahead for. `ready`: what it
  // adds was.
  void grow_to(Interval positions, Interval extent, bool ready) VT_LOCKED;
  // Throws if pages of the extent are quarantined.
  void require_whole(const char* operation) const VT_LOCKED;
  // Waits for the work of all streams that use the pages. Throws as `require_no_capture` does, and
  // TimedOut.
  void await_streams(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Gives `runs` pages of their own, and zeroes `stale` positions. Requires: busy.
  void unshare(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
               Interval stale = {}) VT_LOCKED;
  // What the owner is to have; null if nothing. The mapper maps it first if it is to look ahead.
  const ExpectedPages* expected() const VT_LOCKED { return expected_.get(); }
  void expect(std::unique_ptr<const ExpectedPages> expected) VT_LOCKED {
    expected_ = std::move(expected);
  }
  // What is missing for that. False if some of it can never be mapped.
  bool find_expected(Reservation::Arrival& arrival) const VT_LOCKED;
  // It is mapped, and the owner's.
  void enter_expected() VT_LOCKED;

  // -- what its pool asks of it: see Client

  bool placed() const override { return host_ != nullptr; }
  void forget(const Generation* generation) noexcept override VT_LOCKED;
  void leave() noexcept override VT_LOCKED;
  void give_back_unused() noexcept override VT_LOCKED;
  std::size_t pages_leaving() const override VT_LOCKED;
  // Of those, the ones that stand at `indices` and are free once they have left: nothing else has
  // them.
  std::size_t pages_coming(Interval indices) const VT_LOCKED;
  std::size_t drop_ahead() override VT_LOCKED;
  bool reusable() const override VT_LOCKED;
  void evict() override VT_LOCKED;
  std::size_t missing_ahead() const override VT_LOCKED;
  bool wants() const override VT_LOCKED { return ahead_.want_end() != 0; }
  bool to_clean() const override VT_LOCKED;
  bool claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) override VT_LOCKED;
  FencePtr clean(std::span<const Reservation::Run> runs) override;
  void enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                      std::exception_ptr error) override VT_LOCKED;
  void add_to(PoolCounts& counts) const override VT_LOCKED;
  void check(std::unordered_map<const Page*, PageUse>& uses) const override VT_LOCKED;

  std::size_t mapped_pages();
  // As that, at once: no lock is waited for and nothing taken back, so that it may be a moment old.
  std::size_t mapped_pages_seen() const noexcept { return range_.mapped() + range_.quarantined(); }

 private:
  Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  // What waits to be unmapped, or is to.
  std::vector<Interval> leaving() const VT_LOCKED;

  const char* noun() const override { return "tensor"; }
  const char* capture_advice() const override {
    return "grow before the capture, or extend(n) and truncate(length) once so that the pages are "
           "ready";
  }
  const char* why_mapped(std::size_t index) const override VT_LOCKED;
  std::vector<Interval> uncovered() const override VT_LOCKED;
  bool ends() const override VT_LOCKED;
  void free_range() override VT_LOCKED;
  bool find_missing(Reservation::Arrival& arrival, std::size_t pages) override VT_LOCKED;
  void give_up_ahead() override VT_LOCKED;
  void arrived_ahead(const Reservation::Arrival& arrival) override VT_LOCKED;

  // The pages behind the extent that are kept or made ready.
  Interval ahead() const VT_LOCKED;
  // The pages that are mapped for the owner, or for the next one.
  Interval kept() const VT_LOCKED;
  std::vector<Reservation::Bytes> bytes_of(Interval positions) const;
  void set_positions(Interval positions) VT_LOCKED;
  void set_ready(std::size_t end) VT_LOCKED;
  // Finds what is ready of the pages up to `end`.
  void find_ready(std::size_t end) VT_LOCKED;
  // Asks for more if the growth to come would soon pass what is ready. A call `added` so many
  // positions, and `crossed` into new pages.
  void look_ahead(std::size_t added, bool crossed) VT_LOCKED;
  void want(std::size_t index_end, bool soon) VT_LOCKED;
  void try_to_cache() VT_LOCKED;
  // A cached buffer gets a new owner, whose growth waits for the work of the last one. Requires:
  // reusable. Throws if the driver refuses; it stays cached then.
  void reuse(const Caller& caller) VT_LOCKED;
  // Of cached pages, those that count against what freed tensors may leave: what a host's places
  // keep is bounded by the host.
  std::size_t pages_to_count(Interval cached) const {
    return placed() ? 0 : cached.size() * range_.rows();
  }

  static constexpr std::size_t kCacheLine = 64;

  // What growing over ready pages looks at lies together: many buffers grow in one step, and their
  // memory is cold.
  const RowGeometry geometry_;
  Generation* host_ = nullptr;       // if it is placed: what keeps the range there reserved
  RowFaults* row_faults_ = nullptr;  // what known_ has, if that is a tensor's
  Interval positions_;               // changed with the lock; the owner reads it without it too
  Interval extent_ VT_GUARDED;       // pages that positions_ need, and those of a longer prefix
  Ahead ahead_ VT_GUARDED;           // behind them
  Leftover leftover_ VT_GUARDED;     // of the last owner
  std::unique_ptr<const ExpectedPages> expected_ VT_GUARDED;  // null once they are mapped
};

}  // namespace vtensor
