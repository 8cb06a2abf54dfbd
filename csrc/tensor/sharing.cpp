#include "tensor/sharing.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "policy/make_room.h"
#include "vmm/copy_on_write.h"
#include "vmm/wait.h"

namespace vtensor {
namespace {

Interval indices_of(std::span<const std::shared_ptr<PageSet>> page_sets) {
  return {page_sets.front()->indices().begin, page_sets.back()->indices().end};
}

// Row after row. Those of several page sets are gathered in `pages`.
std::span<Page* const> pages_of(std::span<const std::shared_ptr<PageSet>> page_sets,
                                std::size_t rows, std::vector<Page*>& pages) {
  if (page_sets.size() == 1) return page_sets.front()->all();
  for (std::size_t row = 0; row < rows; ++row) {
    for (const std::shared_ptr<PageSet>& page_set : page_sets) {
      const std::span<Page* const> some = page_set->row(row);
      pages.insert(pages.end(), some.begin(), some.end());
    }
  }
  return pages;
}

}  // namespace

template <typename Find>
std::vector<Reservation::Run> Sharing::have_ready(PoolLock& lock, Find find) const {
  std::vector<Reservation::Run> runs;
  do {
    buffer_.await_turn(lock, caller_);
    runs = find();
  } while (MakeRoom(pool_).ready(lock, caller_.operation, count_fresh_pages(range_, runs),
                                 count_private_copies(range_, runs)));
  return runs;
}

void Sharing::unshare(Interval positions) const {
  const Interval indices = buffer_.indices_of(positions);
  PoolLock lock(buffer_.pool());
  pool_.reap();
  if (range_.collect(indices, is_copy_on_write).empty()) return;
  buffer_.await_streams(lock, caller_);
  const std::vector<Reservation::Run> runs =
      have_ready(lock, [&]() VT_LOCKED { return range_.collect(indices, is_copy_on_write); });
  const std::size_t fresh = count_fresh_pages(range_, runs);
  const Buffer::Busy busy(buffer_, lock, caller_);
  buffer_.unshare(lock, caller_, runs);
  trace::event(trace::What::unshare, range_.address(runs.front()), fresh * range_.page_size(),
               range_.base());
}

std::unique_ptr<Buffer::Busy> Sharing::quieten(PoolLock& lock) const {
  buffer_.await_streams(lock, caller_);
  const std::vector<Reservation::Run> private_copies =
      have_ready(lock, [&]() VT_LOCKED { return private_copies_in(range_, buffer_.extent()); });
  auto busy = std::make_unique<Buffer::Busy>(buffer_, lock, caller_);
  buffer_.unshare(lock, caller_, private_copies);
  return busy;
}

std::shared_ptr<Buffer> Sharing::share(const RowShape& shape, std::span<const std::size_t> rows,
                                       bool exclusive) const {
  std::shared_ptr<Buffer> child = Buffer::make(buffer_.pool(), shape, caller_);
  PoolLock lock(buffer_.pool());
  pool_.reap();
  try {
    const std::unique_ptr<Buffer::Busy> busy = quieten(lock);
    const Interval extent = buffer_.extent();
    child->range().reserve({0, extent.size()});
    child->range().set_why({0, extent.size()}, Why::needed);
    const auto map = [&](auto wanted, EntryState state) VT_LOCKED {
      Reservation::Arrival arrival;
      arrival.state = state;
      std::vector<Page*> pages;
      std::vector<Reservation::Run> runs;
      for (std::size_t row = 0; row < rows.size(); ++row) {
        runs.clear();
        range_.collect(runs, rows[row], extent, wanted);
        for (const auto& [from, indices] : runs) {
          arrival.runs.push_back({row, {indices.begin - extent.begin, indices.end - extent.begin}});
          pages.resize(pages.size() + indices.size());
          Page** at = &pages[pages.size() - indices.size()];
          range_.each_page({from, indices}, [&at](Page* page) { *at++ = page; });
        }
      }
      arrival.given = pages;
      child->range().map(lock, arrival, caller_.stream, false);
    };
    if (exclusive) {
      map(is_writable, EntryState::writable);
      map(is_copy_on_write, EntryState::copy_on_write);
    } else {
      map(is_mapped, EntryState::copy_on_write);
      make_copy_on_write(range_, &lock, range_.collect(extent, is_writable));
    }
    const Interval positions{0, buffer_.positions().size()};
    child->assign(positions, child->indices_of(positions));
    range_.event(trace::What::fork, extent);
  } catch (...) {
    child->leave();
    if (!child->settle(&lock)) pool_.settle_later(child);
    throw;
  }
  return child;
}

void Sharing::add_page_sets(PageSets& to, std::span<const Interval> indices) const {
  to.reserve(indices.size());
  for (const Interval some : indices) {
    std::vector<Page*> pages;
    pages.reserve(some.size() * range_.rows());
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      for (std::size_t index = some.begin; index < some.end; ++index)
        pages.push_back(range_.at(row, index).page());
    }
    to.push_back(std::make_shared<PageSet>(buffer_.pool(), some, std::move(pages)));
  }
}

PageSets Sharing::offer(std::span<const Interval> indices) const {
  PageSets page_sets;
  PoolLock lock(buffer_.pool());
  pool_.reap();
  const std::unique_ptr<Buffer::Busy> busy = quieten(lock);
  if (!indices.empty()) {
    make_copy_on_write(range_, &lock,
                       range_.collect({indices.front().begin, indices.back().end}, is_writable));
  }
  add_page_sets(page_sets, indices);
  return page_sets;
}

