// Which page stands behind which slot of a buffer, row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/interval.h"
#include "core/page.h"

namespace vtensor {

enum class EntryState : std::uint8_t {
  empty,
  writable,
  guarded,      // shared, or once shared: writes do not reach the page
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

  std::size_t rows() const { return rows_.size(); }
  const Entry& at(std::size_t row, std::size_t slot) const { return rows_[row][slot]; }
  // Requires: reserved.
  Entry& at(std::size_t row, std::size_t slot) { return rows_[row][slot]; }
  Entry* entries(std::size_t row, std::size_t slot) { return rows_[row].data() + slot; }
  // Slots of `row` below which entries are reserved.
  std::size_t reserved(std::size_t row) const { return rows_[row].size(); }
  // Makes entries for the slots below `slots` of every row. Throws std::bad_alloc.
  void reserve(std::size_t slots) {
    for (auto& row : rows_) {
      if (row.size() < slots) row.resize(slots);
    }
  }

 private:
  std::vector<std::vector<Entry>> rows_;
};

}  // namespace vtensor
