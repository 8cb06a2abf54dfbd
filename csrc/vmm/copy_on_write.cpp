// The copy-on-write half of a reservation: pages shared between ranges and rows, and copied again.
#include <algorithm>
#include <optional>
#include <ranges>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "vmm/reservation.h"

namespace vtensor {

// Pages that come to stand where others are mapped: all or none. At its end page tables are given
// what the driver has made of it.
class Reservation::Remapping {
 public:
  // What becomes of a changed run if a later one is refused.
  enum class Undo : std::uint8_t {
    needed,      // it is put back, or given up: it shows other bytes
    wanted,      // it is put back, or stays: it shows the same bytes
    impossible,  // it stays: what the kernel had copied lies nowhere else now
  };

  // The new entries are in `state`.
  explicit Remapping(EntryState state) VT_LOCKED : state_(state) {}
  ~Remapping() VT_LOCKED {
    for (const Change& change : changes_) enter(change);
  }
  Remapping(const Remapping&) = delete;
  Remapping& operator=(const Remapping&) = delete;

  // Begins a run of pages that are mapped in one state; `add` continues it.
  void begin(Reservation& range, std::size_t row, std::size_t index, Undo undo) VT_LOCKED {
    changes_.push_back({range, {row, {index, index}}, range.at(row, index).access(), undo});
  }
  // Takes over a reference to `page`, unless it is the one that is mapped there.
  void add(Page* page) VT_LOCKED {
    Change& change = changes_.back();
    change.to.push_back(page);
    change.was.push_back(change.range.at(change.run.row, change.run.indices.end++).page->handle);
    change.is.push_back(page->handle);
    change.stuck.reserve(change.to.size());
  }
  void cannot_undo() { changes_.back().undo = Undo::impossible; }
  // Work may still write to the new pages: those that are not mapped now are never used again.
  void give_up() { given_up_ = true; }

  // Throws what the driver does; what can be is put back then.
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
        if (change.undo == Undo::wanted) continue;
        change.stuck.clear();
        for (std::size_t i = 0; i < change.to.size(); ++i) change.stuck.push_back(i);
      }
    }
  }

 private:
  struct Change {
    Reservation& range;
    Run run;
    Access access;  // of what was there
    Undo undo;
    std::vector<Page*> to = {};
    std::vector<Handle> was = {}, is = {};
    bool changed = false;
    std::vector<std::size_t> stuck = {};  // indices in `to`: which of both is mapped is not known
  };

  void exchange(Change& change) {
    const Address at = change.range.address(change.run);
    const Access access = Entry{nullptr, state_}.access();
    Driver& driver = change.range.driver_;
    try {
      change.changed ? driver.remap(at, change.is, access, change.was, change.access)
                     : driver.remap(at, change.was, change.access, change.is, access);
    } catch (const UndoFailed& error) {
      change.stuck.assign(error.stuck.begin(), error.stuck.end());
      throw;
    }
    change.changed = !change.changed;
  }

  void enter(const Change& change) const noexcept VT_LOCKED {
    Reservation& range = change.range;
    PageStore& pages = range.pages_;
    for (std::size_t i = 0; i < change.to.size(); ++i) {
      const std::size_t index = change.run.indices.begin + i;
      Entry& entry = range.table_.at(change.run.row, index);
      Page* const page = change.to[i];
      const bool other = page != entry.page;
      const bool stuck = is_stuck(change.stuck, i);
      if (change.changed && !stuck) {
        range.copy_on_write_ -= is_copy_on_write(entry);
        if (other) pages.drop(entry.page);
        entry = {page, state_};
        range.copy_on_write_ += is_copy_on_write(entry);
        if (is_writable(entry)) page->last_owner = range.owner_;
      } else if (other) {
        if (stuck || given_up_) pages.quarantine(page);
        pages.drop(page);
      }
      if (stuck) range.quarantine(change.run.row, index);
    }
  }

  const EntryState state_;
  std::vector<Change> changes_;
  bool given_up_ = false;
};

void Reservation::map_shared(PoolLock& lock, std::span<const Run> runs,
                             std::span<Page* const> pages, EntryState state) {
  if (runs.empty()) return;
  std::vector<Handle> handles;
  for (const Page* page : pages) handles.push_back(page->handle);
  std::vector<PageRun> mapped;
  add_page_runs(mapped, runs, handles);
  std::vector<std::size_t> stuck;
  std::exception_ptr error;
  for (Page* page : pages) pages_.share(page);  // they are to be there when the calls are made
  try {
    const Unlocked unlocked(lock);
    const trace::Span span(trace::What::map, mapped.front().at, pages.size() * page_size_, base_);
    driver_.map(mapped, Entry{nullptr, state}.access());
  } catch (const UndoFailed& refusal) {
    error = std::current_exception();
    stuck = refusal.stuck;
  } catch (...) {
    error = std::current_exception();
  }
  Page* const* page = pages.data();
  for (const Run& run : runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++page) {
      Entry& entry = table_.at(run.row, index);
      if (!error) {
        entry = {*page, state};
        ++mapped_;
        copy_on_write_ += is_copy_on_write(entry);
        if (is_writable(entry)) (*page)->last_owner = owner_;  // the owner moves here
      } else if (is_stuck(stuck, static_cast<std::size_t>(page - pages.data()))) {
        entry = {*page, EntryState::arriving};
        quarantine(run.row, index);
      } else {
        pages_.drop(*page);
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

std::size_t Reservation::fresh_pages_for(std::span<const Run> copy_on_write) const {
  std::size_t fresh = 0;
  for (const Run& run : copy_on_write) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      fresh += at(run.row, index).page->references > 1;
    }
  }
  return fresh;
}

std::vector<std::uint8_t> Reservation::find_private_copies(const Run& run) const {
  std::vector<std::uint8_t> private_copies(run.indices.size());
  if (!driver_.traits().kernel_copies_on_write) return private_copies;
  driver_.find_private_copies(address(run), private_copies);
  if (pages_.asleep() == 0) return private_copies;
  // Behind a page that is mapped nowhere, reading finds the kernel's page of zeros.
  for (std::size_t i = 0; i < private_copies.size(); ++i)
    private_copies[i] &= !at(run.row, run.indices.begin + i).page->asleep;
  return private_copies;
}

std::size_t Reservation::count_private_copies(std::span<const Run> copy_on_write) const {
  std::size_t count = 0;
  for (const Run& run : copy_on_write) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(run);
    count += private_copies.size() -
             static_cast<std::size_t>(std::count(private_copies.begin(), private_copies.end(), 0));
  }
  return count;
}

