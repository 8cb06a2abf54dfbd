// Which page stands at which page index, row by row, and how many stand there in which state.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/align.h"
#include "base/interval.h"
#include "base/sparse_array.h"
#include "vmm/page.h"
#include "vmm/pool_lock.h"

namespace vtensor {

enum class EntryState : std::uint8_t {
  empty,
  writable,
  copy_on_write,  // shared, or once shared: writes do not reach the page
  arriving,       // being mapped, without the lock
  quarantined,    // what is mapped here is not known: never used, never unmapped
};

struct Entry {
  Page* page = nullptr;
  EntryState state = EntryState::empty;

  bool mapped() const {
    return state == EntryState::writable || state == EntryState::copy_on_write;
  }
  Access access() const {
    return state == EntryState::copy_on_write ? Access::copy_on_write : Access::writable;
  }
};

inline bool is_mapped(const Entry& entry) { return entry.mapped(); }
inline bool is_unmapped(const Entry& entry) { return !entry.mapped(); }
inline bool is_writable(const Entry& entry) { return entry.state == EntryState::writable; }
inline bool is_copy_on_write(const Entry& entry) {
  return entry.state == EntryState::copy_on_write;
}
// Requires: it has a page.
inline bool is_awake(const Entry& entry) { return !entry.page->asleep; }
inline bool is_quarantined(const Entry& entry) { return entry.state == EntryState::quarantined; }

// What page tables say of a page, for PagePool::check_invariants.
struct PageUse {
  std::uint32_t entries = 0;
  std::uint32_t reachable = 0;  // of these, in ranges that a tensor or a view can still reach
  bool writable = false;        // through a reachable entry
};

class PageTable {
 public:
  // Neighbouring pages of one row.
  struct Run {
    std::size_t row;
    Interval indices;
  };

  explicit PageTable(std::size_t rows) : rows_(rows) {}
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  std::size_t rows() const { return rows_; }
  // Page indices from here on are empty.
  std::size_t reserved() const VT_LOCKED { return reserved_; }
  // Has entries for these indices be changed. Throws std::bad_alloc; nothing is changed then.
  void reserve(Interval indices) VT_LOCKED;
  const Entry& at(std::size_t row, std::size_t index) const VT_LOCKED {
    return entries_[place(row, index)];
  }

  std::size_t mapped() const { return mapped_.load(std::memory_order_relaxed); }
  std::size_t quarantined() const { return quarantined_.load(std::memory_order_relaxed); }
  std::size_t copy_on_write() const VT_LOCKED { return copy_on_write_; }
  std::size_t count_mapped(Interval indices) const VT_LOCKED;
  // Pages that are mapped here, or on their way, and nowhere else.
  std::size_t count_sole(Interval indices) const VT_LOCKED;
  std::size_t count_quarantined(Interval indices) const VT_LOCKED;

  // Adds maximal runs in `indices` of `row` whose entries are `wanted` and have one state.
  template <typename Wanted>
  void collect(std::vector<Run>& runs, std::size_t row, Interval indices, Wanted wanted) const
      VT_LOCKED {
    const std::size_t end = std::min(indices.end, reserved());
    const bool empty_too = wanted(Entry{});
    for (std::size_t index = indices.begin; index < end;) {
      if (!empty_too && (index = next(row, index)) >= end) return;
      const std::size_t first = index;
      const EntryState state = at(row, first).state;
      while (index < end && at(row, index).state == state && wanted(at(row, index))) ++index;
      index > first ? runs.push_back({row, {first, index}}) : void(++index);
    }
  }
  // The same, of every row.
  template <typename Wanted>
  std::vector<Run> collect(Interval indices, Wanted wanted) const VT_LOCKED {
    std::vector<Run> runs;
    for (std::size_t row = 0; row < rows_; ++row) collect(runs, row, indices, wanted);
    return runs;
  }
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
  // Calls visit(entry, row, index) for every entry with a page, and for some empty ones.
  template <typename Visit>
  void for_each(Visit visit) const VT_LOCKED {
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t index = next(row, 0); index < reserved(); index = next(row, index + 1))
        visit(at(row, index), row, index);
    }
  }

  // Adds the pages that are mapped here; returns how many of those that are new to `seen` have
  // several references.
  std::size_t add_pages(std::unordered_set<const Page*>& seen) const VT_LOCKED;
  // Adds what its entries use, `reachable` by a tensor or a view. Throws an Error that names the
  // violated invariant.
  void check(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const VT_LOCKED;

 protected:
  ~PageTable() = default;
  // Of empty entries: `pages` are on their way to them.
  void arrive(std::size_t row, std::size_t begin, std::span<Page* const> pages) VT_LOCKED {
    for (Page* const page : pages)
      entries_.reserved(place(row, begin++)) = {page, EntryState::arriving};
  }
  // They are mapped.
  void arrived(const Run& run, EntryState state) VT_LOCKED {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      entries_.reserved(place(run.row, index)).state = state;
    add(mapped_, run.indices.size());
    if (state == EntryState::copy_on_write) copy_on_write_ += run.indices.size();
  }
  void set(std::size_t row, std::size_t index, Entry entry) noexcept VT_LOCKED {
    Entry& here = entries_.reserved(place(row, index));
    if (is_mapped(here) != is_mapped(entry)) add(mapped_, is_mapped(entry) ? 1 : kLess);
    if (is_copy_on_write(here) != is_copy_on_write(entry))
      copy_on_write_ += is_copy_on_write(entry) ? 1 : kLess;
    if (is_quarantined(here) != is_quarantined(entry))
      add(quarantined_, is_quarantined(entry) ? 1 : kLess);
    here = entry;
  }
  // Of another table, whose range ends in this one's.
  void add_quarantined(std::size_t pages) noexcept VT_LOCKED { add(quarantined_, pages); }

 private:
  static constexpr std::size_t kLess = SIZE_MAX;  // -1, as counts add

  // The rows of an index lie together, since most changes are of all rows.
  std::size_t place(std::size_t row, std::size_t index) const { return index * rows_ + row; }
  // The first index from `index` on that may have a page in this row.
  std::size_t next(std::size_t row, std::size_t index) const VT_LOCKED {
    const std::size_t found = entries_.next(place(row, index));
    return found == SIZE_MAX ? SIZE_MAX : ceil_div(sub_sat(found, row), rows_);
  }
  template <typename Counted>
  std::size_t count(Interval indices, Counted counted) const VT_LOCKED;
  // Without an atomic instruction: counts change under the lock alone.
  static void add(std::atomic<std::size_t>& count, std::size_t pages) {
    count.store(count.load(std::memory_order_relaxed) + pages, std::memory_order_relaxed);
  }

  const std::size_t rows_;
  std::size_t reserved_ VT_GUARDED = 0;
  SparseArray<Entry> entries_ VT_GUARDED;
  std::size_t copy_on_write_ VT_GUARDED = 0;  // entries in this state
  std::atomic<std::size_t> mapped_ = 0;       // the same; read without the lock too
  std::atomic<std::size_t> quarantined_ = 0;
};

}  // namespace vtensor
