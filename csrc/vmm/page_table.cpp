#include "vmm/page_table.h"

#include <string>

#include "base/errors.h"

namespace vtensor {

void PageTable::reserve(Interval indices) {
  if (indices.empty()) return;
  entries_.reserve(place(0, indices.begin), place(0, indices.end));
  indices_.reserve(indices.begin, indices.end);
  reserved_ = std::max(reserved_, indices.end);
}

std::vector<Interval> PageTable::runs_of(Why why, std::size_t most) const {
  std::vector<Interval> runs;
  const Interval hull = hull_of(why);
  for (std::size_t i = hull.begin; i < hull.end && most != 0; ++i) {
    if (this->why(i) != why) continue;
    if (runs.empty() || runs.back().end != i) runs.push_back({i, i});
    ++runs.back().end;
    --most;
  }
  return runs;
}

void PageTable::count_moved(const Moved& moved) noexcept {
  if (moved.from == moved.to) return;
  const auto [begin, end] = moved.indices;
  Count& from = of(moved.from);
  from.indices -= end - begin;
  from.mapped -= moved.mapped;
  if (begin == from.hull.begin) from.hull.begin = end;
  if (end == from.hull.end) from.hull.end = begin;
  if (from.indices == 0) from.hull = {};
  Count& into = of(moved.to);
  into.indices += end - begin;
  into.mapped += moved.mapped;
  into.hull = hull(into.hull, moved.indices);
}

void PageTable::move(std::size_t i, Index& index, Why to) noexcept {
  if (index.mapped == 0 && to != Why::needed && to != Why::prefetched) to = Why::nothing;
  count_moved({index.why, to, {i, i + 1}, index.mapped});
  index.why = to;
}

void PageTable::add_mapped(Interval indices, std::size_t by) noexcept {
  // Atomic to be read without the lock; it changes under it, so no atomic add is needed.
  mapped_.store(mapped() + by * indices.size(), std::memory_order_relaxed);
  for (std::size_t i = indices.begin; i < indices.end;) {
    const std::span<Index> present = indices_.together(i);
    const std::span<Index> some = present.first(std::min(present.size(), indices.end - i));
    const Why why = some.front().why;
    std::size_t pages = 0, alike = 0, gone = 0;
    for (Index& index : some) {
      index.mapped += static_cast<std::uint32_t>(by);
      pages += index.mapped;
      alike += index.why == why;
      gone += index.mapped == 0;
    }
    const bool stays = why == Why::needed || why == Why::prefetched;
    if (alike == some.size() && (stays || gone == 0 || gone == some.size())) {
      const Why to = stays                 ? why
                     : gone != 0           ? Why::nothing
                     : why == Why::nothing ? Why::unneeded
                                           : why;
      of(why).mapped += by * some.size();
      count_moved({why, to, {i, i + some.size()}, pages});
      if (to != why) {
        for (Index& index : some) index.why = to;
      }
      i += some.size();
      continue;
    }
    for (Index& index : some) {
      of(index.why).mapped += by;
      // Nothing is known to need what came, or nothing is mapped any more.
      move(i, index, index.why == Why::nothing ? Why::unneeded : index.why);
      ++i;
    }
  }
}

std::size_t PageTable::count_mapped(Interval indices) const {
  std::size_t pages = 0;
  for (std::size_t i = indices.begin; i < indices.end; ++i) pages += indices_[i].mapped;
  return pages;
}

std::size_t PageTable::count_sole(Interval indices) const {
  std::size_t pages = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    walk(row, indices, false, [&pages](std::size_t, Entry entry) {
      pages += entry.page() != nullptr && entry.page()->references == 1;
      return true;
    });
  }
  return pages;
}

std::size_t PageTable::add_pages(std::unordered_set<const Page*>& seen) const {
  std::size_t shared = 0;
  for_each([&](Entry entry, std::size_t, std::size_t) {
    if (is_mapped(entry) && seen.insert(entry.page()).second)
      shared += entry.page()->references > 1;
  });
  return shared;
}

void PageTable::check_entries(std::unordered_map<const Page*, PageUse>& uses,
                              bool reachable) const {
  std::size_t mapped = 0, copy_on_write = 0, leaving = 0;
  std::array<std::size_t, kWhys> by_why{};
  for_each([&](Entry entry, std::size_t row, std::size_t index) VT_LOCKED {
    if ((entry.page() == nullptr) != (entry.state() == EntryState::empty)) {
      throw Error("I3: index ", index, " of row ", row,
                  " has a page and no mapping, or a mapping and no page");
    }
    if (entry.page() == nullptr) return;
    PageUse& use = uses[entry.page()];
    ++use.entries;
    if (reachable) {
      ++use.reachable;
      use.writable |= is_writable(entry);
    }
    mapped += counts_as_mapped(entry);
    by_why[static_cast<std::size_t>(why(index))] += counts_as_mapped(entry);
    copy_on_write += is_copy_on_write(entry);
    leaving += is_leaving(entry);
  });
  bool same = by_why[static_cast<std::size_t>(Why::nothing)] == 0;
  for (std::size_t i = 1; i < kWhys; ++i) same = same && by_why[i] == counts_[i].mapped;
  if (!same || mapped != this->mapped() || copy_on_write != copy_on_write_ || leaving != leaving_)
    throw Error("I4: the counts of mapped pages are wrong");
}

}  // namespace vtensor
