// The pages of an address range, by row and page index; why the pages of each index are mapped; and
// counts of both.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
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
  copy_on_write,  // shared now or earlier: writes do not reach the page
  arriving,       // being mapped, without the lock
  leaving,        // mapped by an operation that failed: unmapped before the entry is used again
};

// A page and its state, in one word: large tables are read at the speed of memory.
class Entry {
 public:
  Entry() = default;
  Entry(Page* page, EntryState state)
      : word_(reinterpret_cast<std::uintptr_t>(page) | static_cast<std::uintptr_t>(state)) {}

  Page* page() const { return reinterpret_cast<Page*>(word_ & ~kState); }
  EntryState state() const { return static_cast<EntryState>(word_ & kState); }
  bool mapped() const {
    return state() == EntryState::writable || state() == EntryState::copy_on_write;
  }

 private:
  static constexpr std::uintptr_t kState = alignof(Page) - 1;
  static_assert(kState >= static_cast<std::uintptr_t>(EntryState::leaving));

  std::uintptr_t word_ = 0;
};

inline Access access_of(EntryState state) {
  return state == EntryState::copy_on_write ? Access::copy_on_write : Access::writable;
}

// Function objects, so that callers inline them.
inline constexpr auto is_mapped = [](Entry entry) { return entry.mapped(); };
inline constexpr auto is_unmapped = [](Entry entry) { return !entry.mapped(); };
inline constexpr auto is_writable = [](Entry entry) {
  return entry.state() == EntryState::writable;
};
inline constexpr auto is_copy_on_write = [](Entry entry) {
  return entry.state() == EntryState::copy_on_write;
};
// Requires: the entry has a page.
inline constexpr auto is_awake = [](Entry entry) { return !entry.page()->asleep; };
inline constexpr auto is_leaving = [](Entry entry) { return entry.state() == EntryState::leaving; };

// Why the pages at an index are mapped, the same in every row.
enum class Why : std::uint8_t {
  nothing,     // none is mapped, and none is wanted
  needed,      // by the owner; some may not be mapped yet
  viewed,      // needed by generations alone
  prefetched,  // ahead of need; some may not be mapped yet
  cached,      // the last owner's, for the next owner
  unneeded,    // to be unmapped after work that may use them; not fenced yet
  fenced,      // to be unmapped once their fences have passed
};
inline constexpr std::size_t kWhys = 8;  // room for reasons: a power of two

// The uses of a page in page tables, for PagePool::check_invariants.
struct PageUse {
  std::uint32_t entries = 0;
  std::uint32_t reachable = 0;  // entries of ranges that a tensor or a view can still reach
  bool writable = false;        // through a reachable entry
};

class PageTable {
 public:
  // Neighbouring pages of one row.
  struct Run {
    std::size_t row;
    Interval indices;
  };

  static std::size_t pages_of(std::span<const Run> runs) {
    std::size_t pages = 0;
    for (const Run& run : runs) pages += run.indices.size();
    return pages;
  }

  explicit PageTable(std::size_t rows) : rows_(rows) {}
  PageTable& operator=(PageTable&&) = delete;

  std::size_t rows() const { return rows_; }
  // Page indices from this one on are empty.
  std::size_t reserved() const VT_LOCKED { return reserved_; }
  // Makes entries for `indices` present. Throws std::bad_alloc, with nothing changed.
  void reserve(Interval indices) VT_LOCKED;
  Entry at(std::size_t row, std::size_t index) const VT_LOCKED {
    return entries_[place(row, index)];
  }

  // -- why pages are mapped

  // The state of an index, in one word: runs of equal ones are found at the speed of memory.
  class Index {
   public:
    Index() = default;
    Index(std::size_t mapped, Why why)
        : word_(static_cast<std::uint32_t>(mapped * kWhys) | static_cast<std::uint32_t>(why)) {}

    std::size_t mapped() const { return word_ / kWhys; }  // entries that are mapped or leaving
    Why why() const { return static_cast<Why>(word_ % kWhys); }
    bool operator==(const Index&) const = default;

   private:
    friend class PageTable;

