// A range of addresses, divided into rows of pages, and its page table. Maps and unmaps any of its
// pages in any order; the client that has it decides which, and when.
//
// Each change has three steps: it is claimed with the pool's lock, carried out by the driver
// without the lock, and entered with the lock again. The client keeps other threads off the pages.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/interval.h"
#include "base/trace.h"
#include "vmm/page_store.h"
#include "vmm/page_table.h"
#include "vmm/pool_lock.h"
#include "vmm/shared_range.h"

namespace vtensor {

// A position is what one step of growth adds to a row.
struct RowShape {
  std::size_t rows = 0;
  std::size_t item_bytes = 0;  // of one position in one row
  std::size_t capacity = 0;    // positions
  std::size_t phase = 0;       // bytes before position 0 in a row's first page
  bool zeroed = false;         // zeroes pages even if they return to their last owner
  std::size_t row_stride = 0;  // pages from one row to the next; 0: rows are adjacent

  friend auto operator<=>(const RowShape&, const RowShape&) = default;
};

class Reservation : public PageTable {
 public:
  struct Bytes {
    Address at;
    std::size_t size;
  };

  // Pages being mapped at empty entries.
  struct Arrival {
    std::vector<Run> runs;
    // Pages that others have already, run after run: not taken from the store, and not zeroed. Only
    // `claim` reads the pages; later steps only ask whether there are any.
    std::span<Page* const> given;
    EntryState state = EntryState::writable;  // of the entries, once mapped
    bool ahead = false;                       // made by the mapper, which zeroes in the side stream

    Reservation* range = nullptr;  // from `claim` on
    std::vector<Page*> taken;      // from the store, run after run
    std::vector<Handle> handles;   // of all pages, run after run
    std::exception_ptr error;
    std::size_t mapped = 0;  // with an error: the first pages, which were mapped, and leave
    FencePtr zeroed;         // if `ahead`: a fence after zeroing that may still run
  };

  // Pages being unmapped.
  struct Departure {
    std::vector<Run> runs;  // each of one state; runs of sleeping pages come last
    std::size_t awake = 0;  // runs of pages that do not sleep, the first ones

    std::size_t done = 0;  // runs unmapped before the first refusal
    std::exception_ptr error;
  };

  Reservation(Driver& driver, PageStore& pages, const RowShape& shape, std::size_t row_pages);

  Driver& driver() const { return driver_; }
  PageStore& store() const { return pages_; }
  std::size_t row_pages() const { return row_pages_; }
  std::size_t page_size() const { return page_size_; }
  std::size_t row_bytes() const { return row_stride_ * page_size_; }
  std::size_t bytes() const { return rows() * row_pages_ * page_size_; }
  Address base() const { return base_; }
  Address address(std::size_t row, std::size_t index) const {
    return base_ + row * row_bytes() + index * page_size_;
  }
  Address address(const Run& run) const { return address(run.row, run.indices.begin); }

  void begin(Address base, std::uint64_t owner) VT_LOCKED {
    base_ = base;
    owner_ = owner;
  }
  // Pages that `owner` had last are clean; pages of another owner are zeroed first (I7).
  void set_owner(std::uint64_t owner) VT_LOCKED { owner_ = owner; }
  // The rows take spare pages of any run of handles; see PageStore::take.
  void stitch() VT_LOCKED { stitched_ = true; }
  bool clean(const Page& page) const VT_LOCKED { return !page.dirty || page.last_owner == owner_; }

  // -- mapping

  // An arrival of given `pages`, [row][index], copy-on-write at `indices` of every row.
  Arrival shared(Interval indices, std::span<Page* const> pages) const;
  // All three steps, for several ranges in one batch of driver calls. Throws as the driver; pages
  // that it had mapped then leave.
  static void map(PoolLock& lock, std::span<Arrival* const> all, Stream stream, bool populate)
      VT_LOCKED;
  void map(PoolLock& lock, Arrival& arrival, Stream stream, bool populate) VT_LOCKED;

