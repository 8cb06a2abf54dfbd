// Sharing pages between buffers and rows, and unsharing them again.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "tensor/buffer.h"
#include "tensor/page_set.h"
#include "vmm/copy_on_write.h"
#include "vmm/wait.h"

namespace vtensor {

void Buffer::unshare(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<Reservation::Run> copy_on_write;
  std::size_t fresh = 0;
  const auto look = [&]() VT_LOCKED {
    require_whole(caller.operation);
    copy_on_write = range_.collect(indices_of(positions), is_copy_on_write);
    fresh = count_fresh_pages(range_, copy_on_write);
  };
  look();
  if (copy_on_write.empty()) return;
  require_no_capture(caller);
  {
    const Busy busy(*this, lock, caller);
    await_streams(lock, caller);
  }
  require_ready(lock, caller, [&]() VT_LOCKED {
    look();
    return std::pair(fresh, count_private_copies(range_, copy_on_write));
  });
  const Busy busy(*this, lock, caller);
  unshare(lock, caller, copy_on_write);
  trace::event(trace::What::unshare, range_.address(copy_on_write.front()),
               fresh * range_.page_size(), range_.base());
}

void Buffer::unshare(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
                     Interval stale) {
  try {
    unshare_pages(range_, lock, runs, bytes_of(stale), caller.stream);
  } catch (const TimedOut&) {
    // What the copies read stays mapped until the side stream has passed.
    work_.note(driver_.side_stream());
    throw;
  }
}

// Before pages are shared, or change their rows: no work is left that may write to them, and what
// the kernel copied has handles of its own, so that it can be shared again (I6). Busy from then on.
std::unique_ptr<Buffer::Busy> Buffer::quieten(PoolLock& lock, const Caller& caller) {
  {
    const Busy busy(*this, lock, caller);
    require_no_capture(caller);
    await_streams(lock, caller);
  }
  std::vector<Reservation::Run> private_copies;
  require_ready(lock, caller, [&]() VT_LOCKED {
    require_whole(caller.operation);
    private_copies = private_copies_in(range_, extent_);
    std::size_t pages = 0;
    for (const Reservation::Run& run : private_copies) pages += run.indices.size();
    return std::pair(count_fresh_pages(range_, private_copies), pages);
  });
  auto busy = std::make_unique<Busy>(*this, lock, caller);
  unshare(lock, caller, private_copies);
  return busy;
}

void Buffer::protect_for_child(std::vector<Page*>& seen) noexcept {
  // What no tensor and no view shows, as what is ahead, the child cannot look at.
  Interval shown = extent_;
  for (const Generation* generation : generations_) {
    shown = shown.empty() ? generation->indices
                          : Interval{std::min(shown.begin, generation->indices.begin),
                                     std::max(shown.end, generation->indices.end)};
  }
  if (!shown.empty()) protect_pages(range_, shown, seen);
}

std::shared_ptr<Buffer> Buffer::share(const Caller& caller, const RowShape& shape,
                                      std::span<const std::size_t> rows, bool exclusive) {
  std::shared_ptr<Buffer> child = make(pool_, shape, caller);
  PoolLock lock(pool_);
  pool_->reap();
  try {
    const std::unique_ptr<Busy> busy = quieten(lock, caller);
    child->range_.reserve(extent_.size());
    const auto map = [&](bool (*wanted)(const Entry&), EntryState state) VT_LOCKED {
      Reservation::Arrival arrival;
      arrival.given = true;
      arrival.state = state;
      std::vector<Reservation::Run> runs;
      for (std::size_t row = 0; row < rows.size(); ++row) {
        runs.clear();
        range_.collect(runs, rows[row], extent_, wanted);
        for (const auto& [from, indices] : runs) {
          arrival.runs.push_back(
              {row, {indices.begin - extent_.begin, indices.end - extent_.begin}});
          for (std::size_t index = indices.begin; index < indices.end; ++index)
            arrival.pages.push_back(range_.at(from, index).page);
        }
      }
      child->range_.map(lock, arrival, caller.stream, false);
    };
    if (exclusive) {
      map(is_writable, EntryState::writable);
      map(is_copy_on_write, EntryState::copy_on_write);
    } else {
      map(is_mapped, EntryState::copy_on_write);
    }
    if (!exclusive) make_copy_on_write(range_, &lock, range_.collect(extent_, is_writable));
    child->set_positions({0, positions_.size()});
    child->extent_ = child->indices_of(child->positions_);
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

// A page set lets its pages go with the lock, so `to` must outlive the caller's.
void Buffer::add_page_sets(std::vector<std::shared_ptr<PageSet>>& to,
                           std::span<const Interval> indices) {
  std::vector<std::vector<Page*>> pages(indices.size());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    pages[i].reserve(indices[i].size() * range_.rows());
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      for (std::size_t index = indices[i].begin; index < indices[i].end; ++index)
        pages[i].push_back(range_.at(row, index).page);
    }
  }
  to.reserve(indices.size());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    for (Page* page : pages[i]) pool_->store().share(page);
    to.push_back(std::make_shared<PageSet>(pool_, indices[i], std::move(pages[i])));
  }
}

