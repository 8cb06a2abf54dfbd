// Sharing pages between buffers and rows, and parting them again.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "tensor/buffer.h"
#include "tensor/shelf.h"

namespace vtensor {

void Buffer::unshare(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<Reservation::Run> guarded;
  std::size_t fresh = 0;
  const auto look = [&] {
    require_whole(caller.operation);
    guarded = range_.collect(slots_of(positions), is_guarded);
    fresh = range_.fresh_pages_for(guarded);
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
    return std::pair(fresh, range_.count_parted(guarded));
  });
  const Busy busy(*this, lock, caller);
  part(lock, caller, guarded);
  trace::event(trace::What::part, range_.address(guarded.front()), fresh * range_.page_size(),
               range_.base());
}

void Buffer::part(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
                  Interval stale) {
  try {
    range_.part(lock, runs, bytes_of(stale), caller.stream);
  } catch (const TimedOut&) {
    // What the copies read stays mapped until the side stream has passed.
    work_.note(driver_.side_stream());
    throw;
  }
}

// Before pages are shared, or change their rows: no work is left that may write to them, and what
// the kernel parted has handles of its own, so that it can be shared again (I6). Busy from then on.
std::unique_ptr<Buffer::Busy> Buffer::quieten(PoolLock& lock, const Caller& caller) {
  {
    const Busy busy(*this, lock, caller);
    require_no_capture(caller);
    await_streams(lock, caller);
  }
  std::vector<Reservation::Run> parted;
  require_ready(lock, caller, [&] {
    require_whole(caller.operation);
    parted = range_.parted_in(extent_);
    std::size_t pages = 0;
    for (const Reservation::Run& run : parted) pages += run.slots.size();
    return std::pair(range_.fresh_pages_for(parted), pages);
  });
  auto busy = std::make_unique<Busy>(*this, lock, caller);
  part(lock, caller, parted);
  return busy;
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
    seen.reserve(seen.size() + range_.mapped());
    range_.guard(nullptr, range_.collect(shown, is_writable));
  } catch (...) {
    return;  // the child still gets mappings of its own, and may see our later writes
  }
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t slot = 0; slot < range_.reserved(); ++slot) {
      if (is_guarded(range_.at(row, slot))) seen.push_back(range_.at(row, slot).page);
    }
  }
}

std::shared_ptr<Buffer> Buffer::share(const Caller& caller, const RowShape& shape,
                                      std::span<const std::size_t> rows, bool exclusive) {
  std::shared_ptr<Buffer> child = make(pool_, shape, caller);
  PoolLock lock(pool_);
  pool_->reap();
  try {
    const std::unique_ptr<Busy> busy = quieten(lock, caller);
    child->range_.reserve(extent_.size());
    const auto map = [&](bool (*wanted)(const Entry&), EntryState state) {
      std::vector<Reservation::Run> runs, theirs;
      std::vector<Page*> pages;
      for (std::size_t row = 0; row < rows.size(); ++row) {
        runs.clear();
        range_.collect(runs, rows[row], extent_, wanted);
        for (const Reservation::Run& run : runs) {
          const Interval slots = run.slots;
          theirs.push_back({row, {slots.begin - extent_.begin, slots.end - extent_.begin}});
          for (std::size_t slot = slots.begin; slot < slots.end; ++slot)
            pages.push_back(range_.at(run.row, slot).page);
        }
      }
      child->range_.map_shared(lock, theirs, pages, state);
    };
    if (exclusive) {
      map(is_writable, EntryState::writable);
      map(is_guarded, EntryState::guarded);
    } else {
      map(is_mapped, EntryState::guarded);
    }
    if (!exclusive) range_.guard(&lock, range_.collect(extent_, is_writable));
    child->positions_ = {0, positions_.size()};
    child->extent_ = child->slots_of(child->positions_);
    child->set_ready({});
    range_.event(trace::What::fork, extent_);
  } catch (...) {
    child->owned_ = false;
    child->unmap_.touch({0, extent_.size()});
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
  const std::unique_ptr<Busy> busy = quieten(lock, caller);
  std::vector<std::vector<Page*>> pages(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    pages[i].reserve(slots[i].size() * range_.rows());
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      for (std::size_t slot = slots[i].begin; slot < slots[i].end; ++slot)
        pages[i].push_back(range_.at(row, slot).page);
    }
  }
  if (!slots.empty()) {
    range_.guard(&lock, range_.collect({slots.front().begin, slots.back().end}, is_writable));
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (Page* page : pages[i]) pool_->store().share(page);
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
  if (range_.quarantined() != 0) {
    throw Error("[" + std::string(caller.operation) +
                "] places of it were lost in a driver call that could not be undone: close it");
  }
  pool_->await(lock, caller.operation, "the work that used the pages that were here", [&] {
    if (busy_) return false;
    settle(&lock);
    if (unmap_.refusal()) std::rethrow_exception(unmap_.refusal());
    return range_.count_mapped(slots) == 0;
  });
  const Busy busy(*this, lock, caller);
  require_no_capture(caller);
  work_.note(caller);
  range_.reserve(slots.end);
  std::vector<Reservation::Run> runs;
  std::vector<Page*> pages;
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    runs.push_back({row, slots});
    for (const std::shared_ptr<Shelf>& shelf : shelves)
      pages.insert(pages.end(), shelf->row(row).begin(), shelf->row(row).end());
  }
  range_.map_shared(lock, runs, pages, EntryState::guarded);
  positions_ = positions;
  extent_ = slots;
  unmap_.remove(extent_);
  set_ready({});
  range_.event(trace::What::fork, slots);
}

