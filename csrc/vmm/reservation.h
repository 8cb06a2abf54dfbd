// A range of addresses, divided into rows of pages, and its page table. Maps, shares, unshares and
// unmaps any pages of it, in any order; which, and when, its owner decides.
//
// Each change has three steps: claimed with the pool's lock, carried out by the driver without it,
// and entered with it again. In between nothing else may touch these pages: its owner sees to that.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/interval.h"
#include "base/trace.h"
#include "vmm/page_store.h"
#include "vmm/page_table.h"
#include "vmm/pool_lock.h"
#include "vmm/row_shape.h"

namespace vtensor {

// What page tables say of a page, for PagePool::check_invariants.
struct PageUse {
  std::uint32_t entries = 0;
  std::uint32_t reachable = 0;  // of these, in ranges that a tensor or a view can still reach
  bool writable = false;        // through a reachable entry
};

class Reservation {
 public:
  // Neighbouring pages of one row.
  struct Run {
    std::size_t row;
    Interval indices;
  };

  struct Bytes {
    Address at;
    std::size_t size;
  };

  // Pages on their way to empty pages.
  struct Arrival {
    std::vector<Run> runs;
    std::vector<Page*> pages;        // run after run; given where they are shared
    bool shared = false;             // pages that others have too, to be mapped copy-on-write
    std::exception_ptr error;        // nothing of it is mapped, but what is stuck
    std::vector<std::size_t> stuck;  // indices in `pages`
    bool ahead = false;              // for the mapper, which zeroes on the side stream
    bool zeroing = false;            // some of it had to be zeroed
    FencePtr zeroed;                 // null where that is complete
  };
  struct Arriving {
    Reservation* range;
    Arrival* arrival;
  };

  // Pages on their way out.
  struct Departure {
    std::vector<Run> runs;        // the writable ones first, those asleep last
    std::size_t writable = 0;     // of the runs
    std::size_t awake = 0;        // the same, with the copy-on-write ones
    std::vector<Handle> handles;  // run after run
    std::size_t done = 0;         // of the runs
    std::exception_ptr error;
    std::vector<std::size_t> stuck;  // pages in runs[done...]
  };

  // `patience` bounds each wait (I12).
  Reservation(Driver& driver, PageStore& pages, const RowShape& shape, std::size_t row_pages,
              std::chrono::nanoseconds patience);
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  std::size_t rows() const { return rows_; }
  std::size_t row_pages() const { return row_pages_; }
  std::size_t page_size() const { return page_size_; }
  std::size_t row_bytes() const { return row_stride_ * page_size_; }
  std::size_t bytes() const { return rows_ * row_pages_ * page_size_; }
  Address base() const { return base_; }
  Address address(std::size_t row, std::size_t index) const {
    return base_ + row * row_bytes() + index * page_size_;
  }
  Address address(const Run& run) const { return address(run.row, run.indices.begin); }

  void begin(Address base, std::uint64_t owner) VT_LOCKED {
    base_ = base;
    owner_ = owner;
  }
  // Pages show zeros, or what this owner had there: those of another are not clean (I7).
  void set_owner(std::uint64_t owner) VT_LOCKED { owner_ = owner; }
  // Its rows take kept memory from wherever it lies; see RowHome. Before the first page is mapped.
  void stitch() VT_LOCKED { stitched_ = true; }
  bool clean(const Page& page) const VT_LOCKED { return !page.dirty || page.last_owner == owner_; }

  // -- the page table

