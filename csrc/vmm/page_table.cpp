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
  each_alike(indices_, hull_of(why), [&](std::size_t i, std::span<const Index> some) {
    if (some.front().why() != why) return true;
    if (runs.empty() || runs.back().end != i) runs.push_back({i, i});
    const std::size_t n = std::min(most, some.size());
    runs.back().end += n;
    most -= n;
    return most != 0;
  });
  return runs;
}

std::size_t PageTable::first_not_whole(Interval indices, Why why) const {
  std::size_t end = indices.begin;
  each_alike(indices_, indices, [&](std::size_t i, std::span<const Index> some) VT_LOCKED {
    if (i != end || some.front() != Index(rows_, why)) return false;
    end += some.size();
    return true;
  });
  return end;
}

void PageTable::replace(std::size_t i, std::span<Index> some, Index to) noexcept {
  const Index was = some.front();
  std::fill(some.begin(), some.end(), to);
  Count& from = of(was.why());
  Count& into = of(to.why());
  from.mapped -= some.size() * was.mapped();
  into.mapped += some.size() * to.mapped();
  if (was.why() == to.why()) return;
  const std::size_t end = i + some.size();
  from.indices -= some.size();
  if (i == from.hull.begin) from.hull.begin = end;
  if (end == from.hull.end) from.hull.end = i;
  if (from.indices == 0) from.hull = {};
  into.indices += some.size();
  into.hull = hull(into.hull, {i, end});
}

void PageTable::add_mapped(Interval indices, std::size_t by) noexcept {
  // The value is read without the lock, but changes only under it, so it needs no atomic add.
  mapped_.store(mapped() + by * indices.size(), std::memory_order_relaxed);
  change_indices(indices, [by](Index index) { return Index(index.mapped() + by, index.why()); });
}

std::size_t PageTable::count_mapped(Interval indices) const {
  std::size_t pages = 0;
  each_alike(indices_, indices, [&pages](std::size_t, std::span<const Index> some) {
    pages += some.size() * some.front().mapped();
    return true;
  });
  return pages;
}

std::size_t PageTable::count_sole(Interval indices) const {
  std::size_t pages = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    walk(row, indices, [&pages](std::size_t, Entry entry) {
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