std::size_t Buffer::shared_with(const Buffer& other) const {
  if (extent_.begin != other.extent_.begin) return 0;
  const std::size_t end = std::min(extent_.end, other.extent_.end);
  std::size_t slot = extent_.begin;
  const auto same = [&](std::size_t at) {
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      if (range_.at(row, at).page != other.range_.at(row, at).page) return false;
    }
    return true;
  };
  while (slot < end && same(slot)) ++slot;
  return slot - std::min(slot, extent_.begin);
}

std::size_t Buffer::writable_until(std::size_t position) const {
  std::size_t slot = slots_of({position, position + 1}).begin;
  if (range_.quarantined() != 0) {
    // A step that needs more raises what was lost.
  } else if (range_.guarded() == 0) {
    slot = std::max(slot, extent_.end);
  } else {
    slot = range_.first_not({slot, extent_.end}, is_writable);
  }
  const std::size_t end = slot * range_.page_size();
  return end > shape_.phase ? (end - shape_.phase) / shape_.item_bytes : 0;
}

void Buffer::reindex(const Caller& caller, std::span<const Reindexing> all) {
  if (all.empty()) return;
  const std::shared_ptr<PagePool>& pool = all.front().buffer->pool_;
  PoolLock lock(pool);
  pool->reap();
  std::vector<std::unique_ptr<Busy>> busy;
  for (const auto& [buffer, rows] : all) busy.push_back(buffer->quieten(lock, caller));

  std::vector<Reservation::Change> changes;
  for (const auto& [buffer, rows] : all) {
    Reservation& range = buffer->range_;
    const Interval extent = buffer->extent_;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto differs = [&range, row, from = rows[row]](std::size_t slot) {
        return range.at(row, slot).page != range.at(from, slot).page;
      };
      for (std::size_t slot = extent.begin; slot < extent.end; ++slot) {
        if (!differs(slot)) continue;
        Reservation::Change change{&range, {row, {slot, slot}}, {}};
        const EntryState state = range.at(row, slot).state;
        while (slot < extent.end && differs(slot) && range.at(row, slot).state == state)
          change.to.push_back(range.at(rows[row], slot++).page);
        change.run.slots.end = slot--;
        changes.push_back(std::move(change));
      }
    }
  }
  if (changes.empty()) return;
  for (const auto& [buffer, rows] : all) {
    // Rows that stay and are now seen by another row as well.
    std::vector<Reservation::Run> sources;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (rows[row] == row && std::count(rows.begin(), rows.end(), row) > 1)
        buffer->range_.collect(sources, row, buffer->extent_, is_writable);
    }
    buffer->range_.guard(nullptr, sources);
  }
  Reservation::remap(changes);
}

}  // namespace vtensor