  const Entry& at(std::size_t row, std::size_t index) const VT_LOCKED {
    return table_.at(row, index);
  }
  // Pages below have entries.
  std::size_t reserved() const VT_LOCKED { return table_.reserved(); }
  // Throws std::bad_alloc; nothing is changed then.
  void reserve(std::size_t indices) VT_LOCKED { table_.reserve(indices); }
  std::size_t mapped() const { return mapped_.load(std::memory_order_relaxed); }
  std::size_t quarantined() const { return quarantined_.load(std::memory_order_relaxed); }
  // Pages that writes do not reach.
  std::size_t copy_on_write() const VT_LOCKED { return copy_on_write_; }
  std::size_t count_mapped(Interval indices) const VT_LOCKED;
  // The same, with those on their way there.
  std::size_t count_taken(Interval indices) const VT_LOCKED;
  std::size_t count_quarantined(Interval indices) const VT_LOCKED;
  // Adds maximal runs in `indices` of `row` whose entries are `wanted` and have one state.
  void collect(std::vector<Run>& runs, std::size_t row, Interval indices,
               bool (*wanted)(const Entry&)) const VT_LOCKED;
  // The same, of every row.
  std::vector<Run> collect(Interval indices, bool (*wanted)(const Entry&)) const VT_LOCKED;
  // The first of `indices` that is not `wanted` in every row.
  template <typename Wanted>
  std::size_t first_not(Interval indices, Wanted wanted) const VT_LOCKED {
    std::size_t end = std::min(indices.end, reserved());
    for (std::size_t row = 0; row < rows_ && indices.begin < end; ++row) {
      std::size_t index = indices.begin;
      while (index < end && wanted(at(row, index))) ++index;
      end = index;
    }
    return std::max(indices.begin, end);
  }

  // -- mapping

  // Takes pages for runs of empty entries, or references to those that are shared. Throws what the
  // driver does; nothing is claimed then.
  void claim(Arrival& arrival) VT_LOCKED;
  // Maps what several have claimed, in one batch, all or none; zeroes what their last owners left,
  // and makes their memory present where it is to. Shared pages are neither zeroed nor made
  // present. Requires: all of them are shared, or none.
  static void carry_out(std::span<const Arriving> all, Stream stream, bool populate) noexcept;
  // Enters pages that have arrived, or gives them back.
  void enter(Arrival& arrival) VT_LOCKED;
  // Takes back pages that have arrived for a growth that failed afterwards.
  void undo(PoolLock& lock, Stream stream, const Arrival& arrival) noexcept VT_LOCKED;

  // -- unmapping

  // Requires: the first `writable` of the runs are writable, the others copy-on-write.
  Departure departing(std::vector<Run> runs, std::size_t writable) VT_LOCKED;
  // Begins no more calls after `until`, which it looks at after each.
  void carry_out(Departure& departure, std::optional<std::chrono::steady_clock::time_point> until =
                                           std::nullopt) noexcept;
  // `aged`: its pages have been free for as long as the pool keeps memory.
  void enter(Departure& departure, bool aged) VT_LOCKED;
  // What is mapped there is not known: it is counted, never used and never unmapped.
  void quarantine(std::size_t row, std::size_t index) noexcept VT_LOCKED;
  // Nothing is mapped any more. What is quarantined keeps its page in its pool, and its addresses,
  // which lie in `host` where that is not null.
  void end(Reservation* host) noexcept VT_LOCKED;

  // -- sharing (copy_on_write.cpp)

