// What a buffer says of itself: page records, counts, and whether its tables agree.
#include <algorithm>
#include <string>

#include "base/errors.h"
#include "tensor/buffer.h"

namespace vtensor {

std::size_t Buffer::mapped_pages() {
  PoolLock lock(pool_);
  pool_->reap();
  return range_.mapped() + range_.quarantined();
}

std::vector<PageRecord> Buffer::pages() {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<PageRecord> records;
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    std::vector<Reservation::Run> runs;
    range_.collect(runs, row, {0, range_.row_pages()}, [](const Entry& entry) {
      return entry.page != nullptr && entry.state != EntryState::arriving;
    });
    for (const Reservation::Run& run : runs) {
      const EntryState state = range_.at(row, run.slots.begin).state;
      const std::vector<std::uint8_t> parted = state == EntryState::guarded
                                                   ? range_.find_parted(run)
                                                   : std::vector<std::uint8_t>(run.slots.size());
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
        const Page& page = *range_.at(row, slot).page;
        PageRecord record{row,
                          slot,
                          range_.address(row, slot),
                          static_cast<std::int64_t>(page.handle),
                          page.references,
                          page.references > 1 ? "shared" : "mapped"};
        if (state == EntryState::quarantined) {
          record.state = "quarantined";
        } else if (!extent_.contains(slot)) {
          record.state = parked_.contains(slot) || intersection(ahead(), adopted_).contains(slot)
                             ? "parked"
                         : ahead().contains(slot) ? "prefetched"
                                                  : "pinned";
        }
        if (parted[slot - run.slots.begin]) {
          record.page_id = -1;
          record.shared = 1;
          record.state = "private";
        }
        records.push_back(record);
      }
    }
  }
  return records;
}

void Buffer::add_to(PoolCounts& counts) const {
  const std::size_t needed = extent_.size() * range_.rows() - range_.count_quarantined(extent_);
  // What a place keeps from its last owner is parked until it is needed.
  const std::size_t kept = range_.count_mapped(intersection(ahead(), adopted_));
  const std::size_t ahead_of_need = range_.count_mapped(ahead()) - kept;
  const std::size_t parked = range_.count_mapped(parked_) + kept;
  const std::size_t held = range_.mapped() - needed - ahead_of_need - parked;
  counts.mapped += range_.mapped();
  counts.needed += needed;
  counts.ahead += ahead_of_need;
  counts.parked += parked;
  counts.held += held;
  if (!owned_) counts.orphaned += held;
  if (host_ != nullptr) return;
  if (owned_) ++counts.buffers;
  if (reserved_) counts.reserved_pages += range_.row_pages() * range_.rows();
}

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  for (const Interval slots : unmap_.slots()) {
    bool used = !intersection(slots, extent_).empty() || !intersection(slots, ready_).empty() ||
                !intersection(slots, parked_).empty();
    for (const Generation* generation : generations_)
      used |= !intersection(slots, generation->slots).empty();
    if (used) {
      throw Error("I3: slots " + std::to_string(slots.begin) + " to " + std::to_string(slots.end) +
                  " are in use and wait to be unmapped");
    }
  }
  std::vector<Interval> covered{extent_, ready_, parked_};
  for (const Generation* generation : generations_) covered.push_back(generation->slots);
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t slot = 0; slot < range_.reserved(); ++slot) {
      const EntryState state = range_.at(row, slot).state;
      const auto covers = [slot](Interval slots) { return slots.contains(slot); };
      if (state == EntryState::empty && std::any_of(covered.begin(), covered.end(), covers)) {
        throw Error("I3: slot " + std::to_string(slot) + " of row " + std::to_string(row) +
                    " is covered by an extent or a generation and is not mapped");
      }
      if (state == EntryState::arriving && !busy_) {
        throw Error("I8: slot " + std::to_string(slot) + " of row " + std::to_string(row) +
                    " waits for a page that no thread maps");
      }
    }
  }
  range_.check(uses, owned_ || !generations_.empty());
}

}  // namespace vtensor
