// Sharing pages between buffers and rows, and parting them again: the copy-on-write half of Buffer.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "core/buffer.h"
#include "core/shelf.h"

namespace vtensor {

// How many pages parting these takes: a page that nobody shares any more is kept.
std::size_t Buffer::fresh_pages_for(std::span<const Run> guarded) const {
  std::size_t fresh = 0;
  for (const Run& run : guarded) {
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
      fresh += table_.at(run.row, slot).page->references > 1;
    }
  }
  return fresh;
}

std::vector<std::uint8_t> Buffer::find_parted(const Run& run) {
  std::vector<std::uint8_t> parted(run.slots.size());
  if (driver_.traits().parts_on_write) driver_.find_parted(address_of(run), parted);
  return parted;
}

// Makes `pages` the writable pages of a guarded run.
void Buffer::adopt(const Run& run, std::span<Page* const> pages) noexcept {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Entry& entry = table_.at(run.row, run.slots.begin + i);
    if (entry.page != pages[i]) pool_->drop(entry.page);
    pages[i]->last_owner = id_;
    entry = {pages[i], EntryState::writable};
  }
  guarded_ -= pages.size();
}

// Gives each guarded page of `runs` a page of its own with what is seen there, mapped writable.
// Whole or nothing, except that pages which the kernel had parted may stay folded: nobody can tell
// but by the counts. Zeroes the positions `stale` at the end. Lets the lock go while pages are
// copied and remapped, but not to undo that. Requires: busy.
void Buffer::part(PoolLock& lock, const Caller& caller, std::span<const Run> runs, Interval stale) {
  struct Change {
    Run run;
    std::vector<std::uint8_t> parted;
    std::vector<Page*> to = {};
    std::vector<Handle> handles = {};  // of `to`
    std::vector<Handle> from = {};
  };
  std::vector<Change> changes;
  std::vector<PageCopy> copies;
  const auto page_at = [this](const Run& run, std::size_t i) {
    return table_.at(run.row, run.slots.begin + i).page;
  };
  const auto drop_new = [&](const Change& change) {
    for (std::size_t i = 0; i < change.to.size(); ++i) {
      if (change.to[i] != page_at(change.run, i)) pool_->drop(change.to[i]);
    }
  };
  const auto put_back = [&](const Change& change) {
    if (std::any_of(change.parted.begin(), change.parted.end(),
                    [](auto parted) { return parted != 0; })) {
      return adopt(change.run, change.to);
    }
    try {
      driver_.remap(address_of(change.run), change.handles, Access::writable, change.from,
                    Access::guarded);
      drop_new(change);
    } catch (const UndoFailed& error) {
      auto stuck = error.stuck.begin();
      for (std::size_t i = 0; i < change.to.size(); ++i) {
        if (stuck == error.stuck.end() || *stuck != i) {
          const std::size_t slot = change.run.slots.begin + i;
          adopt({change.run.row, {slot, slot + 1}}, {&change.to[i], 1});
          continue;
        }
        ++stuck;
        // Its old page is the entry's; which of the two is mapped here, nobody knows.
        if (change.to[i] != page_at(change.run, i)) {
          pool_->quarantine(change.to[i]);
          pool_->drop(change.to[i]);
        }
        quarantine(change.run, std::span(&i, 1));
      }
    } catch (const Error&) {
      adopt(change.run, change.to);
    }
  };

  std::size_t done = 0;
  try {
    if (!runs.empty()) open_homes();
    for (const Run& run : runs) {
      const std::vector<std::uint8_t> parted = find_parted(run);
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
        const bool was_parted = parted[slot - run.slots.begin];
        Page* from = table_.at(run.row, slot).page;
        const bool alone = from->references == 1;
        std::vector<Page*> taken;
        if (alone) {
          taken.push_back(from);
        } else {
          const bool first = changes.empty() || changes.back().run.row != run.row;
          pool_->take(homes_[run.row], first ? nullptr : changes.back().to.back(), 1, taken);
        }
        Page* to = taken.back();
        // What the kernel parted cannot be put back, so a refused remap must leave it whole: one
        // kernel mapping each.
        const bool continues =
            slot > run.slots.begin && changes.back().handles.back() + 1 == to->handle;
        if (slot == run.slots.begin || (driver_.traits().adjacent_handles && !continues)) {
          changes.push_back({{run.row, {slot, slot}}, {}});
        }
        Change& change = changes.back();
        change.run.slots.end = slot + 1;
        change.parted.push_back(was_parted);
        change.to.push_back(to);
        change.handles.push_back(to->handle);
        change.from.push_back(from->handle);
        if (!alone || was_parted) {
          // From here on it holds neither its last owner's bytes nor, until all is copied, ours.
          to->last_owner = kNobody;
          copies.push_back({to->handle, slot_address(run.row, slot)});
        }
      }
    }
    if (!changes.empty()) {
      const Unlocked unlocked(lock);
      if (!copies.empty()) {
        const trace::Span span(trace::What::copy, copies.front().from, copies.size() * page_size_,
                               base_);
        driver_.copy_pages(copies, {});
      }
      for (; done < changes.size(); ++done) {
        const Change& change = changes[done];
        driver_.remap(address_of(change.run), change.from, Access::guarded, change.handles,
                      Access::writable);
      }
    }
    zero_positions(stale, caller.stream);
  } catch (const UndoFailed& error) {
    const Change& broken = changes[done];
    for (const std::size_t i : error.stuck) {
      if (broken.to[i] != page_at(broken.run, i)) pool_->quarantine(broken.to[i]);
    }
    for (std::size_t c = 0; c < done; ++c) put_back(changes[c]);
    for (std::size_t c = done; c < changes.size(); ++c) drop_new(changes[c]);
    quarantine(broken.run, error.stuck);
    throw;
  } catch (const TimedOut&) {
    // The copies may still run: what they write to is nobody's any more, and what they read stays
    // mapped until the side stream has passed.
    note(driver_.side_stream());
    for (const Change& change : changes) {
      for (std::size_t i = 0; i < change.to.size(); ++i) {
        if (change.to[i] != page_at(change.run, i)) pool_->quarantine(change.to[i]);
      }
      drop_new(change);
    }
    throw;
  } catch (...) {
    // Where the zeroing of some positions may still run, their pages stay as they are.
    const bool over = done < changes.size() || stale.empty() || await_work(lock, caller.stream);
    for (std::size_t c = 0; c < changes.size(); ++c) {
      if (c >= done) {
        drop_new(changes[c]);
      } else if (over) {
        put_back(changes[c]);
      } else {
        adopt(changes[c].run, changes[c].to);
      }
    }
    throw;
  }
  for (const Change& change : changes) adopt(change.run, change.to);
}

