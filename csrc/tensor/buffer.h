// Rows that grow together: one reservation of addresses and the pages behind it. The owner's extent
// stays mapped, and so do the pages that generations cover and those that are ready past the
// extent. Every other page is unmapped once the work that may use it has passed.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/fault_report.h"
#include "base/interval.h"
#include "policy/client.h"
#include "policy/look_ahead.h"
#include "tensor/page_set.h"
#include "vmm/caller.h"
#include "vmm/reservation.h"

namespace vtensor {

class Buffer;
class RowFaults;

// `positions` become the owner's: missing pages are mapped, shared pages of `written` positions are
// unshared, and `stale` positions are zeroed.
struct Growth {
  Buffer* buffer;
  Interval positions;
  Interval written;
  Interval stale = {};
};

class Buffer final : public Client {
 public:
  // Takes a cached buffer of this shape, or makes one. Throws InvalidArgument, CapacityExceeded
  // if the sizes overflow, DriverError.
  static std::shared_ptr<Buffer> create(const std::shared_ptr<PagePool>& pool,
                                        const RowShape& shape, const Caller& caller);
  // Makes one. `report` explains faults at its addresses; null: as those of a tensor. Kernels may
  // be given the addresses of the first `backed_pages` pages of each row whose number is a multiple
  // of `backed_rows`, mapped or not (see Driver::reserve). Throws as `create`.
  static std::shared_ptr<Buffer> make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                      const Caller& caller,
                                      std::unique_ptr<faults::Range> report = nullptr,
                                      std::size_t backed_rows = 1, std::size_t backed_pages = 0);
  // Makes a buffer whose first row begins at `base` in the range of `host`, and keeps that range
  // reserved. Requires: the rows lie in that range, and nothing is mapped or placed there.
  static std::shared_ptr<Buffer> place(const std::shared_ptr<Buffer>& host, Address base,
                                       const RowShape& shape, const Caller& caller);

  Address address_of(std::size_t row, std::size_t position) const {
    return range_.address(row, 0) + offset(position);
  }
  // The page indices that hold `positions`.
  Interval indices_of(Interval positions) const {
    if (positions.empty()) return {};
    const std::size_t page = range_.page_size();
    return {offset(positions.begin) / page, ceil_div(offset(positions.end), page)};
  }
  // The first position that lies wholly past the pages of `positions`.
  std::size_t first_past(Interval positions) const {
    const std::size_t end = indices_of(positions).end * range_.page_size();
    return end > shape_.phase ? ceil_div(end - shape_.phase, shape_.item_bytes) : 0;
  }

  // -- lengths

  // The owner's positions. Other threads read them with the lock.
  Interval positions() const { return positions_; }
  // The page indices that the positions need; none while they are deferred.
  Interval extent() const VT_LOCKED { return extent_; }
  // Makes `positions` the owner's without a driver call: if the pages that they add are ready and
  // not shared. False, and nothing is changed, if they are not or if another thread holds the lock.
  bool grow_within(const Caller& caller, Interval positions);
  // `grow_within` in two steps, for many buffers under one lock: `grow_ready` requires `is_ready`.
  // That requires also that the owner's positions from `written` on are not shared.
  bool is_ready(Interval positions, std::size_t written) const VT_LOCKED;
  void grow_ready(const Caller& caller, Interval positions) VT_LOCKED;
  // Makes `positions` the owner's by one `Growth` that writes the positions it adds.
  void grow(const Caller& caller, Interval positions, bool populate, Interval stale = {});
  // Grows several buffers of one pool, each named once: whole or nothing (I8), and mapped by one
  // batch of driver calls. `populate` makes new memory present now.
  static void grow_all(const Caller& caller, std::span<const Growth> growths, bool populate);
  // Has the mapper make the positions below `end` ready, and returns at once.
  void prepare(std::size_t end);
  // `prepare` with the lock held. Unless `soon`, the mapper is not woken, and zeroes nothing.
  void want_until(std::size_t end, bool soon) VT_LOCKED;
  // `prepare` before all look-ahead, which gets what is left.
  void announce(std::size_t end) VT_LOCKED;
  // Positions below it lie in the extent or in ready pages.
  std::size_t ready_until() const VT_LOCKED { return ready_until_; }
  // Makes fewer `positions` the owner's. Pages that no generation covers are unmapped once all
  // streams that `use` has noted have passed this point. In a placed buffer, ready pages below
  // position `keep` stay.
  void shrink_to(Interval positions, std::size_t keep = 0) noexcept;