  // Maps pages of others, those of one run behind those of the last, at empty entries.
  void map_shared(PoolLock& lock, std::span<const Run> runs, std::span<Page* const> pages,
                  EntryState state) VT_LOCKED;
  // Makes writable runs copy-on-write, which are about to be shared. Whole or nothing. Lets the
  // lock go meanwhile, unless it is null. Requires: no work that may write to the runs is left in
  // any stream.
  void make_copy_on_write(PoolLock* lock, std::span<const Run> runs) VT_LOCKED;
  // The same of `shown`, for a child about to be forked; adds every copy-on-write page to `seen`.
  void protect(Interval shown, std::vector<Page*>& seen) noexcept VT_LOCKED;
  // Gives each copy-on-write page of `runs` a page of its own with what is seen there, mapped
  // writable, and zeroes `stale` at the end, in `stream`. Whole or nothing, except that pages which
  // the kernel had copied may stay folded, which only the counts show. Throws TimedOut where copies
  // may still run, in the side stream.
  void unshare(PoolLock& lock, std::span<const Run> runs, std::span<const Bytes> stale,
               Stream stream) VT_LOCKED;
  // How many pages unsharing these takes: a page with one reference left is kept.
  std::size_t fresh_pages_for(std::span<const Run> copy_on_write) const VT_LOCKED;
  // Of a copy-on-write run, the pages that the kernel copied at a write; 1 for each.
  std::vector<std::uint8_t> find_private_copies(const Run& run) const VT_LOCKED;
  std::size_t count_private_copies(std::span<const Run> copy_on_write) const VT_LOCKED;
  std::size_t count_private_copies() const VT_LOCKED;
  std::vector<Run> private_copies_in(Interval indices) const VT_LOCKED;
  // Pages from `index` on, of one state, that become those of `to`, copy-on-write; in all of them
  // or, where the driver refuses, in none. Requires: a driver that remaps in one step, because a
  // page that cannot be put back would leave its owner without it.
  struct Change {
    Reservation* range;
    std::size_t row, index;
    std::vector<Page*> to;
  };
  static void remap(std::span<const Change> changes) VT_LOCKED;

  // -- bytes

  void zero(Bytes bytes, Stream stream);
  // Runs of pages in `indices` that show what another owner left, and their zeroing.
  std::vector<Run> unclean_in(Interval indices) const VT_LOCKED;
  void make_clean(std::span<const Run> runs, Stream stream) VT_LOCKED;

  // -- reports

  // Tells the trace what happens to `indices` of every row.
  void event(trace::What what, Interval indices) const;

  // Adds the pages that are mapped here; returns how many of those that are new to `seen` have
  // several references.
  std::size_t add_pages(std::unordered_set<const Page*>& seen) const VT_LOCKED;
  // Adds what its entries use, `reachable` by a tensor or a view. Throws an Error that names the
  // violated invariant.
  void check(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const VT_LOCKED;

 private:
  class Remapping;

  template <typename Counted>
  std::size_t count(Interval indices, Counted counted) const VT_LOCKED;
  void open_homes() VT_LOCKED;
  void claim_shared(Arrival& arrival) VT_LOCKED;
  // Adds `runs` as the driver takes them, with their handles from the first of `handles` on.
  void add_page_runs(std::vector<PageRun>& to, std::span<const Run> runs,
                     std::span<const Handle> handles) const;
  // Whether all work launched in `stream` so far ends in time.
  bool await_work(Stream stream) const noexcept;
  // Of the indices that an UndoFailed names, in their order.
  static bool is_stuck(std::span<const std::size_t> stuck, std::size_t i) {
    return std::binary_search(stuck.begin(), stuck.end(), i);
  }
  // Moves runs whose pages are asleep from `runs` to `asleep`.
  void part_asleep(std::vector<Run>& runs, std::vector<Run>& asleep) const VT_LOCKED;

  Driver& driver_;
  PageStore& pages_;
  const std::chrono::nanoseconds patience_;
  const std::size_t rows_;
  const std::size_t row_pages_;
  const std::size_t row_stride_;  // pages
  const std::size_t page_size_;
  const bool zeroed_;  // pages are zeroed even where they come back to this owner
  Address base_ = 0;
  std::uint64_t owner_ = kNoOwner;
  PageTable table_ VT_GUARDED;
  std::vector<RowHome> homes_ VT_GUARDED;
  bool stitched_ VT_GUARDED = false;
  // Changed with the lock; read without it too.
  std::atomic<std::size_t> mapped_ = 0;
  std::atomic<std::size_t> quarantined_ = 0;
  std::size_t copy_on_write_ VT_GUARDED = 0;  // pages
};

}  // namespace vtensor
