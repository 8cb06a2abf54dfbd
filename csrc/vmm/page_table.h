// Which page stands behind which slot of a buffer, row by row.
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
  guarded,      // shared, or once shared: writes do not reach the page
  arriving,     // being mapped, without the lock
  quarantined,  // what is mapped here is not known: never used, never unmapped
};

struct Entry {
  Page* page = nullptr;
  EntryState state = EntryState::empty;

  bool mapped() const { return state == EntryState::writable || state == EntryState::guarded; }
  Access access() const {
    return state == EntryState::guarded ? Access::guarded : Access::writable;
  }
};

inline bool is_mapped(const Entry& entry) { return entry.mapped(); }
inline bool is_unmapped(const Entry& entry) { return !entry.mapped(); }
inline bool is_writable(const Entry& entry) { return entry.state == EntryState::writable; }
inline bool is_guarded(const Entry& entry) { return entry.state == EntryState::guarded; }

class PageTable {
 public:
  explicit PageTable(std::size_t rows) : rows_(rows) {}

  // Slots of every row below which there are entries.
  std::size_t reserved() const { return stride_; }
  // Makes entries for the slots below `slots`, and some more. Throws std::bad_alloc; nothing is
  // changed then.
  void reserve(std::size_t slots) {
    if (slots <= stride_) return;
    const std::size_t stride = std::max(slots, 2 * stride_);
    std::vector<Entry> entries(rows_ * stride);
    for (std::size_t row = 0; row < rows_; ++row) {
      std::copy_n(entries_.begin() + static_cast<std::ptrdiff_t>(row * stride_), stride_,
                  entries.begin() + static_cast<std::ptrdiff_t>(row * stride));
    }
    entries_.swap(entries);
    stride_ = stride;
  }

  // Requires: reserved.
  const Entry& at(std::size_t row, std::size_t slot) const {
    return entries_[row * stride_ + slot];
  }
  Entry& at(std::size_t row, std::size_t slot) { return entries_[row * stride_ + slot]; }
  Entry* entries(std::size_t row, std::size_t slot) {
    return entries_.data() + row * stride_ + slot;
  }

 private:
  const std::size_t rows_;
  std::size_t stride_ = 0;
  std::vector<Entry> entries_;  // row after row
};

}  // namespace vtensor