void Buffer::own(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<Run> guarded;
  std::size_t fresh = 0;
  const auto look = [&] {
    require_whole(caller.operation);
    guarded.clear();
    for (std::size_t row = 0; row < shape_.rows; ++row)
      collect(guarded, row, slots_of(positions), is_guarded);
    fresh = fresh_pages_for(guarded);
  };
  look();
  if (guarded.empty()) return;
  require_no_capture(caller);
  {
    const Busy busy(*this, lock, caller);
    await_streams(lock, caller);
  }
  require_ready(lock, caller, [&] {
    look();
    return std::pair(fresh, parted_pages_in(guarded));
  });
  const Busy busy(*this, lock, caller);
  part(lock, caller, guarded);
  trace::event(trace::What::part, address_of(guarded.front()), fresh * page_size_, base_);
}

std::size_t Buffer::parted_pages_in(std::span<const Run> guarded) {
  std::size_t count = 0;
  for (const Run& run : guarded) {
    const std::vector<std::uint8_t> parted = find_parted(run);
    count += parted.size() - static_cast<std::size_t>(std::count(parted.begin(), parted.end(), 0));
  }
  return count;
}

std::size_t Buffer::count_parted() {
  if (guarded_ == 0 || !driver_.traits().parts_on_write) return 0;
  std::vector<Run> guarded;
  for (std::size_t row = 0; row < shape_.rows; ++row)
    collect(guarded, row, {0, row_pages_}, is_guarded);
  return parted_pages_in(guarded);
}

// Runs of pages of the extent that the kernel parted.
std::vector<Buffer::Run> Buffer::parted_in_extent() {
  std::vector<Run> guarded, folded;
  if (guarded_ == 0 || !driver_.traits().parts_on_write) return folded;
  for (std::size_t row = 0; row < shape_.rows; ++row) collect(guarded, row, extent_, is_guarded);
  for (const Run& run : guarded) {
    const std::vector<std::uint8_t> parted = find_parted(run);
    for (std::size_t i = 0; i < parted.size();) {
      const std::size_t first = i;
      while (i < parted.size() && parted[i]) ++i;
      if (i > first) {
        folded.push_back({run.row, {run.slots.begin + first, run.slots.begin + i}});
      } else {
        ++i;
      }
    }
  }
  return folded;
}

