// One reservation of addresses, divided into rows that grow together, and the pages behind it. What
// stays mapped is the owner's extent, what published generations cover, and what is ready ahead of
// the extent; everything else is given back, once the work that may touch it is done.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/interval.h"
#include "policy/client.h"
#include "policy/generation.h"
#include "policy/look_ahead.h"
#include "policy/page_pool.h"
#include "policy/pending_unmap.h"
#include "policy/roster.h"
#include "vmm/caller.h"
#include "vmm/pending_work.h"
#include "vmm/reservation.h"
#include "vmm/row_shape.h"

namespace vtensor {

struct PageRecord {
  std::size_t row;
  std::size_t index;  // of the page in its row
  Address address;
  std::int64_t page_id;  // -1 where the kernel copied it and it has no handle of its own yet
  std::uint32_t shared;  // references to the page
  const char* state;     // "mapped", "shared", "prefetched", "cached", "private", "pinned",
                         // "quarantined"
};

class PageSet;

class Buffer final : public Client {
 public:
  // Takes a cached buffer of this shape, or makes one. Throws InvalidArgument, CapacityExceeded
  // where the sizes overflow, DriverError.
  static std::shared_ptr<Buffer> create(const std::shared_ptr<PagePool>& pool,
                                        const RowShape& shape, const Caller& caller);
  // Makes one. Throws as `create`.
  static std::shared_ptr<Buffer> make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                      const Caller& caller);
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

  // Throws, once, what the mapper met while it worked for this buffer (I10).
  void raise_error();

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
  // They require the pool's lock.
  bool shares() const { return range_.copy_on_write() != 0; }
  bool is_ready(Interval positions) const;
  void grow_ready(const Caller& caller, Interval positions);
  // Positions below lie in the extent or in what is ready.
  std::size_t ready_until() const { return ready_until_; }
  // The mapper is to make the positions below `end` ready: now where `soon`, else once it is awake.
  void want_until(std::size_t end, bool soon);
  // Makes a smaller extent the owner's. What no generation covers is unmapped, once the caller's
  // stream and all others that used it have passed this point. Of a placed buffer, what is ready
  // behind the extent stays so below position `keep`.
  void retract(const Caller& caller, Interval positions, std::size_t keep = 0);
  // A generation over the present extent.
  Generation* publish();
  // The same; null where that would have to wait for the lock.
  Generation* try_publish();
  bool published();
  // Work in the caller's stream uses the pages: they are unmapped only after it.
  void use(const Caller& caller);
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
  // Maps the pages of `page_sets`, which lie behind one another and hold `positions`, copy-on-write
  // at their pages: they are the owner's then. Waits for what is on its way out there. Whole or
  // nothing. Requires: nothing is owned, and nothing ready or cached there.
  void accept(const Caller& caller, Interval positions,
              std::span<const std::shared_ptr<PageSet>> page_sets);
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
  // The owner leaves: pages and addresses go as the generations over them end, or are cached. Never
  // blocks, never throws (I11). Takes effect before the lock is next let go. To be called once.
  void abandon() noexcept;

  // Whether a write to some page of ours does not reach its handle.
  bool copy_on_write();
  std::size_t mapped_pages();
  // As that, at once: no lock is waited for and nothing taken back, so that it may be a moment old.
  std::size_t mapped_pages_seen() const noexcept { return range_.mapped() + range_.quarantined(); }
  std::vector<PageRecord> pages();

  // Everything below requires the pool's lock.