  // -- publication

  // A generation over `indices`, which lie in the extent.
  Generation* publish(Interval indices);
  // `publish`; null if another thread holds the lock.
  Generation* try_publish(Interval indices);
  bool published();
  // Fences after all work launched so far that may use the pages.
  std::vector<FencePtr> work();
  // A generation over the extent, for work that will be launched in the caller's stream.
  Generation* lease(const Caller& caller);
  // All work of a lease is launched. `after`: a fence after it if the caller named the stream; null
  // if the work was captured into a graph.
  void end_lease(const Caller& caller, FencePtr after);

  // -- shared pages. Each operation takes the lock, and is whole or nothing.

  // A buffer of `shape` whose row i has the pages of row rows[i]. Copies no byte. The pages are
  // copy-on-write in both buffers. If the owner `moves` there, the streams that it uses go along,
  // and the pages stay writable if no generation covers them and no two rows are to have the same.
  // Waits for the work of all streams that use this buffer.
  std::shared_ptr<Buffer> share_rows(const Caller& caller, const RowShape& shape,
                                     std::span<const std::size_t> rows, bool moves);
  // Unshares the copy-on-write pages of `positions`.
  void unshare(const Caller& caller, Interval positions);
  // Makes the pages of `indices`, which lie in the extent, copy-on-write in every row. Returns a
  // page set for each interval, to be mapped in other buffers. Waits for the work of all streams
  // that use this buffer. If all are writable and may stay `writable`, it makes no mapping call
  // and waits for nothing: they become copy-on-write once another buffer accepts them, and nothing
  // is written there before `protect`. Requires: there is an interval.
  PageSets offer(const Caller& caller, std::span<const Interval> indices, bool writable = false);
  // Makes pages of `indices` copy-on-write that were offered and are still writable here. If there
  // are any, waits for the work of all streams that use this buffer.
  void protect(const Caller& caller, Interval indices);
  // Makes `positions` the owner's, and maps the pages of adjacent `page_sets`, which hold them,
  // copy-on-write at their indices: those are the extent then. If `deferred`, they are kept without
  // a mapping, and mapped by the mapper or by `accept_deferred`. Waits for pages that are leaving
  // there. If it fails, pages may have become copy-on-write in the buffer that they come from.
  // Requires: there is a page set, the owner has no positions, and nothing is ready or cached at
  // those indices.
  void accept(const Caller& caller, Interval positions, PageSetSpan page_sets,
              bool deferred = false);
  void accept_deferred(const Caller& caller);
  // In each buffer row i gets the pages of row rows[i], at the same addresses; if the driver
  // refuses, in no buffer. Requires: there are buffers, of one pool, each named once, without
  // living generations, and the driver remaps in one step, because the owner would lose a page that
  // cannot be put back.
  using Reindexing = std::pair<Buffer*, std::span<const std::size_t>>;
  static void reindex(const Caller& caller, std::span<const Reindexing> all);

  // Whether some page of the buffer is copy-on-write.
  bool copy_on_write();
  bool shares() const VT_LOCKED { return range_.copy_on_write() != 0; }
  // The copy-on-write page, or deferred page, at an index; null if there is none.
  const Page* shared_at(std::size_t row, std::size_t index) const VT_LOCKED;
  // How many page indices from the beginning of both extents have the same pages in every row.
  std::size_t shared_with(const Buffer& other) const VT_LOCKED;
  // Positions from `position` up to this one are the owner's and lie in writable pages.
  std::size_t writable_until(std::size_t position) const VT_LOCKED;
  // Page indices below it are in the extent, or are deferred.
  std::size_t owned_until() const VT_LOCKED {
    return deferred_ == nullptr ? extent_.end : deferred_->indices().end;
  }

  // -- readers in other processes (see vmm/shared_range.h)

  // Shows them the owner's positions, once their content is there. Positions that are given back
  // are hidden at once. Requires: the buffer is a tensor's.
  void show_positions();

  // -- reuse

  // A cached buffer gets a new owner, whose growth waits for the work of the last one. False if it
  // is not cached, or if pages of it are still leaving. Waits for the mapper's step. Throws if the
  // driver refuses; it stays cached then.
  bool reuse_cached(const Caller& caller);
  Interval cached() const VT_LOCKED { return range_.hull_of(Why::cached); }
  // Evicts cached pages, and caches none later.
  void keep_nothing() VT_LOCKED;
  // Placed buffers only: fully unmapped, another buffer can be placed there.
  bool vacant() const VT_LOCKED { return !reserved_; }

