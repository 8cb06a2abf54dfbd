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

const char* Buffer::why_mapped(std::size_t index) const {
  if (extent_.contains(index)) return nullptr;
  if (cached_.contains(index) || intersection(ahead(), reused_).contains(index)) return "cached";
  return ahead().contains(index) ? "prefetched" : "pinned";
}

void Buffer::add_to(PoolCounts& counts) const {
  const std::size_t needed = extent_.size() * range_.rows() - range_.count_quarantined(extent_);
  // What a place keeps from its last owner is cached until it is needed.
  const std::size_t kept = range_.count_mapped(intersection(ahead(), reused_));
  const std::size_t ahead_of_need = range_.count_mapped(ahead()) - kept;
  const std::size_t cached = range_.count_mapped(cached_) + kept;
  const std::size_t held = range_.mapped() - needed - ahead_of_need - cached;
  counts.mapped += range_.mapped();
  counts.active += needed;
  counts.prefetched += ahead_of_need;
  counts.cached += cached;
  counts.pinned += held;
  if (!owned_) counts.orphaned += held;
  if (host_ != nullptr) return;
  if (owned_) ++counts.buffers;
  if (reserved_) counts.reserved_pages += range_.row_pages() * range_.rows();
}

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  for (const Interval indices : unmap_.indices()) {
    bool used = !intersection(indices, extent_).empty() || !intersection(indices, ready_).empty() ||
                !intersection(indices, cached_).empty();
    for (const Generation* generation : generations_)
      used |= !intersection(indices, generation->indices).empty();
    if (used) {
      throw Error("I3: indices " + std::to_string(indices.begin) + " to " +
                  std::to_string(indices.end) + " are in use and wait to be unmapped");
    }
  }
  std::vector<Interval> covered{extent_, ready_, cached_};
  for (const Generation* generation : generations_) covered.push_back(generation->indices);
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t index = 0; index < range_.reserved(); ++index) {
      const EntryState state = range_.at(row, index).state;
      const auto covers = [index](Interval indices) { return indices.contains(index); };
      if (state == EntryState::empty && std::any_of(covered.begin(), covered.end(), covers)) {
        throw Error("I3: index " + std::to_string(index) + " of row " + std::to_string(row) +
                    " is covered by an extent or a generation and is not mapped");
      }
      if (state == EntryState::arriving && !busy_) {
        throw Error("I8: index " + std::to_string(index) + " of row " + std::to_string(row) +
                    " waits for a page that no thread maps");
      }
    }
  }
  range_.check(uses, owned_ || !generations_.empty());
}

}  // namespace vtensor