  // What its pool asks of it: see Client.
  const std::shared_ptr<PagePool>& pool() const override { return pool_; }
  const RowShape& shape() const override { return shape_; }
  Reservation& range() override { return range_; }
  const Reservation& range() const { return range_; }
  bool placed() const override { return host_ != nullptr; }
  void forget(const Generation* generation) noexcept override;
  void leave() noexcept override;
  void give_back_unused() noexcept override;
  bool settle(PoolLock* lock) noexcept override;
  const std::exception_ptr& refusal() const override { return unmap_.refusal(); }
  std::size_t pages_leaving() const override;
  std::size_t drop_ahead() override;
  bool reusable() const override;
  std::chrono::steady_clock::time_point cached_at() const override { return cached_at_; }
  void evict(bool aged = false) override;
  bool to_clean() const override;
  bool busy() const override { return busy_ || waiting_ != 0; }
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) override;
  void enter_ahead(Reservation::Arrival& arrival) override;
  std::size_t missing_ahead() const override;
  bool wants() const override { return wanting_; }
  Claim claim_back(Departure& departure, std::size_t pages) noexcept override;
  void enter_back(Departure& departure) override;
  bool claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) override;
  FencePtr clean(std::span<const Reservation::Run> runs) override;
  void enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                      std::exception_ptr error) override;
  std::exception_ptr take_error() override;
  void protect_for_child(std::vector<Page*>& seen) noexcept override;
  void add_to(PoolCounts& counts) const override;
  void check(std::unordered_map<const Page*, PageUse>& uses) const override;

  // Cached pages are to go, and none are to be cached when the worker is done with a buffer whose
  // owner left.
  void keep_nothing();
  // How many pages at the beginning of both extents are the same in every row.
  std::size_t shared_with(const Buffer& other) const;
  // Positions from `position` on and below this are owned, and behind pages of our own.
  std::size_t writable_until(std::size_t position) const;
  Interval extent() const { return extent_; }
  Interval positions() const { return positions_; }
  // Of a placed one: nothing of its rows is mapped, or can still come to be, so that the place may
  // be used again.
  bool vacant() const { return !reserved_ && range_.quarantined() == 0; }
  Interval cached() const { return cached_; }
  // A cached buffer gets a new owner, whose growth waits for the work of the last one. Requires:
  // reusable. Throws where the driver refuses; it stays cached then.
  void reuse(const Caller& caller);

 private:
  class Growing;
  Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  std::vector<Reservation::Bytes> bytes_of(Interval positions) const;
  // Throws where pages of the extent are quarantined.
  void require_whole(const char* operation) const;
  // Throws where the caller's stream is being captured, because driver work would become part of
  // the graph, or break it, and where it is not the driver's own.
  void require_no_capture(const Caller& caller);
  static std::size_t fresh_pages_for(std::span<const Growing> all);
  void unshare(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
               Interval stale = {});
  class Busy;
  std::unique_ptr<Busy> quieten(PoolLock& lock, const Caller& caller);

  // Where the pages behind the extent begin.
  std::size_t extent_end() const { return extent_.empty() ? 0 : extent_.end; }
  // The pages from `begin` on, up to `end`, that are mapped writable in every row and clean.
  Interval usable(std::size_t begin, std::size_t end) const;
  std::size_t limit_lead(std::size_t position) const;
  void mark_pace();
  void look_ahead();
  void want(std::size_t index_end, bool soon);
  std::vector<Interval> uncovered() const;
  void set_ready(Interval indices);
  Generation* publish_locked();
  std::vector<FencePtr> fences() const;
  bool is_quiet();
  // Waits until no thread makes driver calls for this buffer; the mapper begins none meanwhile.
  void await_turn(PoolLock& lock, const Caller& caller);
  void await_streams(PoolLock& lock, const Caller& caller);
  bool begin_retirement();
  bool claim_departure(Departure& departure, std::size_t pages);
  void try_to_cache();
  // Of cached pages, those that count against what freed tensors may leave: what a host's places
  // keep is bounded by the host.
  std::size_t pages_to_count(std::size_t pages) const { return host_ == nullptr ? pages : 0; }
  bool release_range();
  // Has memory for what `missing` counts, with the lock held since it was last asked. Requires: not
  // busy, so that what this buffer itself no longer needs may go meanwhile.
  void require_ready(PoolLock& lock, const Caller& caller,
                     const std::function<std::pair<std::size_t, std::size_t>()>& missing);
  Interval ahead() const;
  void failed(std::exception_ptr error);

  // Marks the buffer busy, so that the mapper keeps off and the lock can be let go.
  class Busy {
   public:
    Busy(Buffer& buffer, PoolLock& lock, const Caller& caller);
    ~Busy();

   private:
    Buffer& buffer_;
  };

  const std::shared_ptr<PagePool> pool_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  Generation* host_ = nullptr;  // where it is placed: what keeps the range there reserved
  bool owned_ = true;           // the owner has not left
  bool reserved_ = false;       // the range is ours
  bool busy_ = false;           // a thread makes driver calls for it without the lock
  bool wanting_ = false;        // on the pool's list
  // What growing over ready pages looks at lies together: many buffers grow in one step, and their
  // memory is cold.
  std::size_t want_end_ = 0;  // pages below are wanted ready
  std::size_t ready_until_ = 0;
  Interval positions_;
  Interval extent_;   // pages that positions_ need
  Interval ready_;    // pages behind the extent, mapped and clean in every row
  Interval unclean_;  // pages of a reused buffer that may hold its last owner's bytes
  Interval reused_;   // of a placed one, pages that were cached when its owner came
  Interval cached_;   // pages that wait for the next owner, mapped in every row
  PendingUnmap unmap_;
  std::vector<FencePtr> cached_after_;
  std::chrono::steady_clock::time_point cached_at_;
  bool aged_ = false;  // its pages have been free for long
  // What must be done before pages behind the extent are used: zeroing on the side stream, and the
  // work of a reused buffer's last owner.
  std::vector<FencePtr> ready_after_;
  FencePtr cleaned_after_;  // the zeroing of cached pages; null where it is complete
  PendingWork work_;
  Generations generations_;
  std::unique_ptr<Generation> owner_end_ =
      std::make_unique<Generation>();  // made ahead: leaving cannot fail
  std::size_t waiting_ = 0;            // callers, for that to end; the mapper lets them go first
  bool may_cache_ = true;              // once, when the owner has left
  LookAhead pace_;
  std::exception_ptr error_;         // of the mapper, not yet raised
  std::atomic<bool> failed_{false};  // there is one: read without the lock
};

}  // namespace vtensor