    std::uint32_t word_ = 0;
  };
  static constexpr std::size_t kMostRows = UINT32_MAX / kWhys;
  Why why(std::size_t index) const VT_LOCKED { return indices_[index].why(); }
  // Sets why each of `indices` that is reserved is mapped. Where nothing is mapped, reasons other
  // than `needed` and `prefetched` become `nothing`.
  void set_why(Interval indices, Why why) noexcept VT_LOCKED {
    change_why(indices, [why](Index) { return why; });
  }
  // Sets why one index, which is reserved, is mapped.
  void set_why(std::size_t i, Why why) noexcept VT_LOCKED {
    Index& index = indices_.reserved(i);
    change_to(i, {&index, 1}, {index.mapped(), why});
  }
  // Sets the reason to change(index), called once for equal neighbours.
  template <typename Change>
  void change_why(Interval indices, Change change) noexcept VT_LOCKED {
    change_indices(indices,
                   [&change](Index index) { return Index(index.mapped(), change(index)); });
  }
  // Prefetch, in two steps, the memory that set_why and reserve read at an index; see
  // prefetch_lines.
  void prefetch_place(std::size_t index) const VT_LOCKED {
    indices_.prefetch_place(index);
    entries_.prefetch_place(place(0, index));
  }
  void prefetch_index(std::size_t index) const VT_LOCKED { indices_.prefetch(index); }
  // Entries mapped for this reason; entries with this reason that are not mapped.
  std::size_t mapped(Why why) const VT_LOCKED { return of(why).mapped; }
  std::size_t missing(Why why) const VT_LOCKED { return of(why).indices * rows_ - of(why).mapped; }
  // An interval that contains all indices of this reason; runs of the first `most` of them.
  Interval hull_of(Why why) const VT_LOCKED { return of(why).hull; }
  std::vector<Interval> runs_of(Why why, std::size_t most = SIZE_MAX) const VT_LOCKED;
  // The first of `indices` at which not every row is mapped, for this reason.
  std::size_t first_not_whole(Interval indices, Why why) const VT_LOCKED;

  // Entries that are mapped or leaving.
  std::size_t mapped() const { return mapped_.load(std::memory_order_relaxed); }
  std::size_t count_mapped(Interval indices) const VT_LOCKED;
  std::size_t leaving() const VT_LOCKED { return leaving_; }
  std::size_t copy_on_write() const VT_LOCKED { return copy_on_write_; }
  std::size_t writable() const VT_LOCKED { return mapped() - copy_on_write_ - leaving_; }
  // Pages at `indices` that have no other reference.
  std::size_t count_sole(Interval indices) const VT_LOCKED;

  // Calls visit(run, kind) for the maximal runs in `indices` of `row` with one kind(entry), but not
  // for kind 0.
  template <typename Kind, typename Visit>
  void each_run(std::size_t row, Interval indices, Kind kind, Visit visit) const VT_LOCKED {
    indices.end = std::min(indices.end, reserved());
    std::size_t begin = indices.begin;
    auto of_run = kind(Entry{});
    const auto end_run = [&](std::size_t end) VT_LOCKED {
      if (begin < end && of_run != 0) visit(Run{row, {begin, end}}, of_run);
      begin = end;
    };
    walk(row, indices, [&](std::size_t index, Entry entry) VT_LOCKED {
      const auto of_entry = kind(entry);
      if (of_entry == of_run) return true;
      end_run(index);
      of_run = of_entry;
      return true;
    });
    end_run(indices.end);
  }
  // Adds maximal runs in `indices` of `row` whose entries are `wanted` and have one state.
  template <typename Wanted>
  void collect(std::vector<Run>& runs, std::size_t row, Interval indices, Wanted wanted) const
      VT_LOCKED {
    each_run(
        row, indices,
        [&wanted](Entry entry)
            VT_LOCKED { return wanted(entry) ? 1 + static_cast<int>(entry.state()) : 0; },
        [&runs](const Run& run, int) { runs.push_back(run); });
  }
  // Collects from every row.
  template <typename Wanted>
  std::vector<Run> collect(Interval indices, Wanted wanted) const VT_LOCKED {
    std::vector<Run> runs;
    for (std::size_t row = 0; row < rows_; ++row) collect(runs, row, indices, wanted);
    return runs;
  }
  // The first of `indices` at which some row's entry is not `wanted`; the end if there is none.
  template <typename Wanted>
  std::size_t first_not(Interval indices, Wanted wanted) const VT_LOCKED {
    std::size_t end = std::max(indices.begin, std::min(indices.end, reserved()));
    for (std::size_t row = 0; row < rows_; ++row) {
      walk(row, {indices.begin, end}, [&](std::size_t index, Entry entry) VT_LOCKED {
        if (wanted(entry)) return true;
        end = index;
        return false;
      });
    }
    return end;
  }
  // Calls visit(entry, row, index) for every entry with a page, and for some empty ones.
  template <typename Visit>
  void for_each(Visit visit) const VT_LOCKED {
    for (std::size_t row = 0; row < rows_; ++row) {
      walk(row, {0, reserved()}, [&](std::size_t index, Entry entry) VT_LOCKED {
        visit(entry, row, index);
        return true;
      });
    }
  }
  // Calls visit(page) for the pages of the run, in order. Requires: all entries have pages.
  template <typename Visit>
  void each_page(const Run& run, Visit visit) const VT_LOCKED {
    walk(run.row, run.indices, [&visit](std::size_t, Entry entry) VT_LOCKED {
      visit(entry.page());
      return true;
    });
  }