// Before pages are shared, or change their rows: no work is left that may write to them, and there
// is memory for what the kernel parted, which is returned.
std::vector<Buffer::Run> Buffer::quieten(PoolLock& lock, const Caller& caller) {
  {
    const Busy busy(*this, lock, caller);
    require_no_capture(caller);
    await_streams(lock, caller);
  }
  std::vector<Run> parted;
  require_ready(lock, caller, [&] {
    require_whole(caller.operation);
    parted = parted_in_extent();
    std::size_t pages = 0;
    for (const Run& run : parted) pages += run.slots.size();
    return std::pair(fresh_pages_for(parted), pages);
  });
  return parted;
}

// Makes runs writable again that were guarded a moment ago, and are shared with nobody.
void Buffer::unguard(std::span<const Run> runs) {
  for (const Run& run : runs) {
    const auto same = handles(run);
    std::vector<std::size_t> stuck;
    try {
      driver_.remap(address_of(run), same, Access::guarded, same, Access::writable);
      continue;
    } catch (const UndoFailed& error) {
      stuck = error.stuck;
    } catch (const Error&) {
    }
    // Guarded for good: the next write through us parts it.
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot)
      table_.at(run.row, slot).state = EntryState::guarded;
    guarded_ += run.slots.size();
    quarantine(run, stuck);
  }
}

// Guards writable runs, which are about to be shared. Whole or nothing. Lets the lock go meanwhile,
// unless it is null, but not to undo. Requires: busy, or null, and no work that may write to the
// runs is left in any stream.
void Buffer::guard(PoolLock* lock, std::span<const Run> runs) {
  if (runs.empty()) return;
  std::vector<Handle> same;
  for (const Run& run : runs) {
    const auto of_run = handles(run);
    same.insert(same.end(), of_run.begin(), of_run.end());
  }
  std::size_t done = 0;
  try {
    std::optional<Unlocked> unlocked;
    if (lock != nullptr) unlocked.emplace(*lock);
    for (std::size_t at = 0; done < runs.size(); ++done) {
      const auto of_run = std::span<const Handle>(same).subspan(at, runs[done].slots.size());
      driver_.remap(address_of(runs[done]), of_run, Access::writable, of_run, Access::guarded);
      at += of_run.size();
    }
  } catch (const UndoFailed& error) {
    quarantine(runs[done], error.stuck);  // guarded or not, nobody knows
    unguard(runs.first(done));
    throw;
  } catch (...) {
    unguard(runs.first(done));
    throw;
  }
  for (const Run& run : runs) {
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
      table_.at(run.row, slot).state = EntryState::guarded;
    }
    guarded_ += run.slots.size();
  }
}

void Buffer::guard_for_child(std::vector<Page*>& seen) noexcept {
  // What no tensor and no view shows, as what is ahead, the child cannot look at.
  Interval shown = extent_;
  for (const Generation* generation : generations_) {
    shown = shown.empty() ? generation->slots
                          : Interval{std::min(shown.begin, generation->slots.begin),
                                     std::max(shown.end, generation->slots.end)};
  }
  if (shown.empty()) return;
  try {
    std::vector<Run> writable;
    for (std::size_t row = 0; row < shape_.rows; ++row) collect(writable, row, shown, is_writable);
    seen.reserve(seen.size() + mapped_);
    guard(nullptr, writable);
  } catch (...) {
    return;  // the child still gets mappings of its own, and may see our later writes
  }
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
      if (is_guarded(table_.at(row, slot))) seen.push_back(table_.at(row, slot).page);
    }
  }
}

