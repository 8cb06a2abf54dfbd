// Which page stands behind which page of a buffer, row by row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/interval.h"
#include "vmm/page.h"

namespace vtensor {

enum class EntryState : std::uint8_t {
  empty,
  writable,
  copy_on_write,  // shared, or once shared: writes do not reach the page
  arriving,       // being mapped, without the lock
  quarantined,    // what is mapped here is not known: never used, never unmapped
};

struct Entry {
  Page* page = nullptr;
  EntryState state = EntryState::empty;

  bool mapped() const {
    return state == EntryState::writable || state == EntryState::copy_on_write;
  }
  Access access() const {
    return state == EntryState::copy_on_write ? Access::copy_on_write : Access::writable;
  }
};

inline bool is_mapped(const Entry& entry) { return entry.mapped(); }
inline bool is_unmapped(const Entry& entry) { return !entry.mapped(); }
inline bool is_writable(const Entry& entry) { return entry.state == EntryState::writable; }
inline bool is_copy_on_write(const Entry& entry) {
  return entry.state == EntryState::copy_on_write;
}

class PageTable {
 public:
  explicit PageTable(std::size_t rows) : rows_(rows) {}

  // Pages of every row below which there are entries.
  std::size_t reserved() const { return stride_; }
  // Makes entries for the pages below `indices`, and some more. Throws std::bad_alloc; nothing is
  // changed then.
  void reserve(std::size_t indices) {
    if (indices <= stride_) return;
    const std::size_t stride = std::max(indices, 2 * stride_);
    std::vector<Entry> entries(rows_ * stride);
    for (std::size_t row = 0; row < rows_; ++row) {
      std::copy_n(entries_.begin() + static_cast<std::ptrdiff_t>(row * stride_), stride_,
                  entries.begin() + static_cast<std::ptrdiff_t>(row * stride));
    }
    entries_.swap(entries);
    stride_ = stride;
  }

  // Requires: reserved.
  const Entry& at(std::size_t row, std::size_t index) const {
    return entries_[row * stride_ + index];
  }
  Entry& at(std::size_t row, std::size_t index) { return entries_[row * stride_ + index]; }
  Entry* entries(std::size_t row, std::size_t index) {
    return entries_.data() + row * stride_ + index;
  }

 private:
  const std::size_t rows_;
  std::size_t stride_ = 0;
  std::vector<Entry> entries_;  // row after row
};

}  // namespace vtensor