  // Adds the mapped pages to `seen`; returns how many of the added pages have several references.
  std::size_t add_pages(std::unordered_set<const Page*>& seen) const VT_LOCKED;
  // Adds the entries to `uses`; `reachable`: by a tensor or a view. Throws an Error that names the
  // violated invariant.
  void check_entries(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const
      VT_LOCKED;

 protected:
  ~PageTable() = default;
  // Puts `pages` into empty entries, as `arriving`; calls visit(page) for each.
  template <typename Visit>
  void arrive(std::size_t row, std::size_t begin, std::span<Page* const> pages, Visit visit)
      VT_LOCKED {
    auto page = pages.begin();
    change({row, {begin, begin + pages.size()}}, [&](Entry& entry) VT_LOCKED {
      // Another thread may have used the page last.
      __builtin_prefetch(*(page + std::min<std::ptrdiff_t>(kAhead, pages.end() - page - 1)), 1);
      visit(*page);
      entry = {*page++, EntryState::arriving};
    });
  }
  // Arriving entries become `state`; calls visit(page) for each.
  template <typename Visit>
  void arrived(const Run& run, EntryState state, Visit visit) VT_LOCKED {
    change(run, [&visit, state](Entry& entry) VT_LOCKED {
      visit(entry.page());
      entry = {entry.page(), state};
    });
    add_mapped(run.indices, 1);
    if (state == EntryState::copy_on_write) copy_on_write_ += run.indices.size();
  }
  // Mapped or leaving entries of one state become empty; calls visit(page) for each.
  template <typename Visit>
  void departed(const Run& run, Visit visit) noexcept VT_LOCKED {
    const Entry first = at(run.row, run.indices.begin);
    add_mapped(run.indices, kLess);
    if (is_copy_on_write(first)) copy_on_write_ -= run.indices.size();
    if (is_leaving(first)) leaving_ -= run.indices.size();
    change(run, [&visit](Entry& entry) VT_LOCKED { visit(std::exchange(entry, {}).page()); });
  }
  void set(std::size_t row, std::size_t index, Entry entry) noexcept VT_LOCKED {
    Entry& here = entries_.reserved(place(row, index));
    if (counts_as_mapped(here) != counts_as_mapped(entry))
      add_mapped({index, index + 1}, counts_as_mapped(entry) ? 1 : kLess);
    if (is_leaving(entry)) set_why({index, index + 1}, Why::unneeded);
    if (is_copy_on_write(here) != is_copy_on_write(entry))
      copy_on_write_ += is_copy_on_write(entry) ? 1 : kLess;
    if (is_leaving(here) != is_leaving(entry)) leaving_ += is_leaving(entry) ? 1 : kLess;
    here = entry;
  }

 private:
  static constexpr std::size_t kLess = SIZE_MAX;  // -1 in modular arithmetic
  static constexpr std::ptrdiff_t kAhead = 8;     // pages to prefetch ahead

  static constexpr auto counts_as_mapped = [](Entry entry) {
    return is_mapped(entry) || is_leaving(entry);
  };

  // Entries of one index lie together, because most changes are of all rows.
  std::size_t place(std::size_t row, std::size_t index) const { return index * rows_ + row; }
  // Calls visit(index, entry) in order until it returns false. In a gap without entries, visits
  // only the first index.
  template <typename Visit>
  void walk(std::size_t row, Interval indices, Visit visit) const VT_LOCKED {
    for (std::size_t index = indices.begin; index < indices.end;) {
      const std::span<const Entry> some = entries_.together(place(row, index));
      if (some.empty()) {
        if (!visit(index, Entry{})) return;
        index = next(row, index);
      }
      for (std::size_t i = 0; i < some.size() && index < indices.end; i += rows_, ++index) {
        if (!visit(index, some[i])) return;
      }
    }
  }
  // The first index from `index` on that has an entry in this row.
  std::size_t next(std::size_t row, std::size_t index) const VT_LOCKED {
    const std::size_t found = entries_.next(place(row, index));
    return found == SIZE_MAX ? SIZE_MAX : ceil_div(sub_sat(found, row), rows_);
  }
  // Calls visit(entry) for the entries of the run, in order. Requires: the run is reserved.
  template <typename Visit>
  void change(const Run& run, Visit visit) VT_LOCKED {
    for (std::size_t index = run.indices.begin; index < run.indices.end;) {
      const std::span<Entry> some = entries_.together(place(run.row, index));
      for (std::size_t i = 0; i < some.size() && index < run.indices.end; i += rows_, ++index)
        visit(some[i]);
    }
  }
  // Counts by reason.
  struct Count {
    std::size_t indices = 0;
    std::size_t mapped = 0;  // entries
    Interval hull;           // of the indices
  };
  Count& of(Why why) VT_LOCKED { return counts_[static_cast<std::size_t>(why)]; }
  const Count& of(Why why) const VT_LOCKED { return counts_[static_cast<std::size_t>(why)]; }
  // Replaces each present index of `indices` by change(index), called once for equal neighbours.
  template <typename Change>
  void change_indices(Interval indices, Change change) noexcept VT_LOCKED {
    each_alike(indices_, indices, [&](std::size_t i, std::span<Index> some) VT_LOCKED {
      change_to(i, some, change(some.front()));
      return true;
    });
  }
  // Calls visit(i, some) in order until it returns false: `some` are equal neighbours from i on,
  // all present.
  template <typename Words, typename Visit>
  static void each_alike(Words& words, Interval indices, Visit visit) VT_LOCKED {
    for (std::size_t i = words.next(indices.begin); i < indices.end; i = words.next(i)) {
      auto some = words.together(i);
      some = some.first(std::min(some.size(), indices.end - i));
      while (!some.empty()) {
        const std::size_t n = count_alike(some);
        if (!visit(i, some.first(n))) return;
        some = some.subspan(n);
        i += n;
      }
    }
  }
  // How many from the first on are equal.
  static std::size_t count_alike(std::span<const Index> some) {
    if (some.size() == 1) return 1;
    // Compares words and not Index objects, so that compilers vectorize the loop.
    const std::uint32_t first = some.front().word_;
    std::uint32_t differ = 0;
    for (const Index& index : some) differ |= index.word_ ^ first;
    if (differ == 0) return some.size();
    std::size_t n = 1;
    while (some[n].word_ == first) ++n;
    return n;
  }
  // `index`, corrected: mapped pages have a reason, and unmapped ones are needed, prefetched or
  // nothing.
  static Index possible(Index index) {
    const Why why = index.why();
    if (index.mapped() == 0) return why == Why::needed || why == Why::prefetched ? index : Index();
    return why == Why::nothing ? Index(index.mapped(), Why::unneeded) : index;
  }
  // Sets `some`, equal indices from i on, to `to`, as corrected by possible().
  void change_to(std::size_t i, std::span<Index> some, Index to) noexcept VT_LOCKED {
    to = possible(to);
    if (to != some.front()) replace(i, some, to);
  }
  void replace(std::size_t i, std::span<Index> some, Index to) noexcept VT_LOCKED;
  // One entry at each of `indices` was mapped (`by` 1) or unmapped (kLess).
  void add_mapped(Interval indices, std::size_t by) noexcept VT_LOCKED;

  const std::size_t rows_;
  std::size_t reserved_ VT_GUARDED = 0;
  SparseArray<Entry> entries_ VT_GUARDED;
  SparseArray<Index> indices_ VT_GUARDED;
  std::array<Count, kWhys> counts_ VT_GUARDED;
  // Entries in these states.
  std::size_t copy_on_write_ VT_GUARDED = 0, leaving_ VT_GUARDED = 0;
  std::atomic<std::size_t> mapped_ = 0;  // read without the lock too
};

}  // namespace vtensor