std::shared_ptr<Buffer> Buffer::share(const Caller& caller, const RowShape& shape,
                                      std::span<const std::size_t> rows, bool exclusive) {
  std::shared_ptr<Buffer> child = make(pool_, shape, caller);
  PoolLock lock(pool_);
  pool_->reap();
  try {
    // Parted pages get handles of their own, so that they can be shared again (I6).
    const std::vector<Run> parted = quieten(lock, caller);
    const Busy busy(*this, lock, caller);
    part(lock, caller, parted);
    child->table_.reserve(extent_.size());
    const auto map = [&](bool (*wanted)(const Entry&), EntryState state) {
      std::vector<Run> runs, theirs;
      std::vector<Page*> pages;
      for (std::size_t row = 0; row < rows.size(); ++row) {
        runs.clear();
        collect(runs, rows[row], extent_, wanted);
        for (const Run& run : runs) {
          const Interval slots = run.slots;
          theirs.push_back({row, {slots.begin - extent_.begin, slots.end - extent_.begin}});
          for (std::size_t slot = slots.begin; slot < slots.end; ++slot)
            pages.push_back(table_.at(run.row, slot).page);
        }
      }
      child->map_shared(lock, theirs, pages, state);
    };
    if (exclusive) {
      map(is_writable, EntryState::writable);
      map(is_guarded, EntryState::guarded);
    } else {
      map(is_mapped, EntryState::guarded);
    }
    if (!exclusive) {
      std::vector<Run> writable;
      for (std::size_t row = 0; row < shape_.rows; ++row)
        collect(writable, row, extent_, is_writable);
      guard(&lock, writable);
    }
    child->positions_ = {0, positions_.size()};
    child->extent_ = child->slots_of(child->positions_);
    child->set_ready({});
    trace::event(trace::What::fork, slot_address(0, extent_end()),
                 extent_.size() * shape_.rows * page_size_, base_);
  } catch (...) {
    child->owned_ = false;
    child->touch({0, extent_.size()});
    if (!child->settle(&lock)) pool_->settle_later(child);
    throw;
  }
  return child;
}

std::vector<std::shared_ptr<Shelf>> Buffer::offer(const Caller& caller,
                                                  std::span<const Interval> slots) {
  std::vector<std::shared_ptr<Shelf>> shelves;
  shelves.reserve(slots.size());
  PoolLock lock(pool_);
  pool_->reap();
  const std::vector<Run> parted = quieten(lock, caller);
  const Busy busy(*this, lock, caller);
  part(lock, caller, parted);
  std::vector<std::vector<Page*>> pages(slots.size());
  std::vector<Run> writable;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    pages[i].reserve(slots[i].size() * shape_.rows);
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      for (std::size_t slot = slots[i].begin; slot < slots[i].end; ++slot)
        pages[i].push_back(table_.at(row, slot).page);
    }
  }
  if (!slots.empty()) {
    for (std::size_t row = 0; row < shape_.rows; ++row)
      collect(writable, row, {slots.front().begin, slots.back().end}, is_writable);
  }
  guard(&lock, writable);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (Page* page : pages[i]) pool_->share(page);
    shelves.push_back(std::make_shared<Shelf>(pool_, slots[i], std::move(pages[i])));
  }
  return shelves;
}

void Buffer::accept(const Caller& caller, Interval positions,
                    std::span<const std::shared_ptr<Shelf>> shelves) {
  if (shelves.empty()) return;
  PoolLock lock(pool_);
  pool_->reap();
  const Interval slots{shelves.front()->slots().begin, shelves.back()->slots().end};
  if (quarantined_ != 0) {
    throw Error("[" + std::string(caller.operation) +
                "] places of it were lost in a driver call that could not be undone: close it");
  }
  pool_->await(lock, caller.operation, "the work that used the pages that were here", [&] {
    if (busy_) return false;
    settle(&lock);
    if (refusal_) std::rethrow_exception(refusal_);
    return count_mapped(slots) == 0;
  });
  const Busy busy(*this, lock, caller);
  require_no_capture(caller);
  note(caller);
  table_.reserve(slots.end);
  std::vector<Run> runs;
  std::vector<Page*> pages;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    runs.push_back({row, slots});
    for (const std::shared_ptr<Shelf>& shelf : shelves)
      pages.insert(pages.end(), shelf->row(row).begin(), shelf->row(row).end());
  }
  map_shared(lock, runs, pages, EntryState::guarded);
  positions_ = positions;
  extent_ = slots;
  retire_no_more(extent_);
  set_ready({});
  trace::event(trace::What::fork, slot_address(0, slots.begin), pages.size() * page_size_, base_);
}

std::size_t Buffer::shared_with(const Buffer& other) const {
  if (extent_.begin != other.extent_.begin) return 0;
  const std::size_t end = std::min(extent_.end, other.extent_.end);
  std::size_t slot = extent_.begin;
  const auto same = [&](std::size_t at) {
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      if (table_.at(row, at).page != other.table_.at(row, at).page) return false;
    }
    return true;
  };
  while (slot < end && same(slot)) ++slot;
  return slot - std::min(slot, extent_.begin);
}