std::vector<std::shared_ptr<PageSet>> Buffer::offer(const Caller& caller,
                                                    std::span<const Interval> indices) {
  std::vector<std::shared_ptr<PageSet>> page_sets;
  PoolLock lock(pool_);
  pool_->reap();
  const std::unique_ptr<Busy> busy = quieten(lock, caller);
  if (!indices.empty()) {
    make_copy_on_write(range_, &lock,
                       range_.collect({indices.front().begin, indices.back().end}, is_writable));
  }
  add_page_sets(page_sets, indices);
  return page_sets;
}

std::vector<std::shared_ptr<PageSet>> Buffer::offer_writable(const Caller& caller,
                                                             std::span<const Interval> indices) {
  std::vector<std::shared_ptr<PageSet>> page_sets;
  if (indices.empty()) return page_sets;
  {
    const PoolLock lock(pool_);
    pool_->reap();
    require_whole(caller.operation);
    const Interval all{indices.front().begin, indices.back().end};
    if (range_.first_not(all, is_writable) == all.end) {
      require_no_capture(caller);
      work_.note(caller);
      const auto origin = std::make_shared<const PageSet::Origin>(
          std::static_pointer_cast<Buffer>(shared_from_this()), fences());
      add_page_sets(page_sets, indices);
      for (const auto& page_set : page_sets) page_set->origin = origin;
      return page_sets;
    }
  }
  return offer(caller, indices);
}

// Writable pages that something else keeps too.
std::vector<Reservation::Run> Buffer::offered_in(Interval indices) const {
  return range_.collect(
      indices, [](const Entry& entry) { return is_writable(entry) && entry.page->references > 1; });
}

void Buffer::protect(const Caller& caller, Interval indices) {
  PoolLock lock(pool_);
  pool_->reap();
  if (!owned_ || offered_in(indices).empty()) return;
  require_no_capture(caller);
  const Busy busy(*this, lock, caller);
  await_streams(lock, caller);
  make_copy_on_write(range_, &lock, offered_in(indices));
}

// Before their pages are mapped here: nothing writes to them any more.
void Buffer::protect_origins(const Caller& caller,
                             std::span<const std::shared_ptr<PageSet>> page_sets) {
  for (auto at = page_sets.begin(); at != page_sets.end();) {
    const auto first = at;
    const std::shared_ptr<const PageSet::Origin> origin = (*first)->origin;
    Interval indices = (*first)->indices();
    for (; at != page_sets.end() && (*at)->origin == origin; ++at)
      indices.end = (*at)->indices().end;
    if (origin == nullptr) continue;
    if (const std::shared_ptr<Buffer> buffer = origin->buffer.lock())
      buffer->protect(caller, indices);
    for (const FencePtr& fence : origin->after) {
      if (wait_for(driver_, fence, pool_->options().patience)) continue;
      throw TimedOut(caller.operation, pool_->options().patience,
                     "work launched on the device that writes to a shared prefix has not ended; "
                     "nothing was changed");
    }
    std::for_each(first, at, [](const auto& page_set) { page_set->origin.reset(); });
  }
}

void Buffer::expect(const Caller& caller, Interval positions,
                    std::span<const std::shared_ptr<PageSet>> page_sets) {
  if (page_sets.empty()) return;
  protect_origins(caller, page_sets);
  auto expected = std::make_unique<Expected>();
  expected->positions = positions;
  expected->indices = {page_sets.front()->indices().begin, page_sets.back()->indices().end};
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (const std::shared_ptr<PageSet>& page_set : page_sets) {
      const std::span<Page* const> pages = page_set->row(row);
      expected->pages.insert(expected->pages.end(), pages.begin(), pages.end());
    }
  }
  PoolLock lock(pool_);
  pool_->reap();
  if (range_.quarantined() != 0) {
    throw Error("[" + std::string(caller.operation) +
                "] places of it were lost in a driver call that could not be undone: close it");
  }
  pool_->await(lock, caller.operation, "the work that used the pages that were here",
               [&]() VT_LOCKED {
                 if (busy_) return false;
                 settle(&lock);
                 if (unmap_.refusal()) std::rethrow_exception(unmap_.refusal());
                 return range_.count_mapped(expected->indices) == 0;
               });
  range_.reserve(expected->indices.end);
  for (Page* page : expected->pages) {
    ++page->in_sets;
    pool_->store().share(page);
  }
  pool_->store().count_in_page_sets(static_cast<std::ptrdiff_t>(expected->pages.size()));
  expected_ = std::move(expected);
}