  // Takes pages for the runs, or references to the given pages. Throws as the driver, with nothing
  // claimed.
  void claim(Arrival& arrival) VT_LOCKED;
  // Maps the claimed pages, zeroes pages with another owner's bytes, and makes memory present if
  // `populate`. Requires: all arrivals are given and have one state, or none is given.
  static void carry_out(std::span<Arrival* const> all, Stream stream, bool populate) noexcept;
  // Enters the pages of an arrival in the page table. After an error the mapped pages leave, and
  // the others return to the store.
  void enter(const Arrival& arrival) VT_LOCKED;

  // -- unmapping

  // The departure of all pages mapped at these indices.
  Departure departing(std::span<const Interval> within) const VT_LOCKED;
  // Unmaps the pages. Begins no further driver call after `until`.
  void carry_out(Departure& departure, std::chrono::steady_clock::time_point until) const noexcept;
  void enter(const Departure& departure) VT_LOCKED;
  // Requires: nothing is mapped any more, and all work is over.
  void end() noexcept VT_LOCKED;

  // -- steps of copy_on_write.h

  // Adds `n` free pages of the row to `out`, to be mapped after `previous`.
  void take(std::size_t row, const Page* previous, std::size_t n, std::vector<Page*>& out)
      VT_LOCKED;
  // Keeps a page, to which a copy may still write, until the range ends.
  void keep_to_the_end(Page* page) noexcept VT_LOCKED;
  // The driver has remapped a mapped entry to `page`, and the entry takes over a reference to it,
  // unless it had the page before.
  void replace(std::size_t row, std::size_t index, Page* page, EntryState state) noexcept VT_LOCKED;
  // Waits for all work launched in `stream` so far. False if it does not end in time.
  bool await_work(Stream stream) const noexcept;

  // -- readers in other processes

  // Shows the mapped pages to readers from now on, in `shared`, a range of these addresses, if any.
  void show_in(std::shared_ptr<SharedRange> shared) VT_LOCKED;
  // Shows the pages of a run to readers, if other processes may read the range.
  void show(const Run& run) VT_LOCKED;
  // Null if no other process may read the range.
  const std::shared_ptr<SharedRange>& shared() const { return shared_; }
  // Whether the range has a living reader in another process.
  bool is_read() const { return shared_ && shared_->is_read(); }

  // -- bytes

  void zero(Bytes bytes, Stream stream) const;
  void zero(std::span<const Run> runs, Stream stream) const;
  // Runs of writable pages in `indices` with another owner's bytes, `most` pages in all. make_clean
  // zeroes such runs, without the lock.
  std::vector<Run> unclean_in(Interval indices, std::size_t most = SIZE_MAX) const VT_LOCKED;
  void make_clean(PoolLock& lock, std::span<const Run> runs, Stream stream) VT_LOCKED;

  void check(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const VT_LOCKED;

  // Records an event of `indices` of every row.
  void event(trace::What what, Interval indices) const;

 private:
  // The page's index in the range that is shown to readers.
  std::size_t shown_at(std::size_t row, std::size_t index) const {
    return (address(row, index) - shared_->base()) / page_size_;
  }
  // `page` is no longer mapped at this entry.
  void let_go(std::size_t row, std::size_t index, Page* page) noexcept VT_LOCKED {
    shared_ ? shared_->went(shown_at(row, index), page) : pages_.drop(page);
  }
  // Zeroes bytes of other owners in mapped pages, and makes memory present if `populate`.
  void ready(Arrival& arrival, Stream stream, bool populate) const;

  Driver& driver_;
  PageStore& pages_;
  const std::size_t row_pages_;
  const std::size_t row_stride_;  // pages
  const std::size_t page_size_;
  const bool zeroed_;  // see RowShape::zeroed
  Address base_ = 0;
  std::uint64_t owner_ = kNoOwner;
  std::vector<RowHome> homes_ VT_GUARDED;
  bool stitched_ VT_GUARDED = false;
  std::shared_ptr<SharedRange> shared_;
  Page* kept_ VT_GUARDED = nullptr;  // see keep_to_the_end; linked by Page::older
};

}  // namespace vtensor