std::size_t Buffer::writable_until(std::size_t position) const {
  std::size_t slot = slots_of({position, position + 1}).begin;
  if (quarantined_ != 0) {
    // Whoever wants more is told what was lost.
  } else if (guarded_ == 0) {
    slot = std::max(slot, extent_.end);
  } else {
    const auto writable = [this](std::size_t at) {
      for (std::size_t row = 0; row < shape_.rows; ++row) {
        if (!is_writable(table_.at(row, at))) return false;
      }
      return true;
    };
    while (slot < extent_.end && writable(slot)) ++slot;
  }
  const std::size_t end = slot * page_size_;
  return end > shape_.phase ? (end - shape_.phase) / shape_.item_bytes : 0;
}

void Buffer::reindex(const Caller& caller, std::span<const Reindexing> all) {
  if (all.empty()) return;
  const std::shared_ptr<PagePool>& pool = all.front().buffer->pool_;
  Driver& driver = pool->driver();
  PoolLock lock(pool);
  pool->reap();
  std::vector<std::unique_ptr<Busy>> busy;
  for (const auto& [buffer, rows] : all) {
    const std::vector<Run> parted = buffer->quieten(lock, caller);
    busy.push_back(std::make_unique<Busy>(*buffer, lock, caller));
    buffer->part(lock, caller, parted);
  }

  // Runs in which row i has to change its pages, with what each has now and will have.
  struct Change {
    Buffer* buffer;
    Run run;
    std::vector<Entry> from;
    std::vector<Page*> to;
  };
  std::vector<Change> changes;
  for (const auto& [buffer, rows] : all) {
    const Interval extent = buffer->extent_;
    const PageTable& table = buffer->table_;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      for (std::size_t slot = extent.begin; slot < extent.end;) {
        const auto differs = [&table, &rows, row](std::size_t s) {
          return table.at(row, s).page != table.at(rows[row], s).page;
        };
        if (!differs(slot)) {
          ++slot;
          continue;
        }
        Change change{buffer, {row, {slot, slot}}, {}, {}};
        const EntryState state = table.at(row, slot).state;
        while (slot < extent.end && differs(slot) && table.at(row, slot).state == state) {
          change.from.push_back(table.at(row, slot));
          change.to.push_back(table.at(rows[row], slot).page);
          ++slot;
        }
        change.run.slots.end = slot;
        changes.push_back(std::move(change));
      }
    }
  }
  if (changes.empty()) return;

  const auto handles_from = [](const Change& change) {
    std::vector<Handle> handles;
    for (const Entry& entry : change.from) handles.push_back(entry.page->handle);
    return handles;
  };
  const auto handles_to = [](const Change& change) {
    std::vector<Handle> handles;
    for (const Page* page : change.to) handles.push_back(page->handle);
    return handles;
  };
  for (const auto& [buffer, rows] : all) {
    // Rows that stay and are now seen by another row as well.
    std::vector<Run> sources;
    for (std::size_t row = 0; row < buffer->shape_.rows; ++row) {
      if (rows[row] == row && std::count(rows.begin(), rows.end(), row) > 1)
        buffer->collect(sources, row, buffer->extent_, is_writable);
    }
    buffer->guard(nullptr, sources);
  }

  std::size_t done = 0;
  try {
    for (; done < changes.size(); ++done) {
      const Change& change = changes[done];
      driver.remap(change.buffer->address_of(change.run), handles_from(change),
                   change.from.front().access(), handles_to(change), Access::guarded);
    }
  } catch (const Error& error) {
    const auto give_up = [&pool](const Change& change) {
      for (Page* page : change.to) pool->quarantine(page);
      change.buffer->quarantine(change.run);
    };
    for (std::size_t i = 0; i < done; ++i) {
      const Change& change = changes[i];
      try {
        driver.remap(change.buffer->address_of(change.run), handles_to(change), Access::guarded,
                     handles_from(change), change.from.front().access());
      } catch (const Error&) {
        give_up(change);
      }
    }
    if (dynamic_cast<const UndoFailed*>(&error)) give_up(changes[done]);
    throw;
  }
  for (const Change& change : changes) {
    for (Page* page : change.to) pool->share(page);
  }
  for (const Change& change : changes) {
    for (std::size_t i = 0; i < change.to.size(); ++i) {
      Entry& entry = change.buffer->table_.at(change.run.row, change.run.slots.begin + i);
      if (is_writable(entry)) ++change.buffer->guarded_;
      pool->drop(entry.page);
      entry = {change.to[i], EntryState::guarded};
    }
  }
}

}  // namespace vtensor