void Buffer::forget_expected() noexcept {
  if (expected_ == nullptr) return;
  pool_->store().count_in_page_sets(-static_cast<std::ptrdiff_t>(expected_->pages.size()));
  for (Page* page : expected_->pages) {
    --page->in_sets;
    pool_->store().drop(page);
  }
  expected_.reset();
}

// All of them, or none: so the owner has a whole prefix, or nothing that must be told from its own.
bool Buffer::find_expected(Reservation::Arrival& arrival) const {
  arrival.given = true;
  arrival.state = EntryState::copy_on_write;
  arrival.pages = expected_->pages;
  for (std::size_t row = 0; row < range_.rows(); ++row)
    arrival.runs.push_back({row, expected_->indices});
  return range_.count_quarantined(expected_->indices) == 0;
}

const Page* Buffer::shared_at(std::size_t row, std::size_t index) const {
  if (expected_ != nullptr && expected_->indices.contains(index)) {
    return expected_->pages[row * expected_->indices.size() + index - expected_->indices.begin];
  }
  const bool shared = index < range_.reserved() && is_copy_on_write(range_.at(row, index));
  return shared ? range_.at(row, index).page : nullptr;
}

void Buffer::enter_expected() {
  const Interval indices = expected_->indices;
  set_positions(expected_->positions);
  extent_ = indices;
  forget_expected();
  unmap_.remove(extent_);
  set_ready({});
  range_.event(trace::What::fork, indices);
}

void Buffer::accept_expected(const Caller& caller) {
  PoolLock lock(pool_);
  pool_->reap();
  await_turn(lock, caller);
  if (expected_ == nullptr) return;
  const Busy busy(*this, lock, caller);
  require_no_capture(caller);
  work_.note(caller);
  Reservation::Arrival arrival;
  if (!find_expected(arrival)) {
    throw Error("[" + std::string(caller.operation) +
                "] places of it were lost in a driver call that could not be undone: close it");
  }
  range_.map(lock, arrival, caller.stream, false);
  enter_expected();
}

void Buffer::accept(const Caller& caller, Interval positions,
                    std::span<const std::shared_ptr<PageSet>> page_sets) {
  expect(caller, positions, page_sets);
  try {
    accept_expected(caller);
  } catch (...) {
    const PoolLock lock(pool_);
    forget_expected();
    throw;
  }
}

std::size_t Buffer::shared_with(const Buffer& other) const {
  if (extent_.begin != other.extent_.begin) return 0;
  const std::size_t end = std::min(extent_.end, other.extent_.end);
  std::size_t index = extent_.begin;
  const auto same = [&](std::size_t at) VT_LOCKED {
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      if (range_.at(row, at).page != other.range_.at(row, at).page) return false;
    }
    return true;
  };
  while (index < end && same(index)) ++index;
  return index - std::min(index, extent_.begin);
}

std::size_t Buffer::writable_until(std::size_t position) const {
  std::size_t index = indices_of({position, position + 1}).begin;
  if (range_.quarantined() != 0) {
    // A step that needs more raises what was lost.
  } else if (range_.copy_on_write() == 0) {
    index = std::max(index, extent_.end);
  } else {
    index = range_.first_not({index, extent_.end}, is_writable);
  }
  const std::size_t end = index * range_.page_size();
  return end > shape_.phase ? (end - shape_.phase) / shape_.item_bytes : 0;
}

void Buffer::reindex(const Caller& caller, std::span<const Reindexing> all) {
  if (all.empty()) return;
  const std::shared_ptr<PagePool>& pool = all.front().buffer->pool_;
  PoolLock lock(pool);
  pool->reap();
  std::vector<std::unique_ptr<Busy>> busy;
  for (const auto& [buffer, rows] : all) busy.push_back(buffer->quieten(lock, caller));

  std::vector<PageChange> changes;
  for (const auto& [buffer, rows] : all) {
    Reservation& range = buffer->range_;
    const Interval extent = buffer->extent_;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto differs = [&range, row, from = rows[row]](std::size_t index) VT_LOCKED {
        return range.at(row, index).page != range.at(from, index).page;
      };
      for (std::size_t index = extent.begin; index < extent.end; ++index) {
        if (!differs(index)) continue;
        PageChange change{&range, row, index, {}};
        const EntryState state = range.at(row, index).state;
        while (index < extent.end && differs(index) && range.at(row, index).state == state)
          change.to.push_back(range.at(rows[row], index++).page);
        --index;
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
    make_copy_on_write(buffer->range_, nullptr, sources);
  }
  remap_pages(changes);
}

}  // namespace vtensor
