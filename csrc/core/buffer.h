// One reservation of addresses, divided into rows that grow together, and the pages behind it. What
// stays mapped is the owner's extent and what published generations cover; everything else is given
// back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/align.h"
#include "base/interval.h"
#include "core/generation.h"
#include "core/page_pool.h"
#include "core/page_table.h"

namespace vtensor {

// A position is what one step of growth adds to a row.
struct RowShape {
  std::size_t rows = 0;
  std::size_t item_bytes = 0;  // of one position in one row
  std::size_t capacity = 0;    // positions
  std::size_t phase = 0;       // bytes before position 0 in a row's first page
  bool zeroed = false;         // pages are zeroed even where they come back to this buffer
};

struct PageRecord {
  std::size_t row;
  std::size_t index;  // of the slot in its row
  Address address;
  std::int64_t page_id;  // -1 where the kernel parted it and it has no handle of its own yet
  std::uint32_t shared;  // references to the page
  const char* state;     // "mapped", "shared", "parted", "held", "quarantined"
};

// What page tables say of a page, for PagePool::check_invariants.
struct PageUse {
  std::uint32_t entries = 0;
  std::uint32_t reachable = 0;  // of these, in buffers that a tensor or a view can still reach
  bool writable = false;        // through a reachable entry
};

class Buffer : public std::enable_shared_from_this<Buffer> {
 public:
  // Throws InvalidArgument, CapacityExceeded where the sizes overflow, DriverError.
  static std::shared_ptr<Buffer> create(const std::shared_ptr<PagePool>& pool,
                                        const RowShape& shape);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const RowShape& shape() const { return shape_; }
  std::size_t row_bytes() const { return row_pages_ * page_size_; }
  std::size_t reserved_bytes() const { return shape_.rows * row_bytes(); }
  Address address_of(std::size_t row, std::size_t position) const {
    return base_ + row * row_bytes() + shape_.phase + position * shape_.item_bytes;
  }
  Address slot_address(std::size_t row, std::size_t slot) const {
    return base_ + row * row_bytes() + slot * page_size_;
  }
  Interval slots_of(Interval positions) const;
  // The first position that lies wholly behind the pages of `positions`.
  std::size_t reach(Interval positions) const {
    return ceil_div(slots_of(positions).end * page_size_ - shape_.phase, shape_.item_bytes);
  }

  // Makes `positions` the owner's where that needs no driver call, because what they add is mapped
  // and not shared. False where it is not, and where another thread holds the lock; nothing is
  // changed then.
  bool grow_within(Interval positions);
  // Makes `positions` the owner's extent: maps what is missing, parts the pages that the new
  // positions share with another buffer, and zeroes `stale` positions. `populate` makes new memory
  // present now. Whole or nothing (I8).
  void grow(const char* operation, Interval positions, bool populate, Interval stale = {});
  // Makes a smaller extent the owner's. What no generation covers is unmapped.
  void retract(Interval positions);
  // A generation over the present extent.
  Generation* publish();
  bool published();

  // Parts the shared pages behind `positions`, so that writes there reach the page.
  void own(const char* operation, Interval positions);
  // Zeroes `positions` of every row; they are mapped and owned.
  void zero(Interval positions);
  // A buffer of `shape` whose row i has the pages of row rows[i]. No byte is copied; the pages are
  // guarded in both unless `exclusive`, which is for an owner who leaves this buffer and that no
  // generation covers.
  std::shared_ptr<Buffer> share(const char* operation, const RowShape& shape,
                                std::span<const std::size_t> rows, bool exclusive);
  // Row i gets the pages of row rows[i], at the same addresses. Requires: no generation is alive,
  // and a driver that remaps in one step, because a page that cannot be put back would leave the
  // owner without it.
  void reindex(const char* operation, std::span<const std::size_t> rows);
  // The owner leaves: pages and addresses go as the generations over them end. Never blocks, never
  // throws (I11); once the lock was free, it has happened. To be called once.
  void abandon() noexcept;

  // Whether a write to some page of ours does not reach its handle.
  bool guarded();
  std::size_t mapped_pages();
  std::vector<PageRecord> pages();

  // Everything below requires the pool's lock.

  void forget(const Generation* generation) noexcept;
  void leave() noexcept;
  // Unmaps what neither the extent nor a generation covers, and frees the range after the owner has
  // left.
  std::exception_ptr settle() noexcept;
  std::size_t count_parted();
  std::vector<Page*> contents() const;
  // Guards every page for a child about to be forked, and adds them to `seen`.
  void guard_for_child(std::vector<Page*>& seen) noexcept;
  void add_to(PoolCounts& counts) const;
  void check(std::unordered_map<const Page*, PageUse>& uses) const;

 private:
  struct Run {  // neighbouring slots of one row
    std::size_t row;
    Interval slots;
  };

  Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages);

  // Maximal runs in `slots` of `row` whose entries are `wanted` and have one state.
  void collect(std::vector<Run>& runs, std::size_t row, Interval slots,
               bool (*wanted)(const Entry&)) const;
  // Valid until the next call.
  std::span<const Handle> handles(const Run& run);
  Address address_of(const Run& run) const { return slot_address(run.row, run.slots.begin); }
  void map_new(const Run& run);
  void map_shared(const Run& run, std::span<Page* const> pages, EntryState state);
  void zero_new(const Run& run);
  void unmap(const Run& run);
  void quarantine(const Run& run, std::span<const std::size_t> stuck);
  void quarantine(const Run& run) noexcept;
  void undo_grow(std::span<const Run> mapped) noexcept;
  // Throws where pages of the extent are quarantined.
  void require_whole(const char* operation) const;
  std::size_t lost_pages() const;
  std::size_t fresh_pages_for(std::span<const Run> guarded) const;
  std::size_t parted_pages_in(std::span<const Run> guarded);
  std::vector<std::uint8_t> find_parted(const Run& run);
  void part(std::span<const Run> runs, Interval stale = {});
  void zero_positions(Interval positions);
  void adopt(const Run& run, std::span<Page* const> pages) noexcept;
  void fold(const char* operation);
  void guard(std::span<const Run> runs);
  std::vector<Interval> uncovered() const;
  void touch(Interval slots);

  const std::shared_ptr<PagePool> pool_;
  Driver& driver_;
  const RowShape shape_;
  const std::size_t page_size_;
  const std::size_t row_pages_;

  Address base_ = 0;
  std::uint64_t id_ = 0;
  bool owned_ = true;      // the owner has not left
  bool reserved_ = false;  // the range is ours
  Interval positions_;
  Interval extent_;   // slots that positions_ need
  Interval touched_;  // slots in which something may be mapped that nobody needs
  std::vector<const Generation*> generations_;
  std::unique_ptr<Generation> owner_end_ =
      std::make_unique<Generation>();  // made ahead: leaving cannot fail
  PageTable table_;
  std::vector<RowHome> homes_;
  std::size_t mapped_ = 0;
  std::size_t guarded_ = 0;
  std::size_t quarantined_ = 0;
  std::vector<Handle> scratch_;
  std::vector<Page*> picked_;
};

}  // namespace vtensor
