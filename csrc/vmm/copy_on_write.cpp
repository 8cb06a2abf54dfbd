#include "vmm/copy_on_write.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <ranges>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"

namespace vtensor {

namespace {

using Run = PageTable::Run;

// Remaps entries to other pages: all of them or none. At its end the page tables say what is
// mapped. The pool is broken if a run is in neither state.
class Remapping {
 public:
  // What happens to a changed run if a later run is refused.
  enum class Undo : std::uint8_t {
    needed,      // it is put back, or the pool is broken: the new pages have other bytes
    wanted,      // it is put back, or stays: the new pages have the same bytes
    impossible,  // it stays: the private copies are gone, and only the new pages have their bytes
  };

  // `state`: of the new entries.
  explicit Remapping(EntryState state) VT_LOCKED : state_(state) {}
  ~Remapping() VT_LOCKED {
    for (const Change& change : changes_) enter(change);
    if (failed_) changes_.front().range.store().break_down(failed_);
  }
  Remapping& operator=(Remapping&&) = delete;

  // Begins a run of pages that are mapped in one state; `add` extends the run.
  void begin(Reservation& range, std::size_t row, std::size_t index, Undo undo) VT_LOCKED {
    changes_.push_back(
        {range, {row, {index, index}}, access_of(range.at(row, index).state()), undo});
  }
  // Takes over a reference to `page`, unless the entry has `page` already. Throws std::bad_alloc,
  // and takes nothing over then.
  void add(Page* page) VT_LOCKED {
    Change& change = changes_.back();
    const Page* const was = change.range.at(change.run.row, change.run.indices.end).page();
    if (page != was && change.range.shared()) change.range.shared()->expect(1);
    change.was.push_back(was->handle);
    change.is.push_back(page->handle);
    change.to.push_back(page);
    ++change.run.indices.end;
  }
  void cannot_undo() { changes_.back().undo = Undo::impossible; }
  // Copies into the new pages may still run.
  void copies_go_on() { copying_ = true; }

  // Throws a refusal of the driver, after putting back every run that can be.
  void carry_out() {
    try {
      for (Change& change : changes_) exchange(change);
    } catch (...) {
      put_back();
      throw;
    }
  }
  void put_back() noexcept {
    for (Change& change : std::views::reverse(changes_)) {
      if (!change.changed || change.undo == Undo::impossible) continue;
      try {
        exchange(change);
      } catch (...) {
        if (change.undo == Undo::needed) failed_ = std::current_exception();
      }
    }
  }

 private:
  struct Change {
    Reservation& range;
    Run run;
    Access access;  // of the pages mapped before
    Undo undo;
    std::vector<Page*> to = {};
    std::vector<Handle> was = {}, is = {};
    bool changed = false;
  };

  void exchange(Change& change) {
    const Address at = change.range.address(change.run);
    const Access access = access_of(state_);
    Driver& driver = change.range.driver();
    try {
      change.changed ? driver.remap(at, change.is, access, change.was, change.access)
                     : driver.remap(at, change.was, change.access, change.is, access);
    } catch (const UndoFailed&) {
      failed_ = std::current_exception();
      throw;
    }
    change.changed = !change.changed;
  }

  void enter(const Change& change) const noexcept VT_LOCKED {
    Reservation& range = change.range;
    const auto& [row, indices] = change.run;
    for (std::size_t i = 0; i < change.to.size(); ++i) {
      const std::size_t index = indices.begin + i;
      Page* const page = change.to[i];
      if (change.changed) {
        range.replace(row, index, page, state_);
      } else if (page != range.at(row, index).page()) {
        if (range.shared()) range.shared()->forgo(1);
        copying_ ? range.keep_to_the_end(page) : range.store().drop(page);
      }
    }
  }

