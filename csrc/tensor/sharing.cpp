// Buffer: sharing pages with other buffers, and unsharing them again.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "policy/make_room.h"
#include "tensor/buffer.h"
#include "vmm/copy_on_write.h"
#include "vmm/pending_work.h"

namespace vtensor {

void Buffer::unshare_runs(PoolLock& lock, const Caller& caller,
                          std::span<const Reservation::Run> runs, Interval stale) {
  try {
    unshare_pages(range_, lock, runs, bytes_of(stale), caller.stream);
  } catch (const TimedOut&) {
    // Pages that the copies read stay mapped until the side stream has passed.
    work_.note(driver_.side_stream());
    throw;
  }
  if (runs.empty()) return;
  trace::event(trace::What::unshare, range_.address(runs.front()),
               Reservation::pages_of(runs) * range_.page_size(), range_.base());
}

void Buffer::await_streams(PoolLock& lock, const Caller& caller) {
  require_no_capture(caller);
  const Busy busy(*this, lock, caller);
  work_.note(caller);
  std::vector<FencePtr> all = fences();
  pool_->await(lock, caller.operation,
               "work launched on the device that uses this tensor (nothing was changed)",
               [&] { return all_passed(driver_, all); });
}

// Prepares the buffer for sharing or reindexing its pages: waits for the work that may write to
// them, gives private copies handles so that they can be shared (I6), and marks the buffer busy.
std::unique_ptr<Buffer::Busy> Buffer::quieten(PoolLock& lock, const Caller& caller) {
  await_streams(lock, caller);
  std::vector<Reservation::Run> private_copies;
  do {
    await_turn(lock, caller);
    private_copies = private_copies_in(range_, extent_);
  } while (MakeRoom(*pool_).ready(lock, caller.operation, count_fresh_pages(range_, private_copies),
                                  count_private_copies(range_, private_copies)));
  auto busy = std::make_unique<Busy>(*this, lock, caller);
  unshare_runs(lock, caller, private_copies);
  return busy;
}

std::shared_ptr<Buffer> Buffer::share_rows(const Caller& caller, const RowShape& shape,
                                           std::span<const std::size_t> rows, bool moves) {
  std::shared_ptr<Buffer> child = make(pool_, shape, caller);
  PoolLock lock(pool_);
  try {
    const std::unique_ptr<Busy> busy = quieten(lock, caller);
    if (moves) child->work_.note_streams_of(work_);
    child->range_.reserve({0, extent_.size()});
    const Interval positions{0, positions_.size()};
    child->assign(positions, child->indices_of(positions));
    const auto map = [&](auto wanted, EntryState state) VT_LOCKED {
      Reservation::Arrival arrival;
      arrival.state = state;
      std::vector<Page*> pages;
      std::vector<Reservation::Run> runs;
      for (std::size_t row = 0; row < rows.size(); ++row) {
        runs.clear();
        range_.collect(runs, rows[row], extent_, wanted);
        for (const auto& [from, indices] : runs) {
          arrival.runs.push_back(
              {row, {indices.begin - extent_.begin, indices.end - extent_.begin}});
          pages.resize(pages.size() + indices.size());
          Page** at = &pages[pages.size() - indices.size()];
          range_.each_page({from, indices}, [&at](Page* page) { *at++ = page; });
        }
      }
      arrival.given = pages;
      child->range_.map(lock, arrival, caller.stream, false);
    };
    if (moves && generations_.empty() &&
        std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end()) {
      map(is_writable, EntryState::writable);
      map(is_copy_on_write, EntryState::copy_on_write);
    } else {
      map(is_mapped, EntryState::copy_on_write);
      if (range_.writable() != 0)
        make_copy_on_write(range_, &lock, range_.collect(extent_, is_writable));
    }
    range_.event(trace::What::fork, extent_);
  } catch (...) {
    child->leave();
    if (!child->finish_unmapping(&lock)) pool_->unmap_later(child);
    throw;
  }
  return child;
}

PageSets Buffer::offer(const Caller& caller, std::span<const Interval> indices, bool writable) {
  PageSets page_sets;  // before the lock, which the end of one takes
  page_sets.reserve(indices.size());
  const Interval all{indices.front().begin, indices.back().end};
  PoolLock lock(pool_);
  std::shared_ptr<const PageSet::Origin> origin;
  std::unique_ptr<Busy> busy;
  if (writable && range_.first_not(all, is_writable) == all.end) {
    require_no_capture(caller);
    work_.note(caller);
    origin = std::make_shared<const PageSet::Origin>(
        std::static_pointer_cast<Buffer>(shared_from_this()), fences());
  } else {
    busy = quieten(lock, caller);
    make_copy_on_write(range_, &lock, range_.collect(all, is_writable));
  }
  for (const Interval some : indices) {
    std::vector<Page*> pages;
    pages.reserve(some.size() * range_.rows());
    for (std::size_t row = 0; row < range_.rows(); ++row)
      range_.each_page({row, some}, [&pages](Page* page) { pages.push_back(page); });
    page_sets.push_back(PageSet::make(pool_, some, std::move(pages)));
    page_sets.back()->origin = origin;
  }
  return page_sets;
}

// Writable pages with more than one reference: those that were offered.
std::vector<Reservation::Run> Buffer::offered_in(Interval indices) const {
  return range_.collect(
      indices, [](Entry entry) { return is_writable(entry) && entry.page()->references > 1; });
}

void Buffer::protect(const Caller& caller, Interval indices) {
  PoolLock lock(pool_);
  if (!owned_ || offered_in(indices).empty()) return;
  await_streams(lock, caller);
  const Busy busy(*this, lock, caller);
  make_copy_on_write(range_, &lock, offered_in(indices));
}

// Makes the pages copy-on-write in the buffers that they come from, and waits for work that writes
// to them.
void Buffer::protect_origins(const Caller& caller, PageSetSpan page_sets) const {
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

void Buffer::accept(const Caller& caller, Interval positions, PageSetSpan page_sets,
                    bool deferred) {
  protect_origins(caller, page_sets);
  const Interval indices{page_sets.front()->indices().begin, page_sets.back()->indices().end};
  std::span<Page* const> pages = page_sets.front()->all();
  std::vector<Page*> of_several;
  if (page_sets.size() != 1) {
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      for (const std::shared_ptr<PageSet>& page_set : page_sets) {
        const std::span<Page* const> some = page_set->row(row);
        of_several.insert(of_several.end(), some.begin(), some.end());
      }
    }
    pages = of_several;
  }
  PoolLock lock(pool_);
  pool_->await(lock, caller.operation, "the work that used the pages that were here",
               [&]() VT_LOCKED {
                 if (busy()) return false;
                 finish_unmapping(&lock);
                 if (refusal()) std::rethrow_exception(refusal());
                 return range_.count_mapped(indices) == 0;
               });
  range_.reserve(indices);
  if (deferred) {
    deferred_ = std::make_unique<const PageSet>(pool_, indices,
                                                std::vector<Page*>(pages.begin(), pages.end()));
    return set_positions(positions);
  }
  // The page sets keep the pages meanwhile: references for a set of its own would double the cost.
  const Busy busy(*this, lock, caller);
  map_shared(lock, caller, indices, pages);
  assign(positions, indices);
  range_.event(trace::What::fork, extent_);
}

void Buffer::accept_deferred(const Caller& caller) {
  PoolLock lock(pool_);
  const Busy busy(*this, lock, caller);
  if (deferred_ == nullptr) return;  // the mapper has mapped them
  map_shared(lock, caller, deferred_->indices(), deferred_->all());
  enter_deferred();
}

void Buffer::map_shared(PoolLock& lock, const Caller& caller, Interval indices,
                        std::span<Page* const> pages) {
  require_no_capture(caller);
  work_.note(caller);
  Reservation::Arrival arrival = range_.shared(indices, pages);
  range_.map(lock, arrival, caller.stream, false);
}

void Buffer::enter_deferred() {
  set_extent(deferred_->indices());
  deferred_.reset();
  range_.event(trace::What::fork, extent_);
}

void Buffer::reindex(const Caller& caller, std::span<const Reindexing> all) {
  const std::shared_ptr<PagePool>& pool = all.front().first->pool_;
  PoolLock lock(pool);
  // Before any stays busy: what one has ahead may have to go for another.
  for (const auto& [buffer, rows] : all) buffer->quieten(lock, caller);
  std::vector<std::unique_ptr<Busy>> busy;
  for (const auto& [buffer, rows] : all)
    busy.push_back(std::make_unique<Busy>(*buffer, lock, caller));
  std::vector<PageChange> changes;
  for (const auto& [buffer, rows] : all) {
    Reservation& range = buffer->range_;
    const Interval extent = buffer->extent_;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto differs = [&range, row, from = rows[row]](std::size_t index) VT_LOCKED {
        return range.at(row, index).page() != range.at(from, index).page();
      };
      for (std::size_t index = extent.begin; index < extent.end; ++index) {
        if (!differs(index)) continue;
        PageChange change{&range, row, index, {}};
        const EntryState state = range.at(row, index).state();
        while (index < extent.end && differs(index) && range.at(row, index).state() == state)
          change.to.push_back(range.at(rows[row], index++).page());
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