PageSets Sharing::offer_writable(std::span<const Interval> indices) const {
  PageSets page_sets;
  if (indices.empty()) return page_sets;
  {
    const PoolLock lock(buffer_.pool());
    pool_.reap();
    const Interval all{indices.front().begin, indices.back().end};
    if (range_.first_not(all, is_writable) == all.end) {
      buffer_.require_no_capture(caller_);
      buffer_.note(caller_);
      const auto origin = std::make_shared<const PageSet::Origin>(
          std::static_pointer_cast<Buffer>(buffer_.shared_from_this()), buffer_.fences());
      add_page_sets(page_sets, indices);
      for (const auto& page_set : page_sets) page_set->origin = origin;
      return page_sets;
    }
  }
  return offer(indices);
}

std::vector<Reservation::Run> Sharing::offered_in(Interval indices) const {
  return range_.collect(
      indices, [](Entry entry) { return is_writable(entry) && entry.page()->references > 1; });
}

void Sharing::protect(Interval indices) const {
  PoolLock lock(buffer_.pool());
  pool_.reap();
  if (!buffer_.owned() || offered_in(indices).empty()) return;
  buffer_.await_streams(lock, caller_);
  const Buffer::Busy busy(buffer_, lock, caller_);
  make_copy_on_write(range_, &lock, offered_in(indices));
}

void Sharing::protect_origins(std::span<const std::shared_ptr<PageSet>> page_sets) const {
  for (auto at = page_sets.begin(); at != page_sets.end();) {
    const auto first = at;
    const std::shared_ptr<const PageSet::Origin> origin = (*first)->origin;
    Interval indices = (*first)->indices();
    for (; at != page_sets.end() && (*at)->origin == origin; ++at)
      indices.end = (*at)->indices().end;
    if (origin == nullptr) continue;
    if (const std::shared_ptr<Buffer> buffer = origin->buffer.lock())
      Sharing(*buffer, caller_).protect(indices);
    for (const FencePtr& fence : origin->after) {
      if (wait_for(pool_.driver(), fence, pool_.options().patience)) continue;
      throw TimedOut(caller_.operation, pool_.options().patience,
                     "work launched on the device that writes to a shared prefix has not ended; "
                     "nothing was changed");
    }
    std::for_each(first, at, [](const auto& page_set) { page_set->origin.reset(); });
  }
}

void Sharing::await_places(PoolLock& lock, Interval indices) const {
  pool_.await(lock, caller_.operation, "the work that used the pages that were here",
              [&]() VT_LOCKED {
                if (buffer_.busy()) return false;
                buffer_.settle(&lock);
                if (buffer_.refusal()) std::rethrow_exception(buffer_.refusal());
                return range_.count_mapped(indices) == 0;
              });
  range_.reserve(indices);
}

void Sharing::expect(Interval positions,
                     std::span<const std::shared_ptr<PageSet>> page_sets) const {
  if (page_sets.empty()) return;
  protect_origins(page_sets);
  const Interval indices = indices_of(page_sets);
  std::vector<Page*> gathered;
  const std::span<Page* const> pages = pages_of(page_sets, range_.rows(), gathered);
  PoolLock lock(buffer_.pool());
  pool_.reap();
  await_places(lock, indices);
  buffer_.expect(std::make_unique<const ExpectedPages>(pool_.store(), positions, indices,
                                                       std::vector(pages.begin(), pages.end())));
}

void Sharing::accept_expected() const {
  PoolLock lock(buffer_.pool());
  pool_.reap();
  buffer_.await_turn(lock, caller_);
  if (buffer_.expected() == nullptr) return;
  const Buffer::Busy busy(buffer_, lock, caller_);
  buffer_.require_no_capture(caller_);
  buffer_.note(caller_);
  Reservation::Arrival arrival = buffer_.find_expected();
  range_.map(lock, arrival, caller_.stream, false);
  buffer_.enter_expected();
}

void Sharing::accept(Interval positions,
                     std::span<const std::shared_ptr<PageSet>> page_sets) const {
  if (page_sets.empty()) return;
  protect_origins(page_sets);
  const Interval indices = indices_of(page_sets);
  std::vector<Page*> gathered;
  Reservation::Arrival arrival =
      range_.shared(indices, pages_of(page_sets, range_.rows(), gathered));
  PoolLock lock(buffer_.pool());
  pool_.reap();
  await_places(lock, indices);
  const Buffer::Busy busy(buffer_, lock, caller_);
  buffer_.require_no_capture(caller_);
  buffer_.note(caller_);
  range_.map(lock, arrival, caller_.stream, false);
  buffer_.assign(positions, indices);
  range_.event(trace::What::fork, indices);
}

void Sharing::reindex(const Caller& caller, std::span<const Reindexing> all) {
  if (all.empty()) return;
  const std::shared_ptr<PagePool>& pool = all.front().buffer->pool();
  PoolLock lock(pool);
  pool->reap();
  std::vector<std::unique_ptr<Buffer::Busy>> busy;
  for (const auto& [buffer, rows] : all) busy.push_back(Sharing(*buffer, caller).quieten(lock));

  std::vector<PageChange> changes;
  for (const auto& [buffer, rows] : all) {
    Reservation& range = buffer->range();
    const Interval extent = buffer->extent();
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
        buffer->range().collect(sources, row, buffer->extent(), is_writable);
    }
    make_copy_on_write(buffer->range(), nullptr, sources);
  }
  remap_pages(changes);
}

}  // namespace vtensor
