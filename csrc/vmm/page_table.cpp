#include "vmm/page_table.h"

#include <string>

#include "base/errors.h"

namespace vtensor {

void PageTable::reserve(Interval indices) {
  if (indices.empty()) return;
  entries_.reserve(place(0, indices.begin), place(0, indices.end));
  reserved_ = std::max(reserved_, indices.end);
}

template <typename Counted>
std::size_t PageTable::count(Interval indices, Counted counted) const {
  std::size_t pages = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    walk(row, indices, false, [&](std::size_t, Entry entry) {
      pages += counted(entry);
      return true;
    });
  }
  return pages;
}

std::size_t PageTable::count_mapped(Interval indices) const {
  return mapped() == 0 ? 0 : count(indices, counts_as_mapped);
}

std::size_t PageTable::count_sole(Interval indices) const {
  return count(indices, [](Entry entry) {
    return entry.page() != nullptr && entry.page()->references == 1;
  });
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
  for_each([&](Entry entry, std::size_t row, std::size_t index) {
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
    copy_on_write += is_copy_on_write(entry);
    leaving += is_leaving(entry);
  });
  if (mapped != this->mapped() || copy_on_write != copy_on_write_ || leaving != leaving_)
    throw Error("I4: the counts of mapped pages are wrong");
}

}  // namespace vtensor