  const EntryState state_;
  std::vector<Change> changes_;
  bool copying_ = false;
  std::exception_ptr failed_;  // a refused undo
};

bool has_private_copies(const Reservation& range) VT_LOCKED {
  return range.copy_on_write() != 0 && range.driver().traits().kernel_copies_on_write;
}

}  // namespace

void make_copy_on_write(Reservation& range, PoolLock* lock, std::span<const Run> runs) {
  if (runs.empty()) return;
  Remapping changes(EntryState::copy_on_write);
  for (const auto& [row, indices] : runs) {
    changes.begin(range, row, indices.begin, Remapping::Undo::wanted);
    for (std::size_t index = indices.begin; index < indices.end; ++index)
      changes.add(range.at(row, index).page());
  }
  std::optional<Unlocked> unlocked;
  if (lock != nullptr) unlocked.emplace(*lock);
  changes.carry_out();
}

void unshare_pages(Reservation& range, PoolLock& lock, std::span<const Run> runs,
                   std::span<const Reservation::Bytes> stale, Stream stream) {
  if (runs.empty() && stale.empty()) return;
  Driver& driver = range.driver();
  Remapping changes(EntryState::writable);
  std::vector<PageCopy> copies;
  const Page* previous = nullptr;  // the new page before this one in its row
  std::size_t row = 0;
  for (const Run& run : runs) {
    if (std::exchange(row, run.row) != run.row) previous = nullptr;
    const std::vector<std::uint8_t> private_copies = find_private_copies(range, run);
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      const bool private_copy = private_copies[index - run.indices.begin];
      Page* const from = range.at(run.row, index).page();
      std::vector<Page*> taken{from};
      if (from->references > 1) {
        taken.clear();
        range.take(run.row, previous, 1, taken);
      }
      Page* const to = taken.front();
      const auto drop = [&range](Page* page) VT_LOCKED { range.store().drop(page); };
      std::unique_ptr<Page, decltype(drop)> not_added(to != from ? to : nullptr, drop);
      // A private copy cannot be put back, so a refused remap must leave it untouched: each driver
      // call then is one kernel mapping.
      const bool continues = previous != nullptr && previous->handle + 1 == to->handle;
      if (index == run.indices.begin || (driver.traits().adjacent_handles && !continues))
        changes.begin(range, run.row, index, Remapping::Undo::wanted);
      changes.add(to);
      [[maybe_unused]] const Page* const added = not_added.release();
      if (private_copy) changes.cannot_undo();
      if (to != from || private_copy) {
        // From here on the page holds no owner's bytes, until all is copied.
        to->last_owner = kNoOwner;
        copies.push_back({to->handle, range.address(run.row, index)});
      }
      previous = to;
    }
  }
  const Unlocked unlocked(lock);
  if (!copies.empty()) {
    const trace::Span span(trace::What::copy, copies.front().from,
                           copies.size() * range.page_size(), range.base());
    try {
      driver.copy_pages(copies);
    } catch (const TimedOut&) {
      changes.copies_go_on();
      throw;
    }
  }
  changes.carry_out();
  try {
    for (const Reservation::Bytes bytes : stale) range.zero(bytes, stream);
  } catch (...) {
    // If zeroing may still run, the new pages stay mapped.
    if (range.await_work(stream)) changes.put_back();
    throw;
  }
}

std::size_t count_fresh_pages(const Reservation& range, std::span<const Run> runs) {
  std::size_t fresh = 0;
  for (const auto& [row, indices] : runs) {
    for (std::size_t index = indices.begin; index < indices.end; ++index)
      fresh += range.at(row, index).page()->references > 1;
  }
  return fresh;
}

bool takes_fresh_page(const Reservation& range, const Page& page, std::uint32_t& unsharing) {
  return ++unsharing < page.references || (range.shared() && page.references > 1);
}

void remap_pages(std::span<const PageChange> changes) {
  Remapping remapping(EntryState::copy_on_write);
  for (const auto& [range, row, index, to] : changes) {
    remapping.begin(*range, row, index, Remapping::Undo::needed);
    for (Page* page : to) {
      remapping.add(page);
      range->store().share(page);
    }
  }
  remapping.carry_out();
}

std::vector<std::uint8_t> find_private_copies(const Reservation& range, const Run& run) {
  std::vector<std::uint8_t> private_copies(run.indices.size());
  if (!range.driver().traits().kernel_copies_on_write) return private_copies;
  range.driver().find_private_copies(range.address(run), private_copies);
  if (range.store().asleep() == 0) return private_copies;
  // Where a page sleeps nothing is mapped, and the system may report the kernel's page of zeros.
  for (std::size_t i = 0; i < private_copies.size(); ++i)
    if (!is_awake(range.at(run.row, run.indices.begin + i))) private_copies[i] = 0;
  return private_copies;
}

std::vector<Run> private_copies_in(const Reservation& range, Interval indices) {
  std::vector<Run> copied;
  if (!has_private_copies(range)) return copied;
  for (const Run& run : range.collect(indices, is_copy_on_write)) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(range, run);
    for (std::size_t i = 0; i < private_copies.size(); ++i) {
      const std::size_t first = i;
      while (i < private_copies.size() && private_copies[i]) ++i;
      if (i > first)
        copied.push_back({run.row, {run.indices.begin + first, run.indices.begin + i}});
    }
  }
  return copied;
}

namespace {

// Counts private copies, and of the pages that may be copied those for which `counts` is true.
template <typename Counts>
std::size_t count_copied(const Reservation& range, std::span<const Run> runs, Counts counts)
    VT_LOCKED {
  std::size_t count = 0;
  for (const Run& run : runs) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(range, run);
    for (std::size_t i = 0; i < private_copies.size(); ++i) {
      count += private_copies[i] == Driver::kMaybeCopied
                   ? counts(range.at(run.row, run.indices.begin + i).page())
                   : private_copies[i];
    }
  }
  return count;
}

}  // namespace

std::size_t count_private_copies(const Reservation& range, std::span<const Run> runs) {
  return count_copied(range, runs, [](const Page* page) { return page->references > 1; });
}

std::size_t count_private_copies(const Reservation& range, std::unordered_set<const Page*>& seen) {
  if (!has_private_copies(range)) return 0;
  return count_copied(range, range.collect({0, range.reserved()}, is_copy_on_write),
                      [&](const Page* page) { return !seen.insert(page).second; });
}

}  // namespace vtensor