  // -- for its pool: see Client

  void leave() noexcept override VT_LOCKED;
  void give_back_unused() noexcept override VT_LOCKED;
  // Pages leaving at `indices` that have no other reference, so they are free once unmapped.
  std::size_t pages_coming(Interval indices) const VT_LOCKED;
  void evict() override VT_LOCKED;
  void check(std::unordered_map<const Page*, PageUse>& uses) const override VT_LOCKED;

 private:
  Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  void find_missing(Reservation::Arrival& arrival, std::size_t pages) override VT_LOCKED;
  bool wants() const override VT_LOCKED { return deferred_ != nullptr || Client::wants(); }
  void arrived(const Reservation::Arrival& arrival) override VT_LOCKED;
  void ahead_changed() override VT_LOCKED;

  // Bytes from the beginning of a row's first page to a position.
  std::size_t offset(std::size_t position) const {
    return shape_.phase + position * shape_.item_bytes;
  }
  // How many positions from 0 on lie wholly in pages below `index`.
  std::size_t whole_below(std::size_t index) const {
    const std::size_t end = index * range_.page_size();
    return end > shape_.phase ? (end - shape_.phase) / shape_.item_bytes : 0;
  }
  std::vector<Reservation::Bytes> bytes_of(Interval positions) const;
  void set_positions(Interval positions) VT_LOCKED;
  // Has readers in other processes see these positions.
  void show(Interval positions) noexcept;
  // Set the owner's positions and extent. Requires: its pages are mapped.
  void assign(Interval positions, Interval extent) VT_LOCKED;
  void set_extent(Interval extent) VT_LOCKED;
  // The extent of a growth to `positions`: an accepted prefix may be longer in pages than in
  // positions.
  Interval extent_of(Interval positions) const VT_LOCKED;
  // `assign` for a growth: counts it and looks ahead. `ready`: the pages that it adds were ready.
  void grow_to(Interval positions, Interval extent, bool ready) VT_LOCKED;
  struct Growing;
  static std::size_t fresh_pages_for(std::span<const Growing> all) VT_LOCKED;
  // Waits for the work of all streams that use the pages. Throws as `require_no_capture` does, and
  // TimedOut.
  void await_streams(PoolLock& lock, const Caller& caller) VT_LOCKED;
  std::unique_ptr<Busy> quieten(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Gives `runs` pages of their own, and zeroes `stale` positions. Requires: busy.
  void unshare_runs(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
                    Interval stale = {}) VT_LOCKED;
  std::vector<Reservation::Run> offered_in(Interval indices) const VT_LOCKED;
  void protect_origins(const Caller& caller, PageSetSpan page_sets) const;
  void map_shared(PoolLock& lock, const Caller& caller, Interval indices,
                  std::span<Page* const> pages) VT_LOCKED;
  // The deferred pages are mapped: they become the owner's.
  void enter_deferred() VT_LOCKED;
  void set_ready(std::size_t end) VT_LOCKED;
  // The first page index of `indices` that is not ready.
  std::size_t ready_in(Interval indices) const VT_LOCKED;
  // After a growth that `added` positions, and `crossed` into new pages: asks the mapper for more
  // if growth at this pace would soon pass the ready pages.
  void look_ahead(std::size_t added, bool crossed) VT_LOCKED;
  // The position to look ahead to.
  std::size_t lead() const VT_LOCKED;
  void try_to_cache() VT_LOCKED;

  // The members that growth over ready pages reads lie together: one step grows many buffers, whose
  // memory is cold.
  RowFaults* row_faults_ = nullptr;  // known_'s range, if the buffer is a tensor's
  Interval positions_;               // changed with the lock; the owner reads it without it too
  Interval extent_ VT_GUARDED;       // page indices of positions_, and of an accepted longer prefix
  // Page indices below it are in the extent, or mapped, clean and writable in every row; positions
  // below ready_until_ lie in pages below it.
  std::size_t ready_end_ VT_GUARDED = 0, ready_until_ VT_GUARDED = 0;
  LookAhead pace_ VT_GUARDED;
  bool may_keep_ VT_GUARDED = true;  // pages may be cached once the owner has left
  // Pages of others that the owner's positions will have: its extent once they are mapped, and null
  // then.
  std::unique_ptr<const PageSet> deferred_ VT_GUARDED;
};

}  // namespace vtensor