std::size_t Reservation::count_private_copies() const {
  if (copy_on_write_ == 0 || !driver_.traits().kernel_copies_on_write) return 0;
  return count_private_copies(collect({0, row_pages_}, is_copy_on_write));
}

std::vector<Reservation::Run> Reservation::private_copies_in(Interval indices) const {
  std::vector<Run> folded;
  if (copy_on_write_ == 0 || !driver_.traits().kernel_copies_on_write) return folded;
  for (const Run& run : collect(indices, is_copy_on_write)) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(run);
    for (std::size_t i = 0; i < private_copies.size();) {
      const std::size_t first = i;
      while (i < private_copies.size() && private_copies[i]) ++i;
      if (i > first) {
        folded.push_back({run.row, {run.indices.begin + first, run.indices.begin + i}});
      } else {
        ++i;
      }
    }
  }
  return folded;
}

void Reservation::unshare(PoolLock& lock, std::span<const Run> runs, std::span<const Bytes> stale,
                          Stream stream) {
  if (runs.empty() && stale.empty()) return;
  open_homes();
  Remapping changes(EntryState::writable);
  std::vector<PageCopy> copies;
  const Page* previous = nullptr;  // in the same row
  std::size_t row = 0;
  for (const Run& run : runs) {
    if (std::exchange(row, run.row) != run.row) previous = nullptr;
    const std::vector<std::uint8_t> private_copies = find_private_copies(run);
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      const bool private_copy = private_copies[index - run.indices.begin];
      Page* const from = at(run.row, index).page;
      std::vector<Page*> taken{from};
      if (from->references > 1) {
        taken.clear();
        pages_.take(homes_[run.row], previous, 1, taken);
      }
      Page* const to = taken.front();
      // What the kernel copied cannot be put back, so a refused remap must leave it whole: one
      // kernel mapping each.
      const bool continues = previous != nullptr && previous->handle + 1 == to->handle;
      if (index == run.indices.begin || (driver_.traits().adjacent_handles && !continues))
        changes.begin(*this, run.row, index, Remapping::Undo::wanted);
      changes.add(to);
      if (private_copy) changes.cannot_undo();
      if (to != from || private_copy) {
        // From here on it holds neither its last owner's bytes nor, until all is copied, ours.
        to->last_owner = kNoOwner;
        copies.push_back({to->handle, address(run.row, index)});
      }
      previous = to;
    }
  }
  const Unlocked unlocked(lock);
  if (!copies.empty()) {
    const trace::Span span(trace::What::copy, copies.front().from, copies.size() * page_size_,
                           base_);
    try {
      driver_.copy_pages(copies, {});
    } catch (const TimedOut&) {
      changes.give_up();
      throw;
    }
  }
  changes.carry_out();
  try {
    for (const Bytes bytes : stale) zero(bytes, stream);
  } catch (...) {
    // Pages that are being zeroed stay as they are.
    if (await_work(stream)) changes.put_back();
    throw;
  }
}

void Reservation::make_copy_on_write(PoolLock* lock, std::span<const Run> runs) {
  if (runs.empty()) return;
  Remapping changes(EntryState::copy_on_write);
  for (const Run& run : runs) {
    changes.begin(*this, run.row, run.indices.begin, Remapping::Undo::wanted);
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      changes.add(at(run.row, index).page);
  }
  std::optional<Unlocked> unlocked;
  if (lock != nullptr) unlocked.emplace(*lock);
  changes.carry_out();
}

void Reservation::remap(std::span<const Change> changes) {
  Remapping remapping(EntryState::copy_on_write);
  for (const auto& [range, row, index, to] : changes) {
    remapping.begin(*range, row, index, Remapping::Undo::needed);
    for (Page* page : to) {
      range->pages_.share(page);
      remapping.add(page);
    }
  }
  remapping.carry_out();
}

void Reservation::protect(Interval shown, std::vector<Page*>& seen) noexcept {
  try {
    seen.reserve(seen.size() + mapped());
    std::vector<Run> writable = collect(shown, is_writable), asleep;
    part_asleep(writable, asleep);
    make_copy_on_write(nullptr, writable);
  } catch (...) {
    return;  // the child still gets mappings of its own, and may see our later writes
  }
  for (std::size_t row = 0; row < rows_; ++row) {
    for (std::size_t index = 0; index < reserved(); ++index) {
      if (is_copy_on_write(at(row, index)) && !at(row, index).page->asleep)
        seen.push_back(at(row, index).page);
    }
  }
}

}  // namespace vtensor
