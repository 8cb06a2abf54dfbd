// What a buffer says of itself: page records, counts, and whether its tables agree.
#include <algorithm>
#include <string>

#include "base/errors.h"
#include "core/buffer.h"

namespace vtensor {

std::size_t Buffer::mapped_pages() {
  PoolLock lock(pool_);
  pool_->reap();
  return mapped_ + quarantined_;
}

std::vector<PageRecord> Buffer::pages() {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<PageRecord> records;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    std::vector<Run> runs;
    collect(runs, row, {0, row_pages_}, [](const Entry& entry) {
      return entry.page != nullptr && entry.state != EntryState::arriving;
    });
    for (const Run& run : runs) {
      const EntryState state = table_.at(row, run.slots.begin).state;
      const std::vector<std::uint8_t> parted = state == EntryState::guarded
                                                   ? find_parted(run)
                                                   : std::vector<std::uint8_t>(run.slots.size());
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
        const Page& page = *table_.at(row, slot).page;
        PageRecord record{row,
                          slot,
                          slot_address(row, slot),
                          static_cast<std::int64_t>(page.handle),
                          page.references,
                          page.references > 1 ? "shared" : "mapped"};
        if (state == EntryState::quarantined) {
          record.state = "quarantined";
        } else if (!extent_.contains(slot)) {
          record.state = parked_.contains(slot) || intersection(ahead(), adopted_).contains(slot)
                             ? "parked"
                         : ahead().contains(slot) ? "ahead"
                                                  : "held";
        }
        if (parted[slot - run.slots.begin]) {
          record.page_id = -1;
          record.shared = 1;
          record.state = "parted";
        }
        records.push_back(record);
      }
    }
  }
  return records;
}

std::size_t Buffer::count_mapped(Interval slots) const {
  std::size_t mapped = 0;
  const std::size_t end = std::min(slots.end, table_.reserved());
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = slots.begin; slot < end; ++slot)
      mapped += is_mapped(table_.at(row, slot));
  }
  return mapped;
}

void Buffer::add_to(PoolCounts& counts) const {
  const std::size_t needed = extent_.size() * shape_.rows - lost_pages();
  // What a place keeps from its last owner is parked until it is needed.
  const std::size_t kept = count_mapped(intersection(ahead(), adopted_));
  const std::size_t ahead_of_need = count_mapped(ahead()) - kept;
  const std::size_t parked = count_mapped(parked_) + kept;
  const std::size_t held = mapped_ - needed - ahead_of_need - parked;
  counts.mapped += mapped_;
  counts.needed += needed;
  counts.ahead += ahead_of_need;
  counts.parked += parked;
  counts.held += held;
  if (!owned_) counts.orphaned += held;
  if (host_ != nullptr) return;
  if (owned_) ++counts.buffers;
  if (reserved_) counts.reserved_pages += row_pages_ * shape_.rows;
}

std::size_t Buffer::add_pages(std::unordered_set<const Page*>& seen) const {
  std::size_t shared = 0;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
      const Entry& entry = table_.at(row, slot);
      if (is_mapped(entry) && seen.insert(entry.page).second) shared += entry.page->references > 1;
    }
  }
  return shared;
}

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  const bool reachable = owned_ || !generations_.empty();
  for (const Interval slots : retiring_) {
    bool used = !intersection(slots, extent_).empty() || !intersection(slots, ready_).empty() ||
                !intersection(slots, parked_).empty();
    for (const Generation* generation : generations_)
      used |= !intersection(slots, generation->slots).empty();
    if (used) {
      throw Error("I3: slots " + std::to_string(slots.begin) + " to " + std::to_string(slots.end) +
                  " are in use and wait to be unmapped");
    }
  }
  std::size_t mapped = 0, guarded = 0;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
      const Entry& entry = table_.at(row, slot);
      if (entry.state == EntryState::empty) {
        bool covered = extent_.contains(slot) || ready_.contains(slot) || parked_.contains(slot);
        for (const Generation* generation : generations_)
          covered |= generation->slots.contains(slot);
        if (covered || entry.page) {
          throw Error("I3: slot " + std::to_string(slot) + " of row " + std::to_string(row) +
                      " is covered by an extent or a generation and is not mapped");
        }
        continue;
      }
      PageUse& use = uses[entry.page];
      ++use.entries;
      if (entry.state == EntryState::arriving && !busy_) {
        throw Error("I8: slot " + std::to_string(slot) + " of row " + std::to_string(row) +
                    " waits for a page that nobody maps");
      }
      if (reachable) {
        ++use.reachable;
        use.writable |= is_writable(entry);
      }
      mapped += entry.mapped();
      guarded += is_guarded(entry);
    }
  }
  if (mapped != mapped_ || guarded != guarded_)
    throw Error("I4: the counts of mapped pages are wrong");
}

}  // namespace vtensor
