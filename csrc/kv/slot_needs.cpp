// Whether memory suffices, asked before anything is done: what slots need to have other lengths,
// and what could be had for them.
#include <algorithm>
#include <chrono>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/errors.h"
#include "kv/slot_cache.h"
#include "policy/make_room.h"

namespace vtensor {

bool SlotCache::fits(const Caller& caller, std::span<const std::int64_t> lengths,
                     std::span<const std::size_t> bands, bool waits) {
  const auto until = std::chrono::steady_clock::now() + pool_->options().patience;
  const auto changed = [this]() {
    PoolLock lock(pool_);
    return MakeRoom(*pool_).await_leaving(lock);
  };
  bool more = waits;  // may come
  while (!fits_now(caller, lengths, bands, false)) {
    if (!more) return false;
    more = changed() && std::chrono::steady_clock::now() < until;
  }
  return true;
}

bool SlotCache::fits_now(const Caller& caller, std::span<const std::int64_t> lengths,
                         std::span<const std::size_t> bands, bool alone) {
  require_bands(caller, bands);
  // A step's lengths, once the swapped slots among them are back.
  std::vector<std::int64_t> here(lengths.begin(), lengths.end());
  for (std::size_t slot = 0; slot < std::min(here.size(), slots_.size()); ++slot) {
    if (states_[slot] != SlotState::swapped || here[slot] == 0) continue;
    if (here[slot] < static_cast<std::int64_t>(slots_[slot].swapped->length) ||
        here[slot] > static_cast<std::int64_t>(shape_.max_length)) {
      throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                            " has " + std::to_string(slots_[slot].swapped->length) +
                            " tokens in host memory, max_len is " +
                            std::to_string(shape_.max_length) + ", and it is to have " +
                            std::to_string(here[slot]) + ": give 0, or a length in between");
    }
    here[slot] = 0;
  }
  if (bands.empty() || here.size() != slots_.size()) require_lengths(caller, here);
  for (const std::size_t band : bands) {
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      if (here[slot] != 0) static_cast<void>(is_to_grow(caller, slot, band, here[slot]));
    }
  }
  settle_copies();
  {
    PoolLock lock(pool_);
    pool_->reap();
    const std::size_t pages = need_of(lengths, bands).pages;
    if (!alone && pages <= pool_->store().unused())
      return pool_->store().shortage(pages).missing == 0;
    static_cast<void>(pool_->settle_all(lock));
  }
  const PoolCounts counts = pool_->counts();
  const std::size_t evictable = prefixes_.evictable() + (alone ? 0 : pool_->spared_elsewhere());
  const PoolLock lock(pool_);
  const Need need = need_of(lengths, bands);
  const PageStore& store = pool_->store();
  const std::size_t own = store.budget() - std::min(store.budget(), store.in_use());
  const std::size_t unused = alone ? own : store.unused(), others = reclaimable(counts);
  return need.pages + std::min(need.ready, others) <= unused + others + evictable &&
         store.shortage(std::min(need.pages, unused)).missing == 0;
}

bool SlotCache::prepare(const Caller& caller, std::span<const std::int64_t> lengths) {
  require_due(caller, lengths);
  if (due_.empty()) return true;
  {
    const PoolLock lock(pool_);
    pool_->reap();
    if (is_prepared(lengths)) return true;
  }
  if (!pool_->looks_ahead() || !make_room_ahead(lengths)) return false;
  const PoolLock lock(pool_);
  std::vector<std::int64_t> further(lengths.begin(), lengths.end());
  for (const std::size_t slot : due_) {
    further[slot] = std::min(lengths[slot] + static_cast<std::int64_t>(shape_.lookahead),
                             static_cast<std::int64_t>(shape_.max_length));
  }
  const bool has_more = need_of(further, {}).pages <= pool_->store().unused();
  announce(has_more ? further : lengths);
  return false;
}

// Whether a step makes no driver call for what is due.
bool SlotCache::is_prepared(std::span<const std::int64_t> lengths) const {
  return std::all_of(due_.begin(), due_.end(), [&](std::size_t slot) VT_LOCKED {
    const auto length = static_cast<std::size_t>(lengths[slot]);
    for (const std::size_t group : all_groups_) {
      const Buffer& buffer = *slots_[slot].buffers[group];
      if (!buffer.is_ready(needed(group, slot, length))) return false;
      if (!buffer.shares()) continue;
      const Interval written{static_cast<std::size_t>(length_here(slot, group)), length};
      const Interval own = intersection(buffer.indices_of(written), buffer.extent());
      if (!buffer.range().collect(own, is_copy_on_write).empty()) return false;
    }
    return true;
  });
}

// Has what a step would give up given up, as far as pages are missing; false, and nothing is given
// up, where there is too little of it. Other pools of a shared budget are not asked.
bool SlotCache::make_room_ahead(std::span<const std::int64_t> lengths) {
  std::size_t pages = 0, missing = 0;
  {
    const PoolLock lock(pool_);
    PageStore& store = pool_->store();
    pages = need_of(lengths, {}).pages;
    if (store.shortage(std::min(pages, store.unused())).missing != 0) return false;
    if (pages <= store.unused()) return true;
    pages += leaving_where_due(lengths);
    missing = MakeRoom(*pool_).missing(pages);
  }
  if (missing != 0) {
    if (prefixes_.evictable() < missing) return false;
    prefixes_.evict(missing);
  }
  const PoolLock lock(pool_);
  return MakeRoom(*pool_).begin(pages) == 0;
}

// Pages on their way out that the slots take back, and nobody else gets.
std::size_t SlotCache::leaving_where_due(std::span<const std::int64_t> lengths) const {
  std::size_t pages = 0;
  for (const std::size_t slot : due_) {
    for (const std::size_t group : all_groups_) {
      const Buffer& buffer = *slots_[slot].buffers[group];
      if (buffer.shares()) continue;
      const auto length = static_cast<std::size_t>(lengths[slot]);
      pages += buffer.pages_leaving(buffer.indices_of(needed(group, slot, length)));
    }
  }
  return pages;
}

// Slots whose bands differ are left out, as they are of look-ahead.
void SlotCache::announce(std::span<const std::int64_t> lengths) {
  for (const std::size_t slot : due_) {
    if (!slots_[slot].bands.empty()) continue;
    for (const std::size_t group : all_groups_) {
      const auto length = static_cast<std::size_t>(lengths[slot]);
      slots_[slot].buffers[group]->announce(needed(group, slot, length).end);
    }
  }
}

bool SlotCache::waits_for_others(const Caller& caller, std::span<const std::int64_t> lengths) {
  const SharedBudget* const shared = pool_->store().shared();
  return shared != nullptr && shared->held_elsewhere() != 0 && fits_now(caller, lengths, {}, true);
}

SlotCache::Need SlotCache::need_of(std::span<const std::int64_t> lengths,
                                   std::span<const std::size_t> bands) const {
  Need need;
  std::vector<std::size_t> groups;
  for (const std::size_t band : bands)
    groups.insert(groups.end(), groups_of_[band].begin(), groups_of_[band].end());
  if (bands.empty()) groups = all_groups_;
  std::unordered_map<const Page*, std::uint32_t> unsharing;
  std::unordered_set<const SwapGroup*> swapped;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const Slot& it = slots_[slot];
    // Of named bands, those that are away are to come back.
    if (lengths[slot] == 0) continue;
    if (lengths[slot] <= room_[slot] && (it.bands.empty() || bands.empty())) continue;
    const SwapGroup* const shared = it.swapped == nullptr ? nullptr : it.swapped->group.get();
    const bool has_head =
        shared != nullptr && (!shared->pages.empty() || !swapped.insert(shared).second);
    // A whole slot comes back whole, a band with all it has.
    for (const std::size_t group : it.swapped == nullptr ? groups : all_groups_) {
      const std::size_t band = row_groups_[group].shape.band;
      const std::size_t back = is_band_away(slot, band) ? band_length(slot, band) : 0;
      const Interval written{static_cast<std::size_t>(length_here(slot, group)),
                             std::max(static_cast<std::size_t>(lengths[slot]), back)};
      if (written.empty()) continue;
      const Buffer& buffer = *it.buffers[group];
      const Reservation& range = buffer.range();
      Interval pages = buffer.indices_of(needed(group, slot, written.end));
      if (buffer.owned_until() != 0) pages.begin = buffer.owned_until();
      if (has_head)
        pages.begin = std::max(pages.begin, page_of(row_groups_[group], shared->length));
      if (!pages.empty()) {
        const std::size_t taken = range.count_taken(pages);
        need.ready += taken;
        need.pages += pages.size() * range.rows() - taken;
      }
      if (range.copy_on_write() == 0 && !it.expects) continue;
      // As a growth counts them: of those that unshare a page, the last keeps it.
      const Interval own = intersection(buffer.indices_of(written), {0, buffer.owned_until()});
      for (std::size_t row = 0; row < range.rows(); ++row) {
        for (std::size_t index = own.begin; index < own.end; ++index) {
          const Page* const page = buffer.shared_at(row, index);
          if (page != nullptr) need.pages += ++unsharing[page] < page->references;
        }
      }
    }
  }
  return need;
}

// Pages that a growth takes back from what nothing needs; of those that wait for work to end only
// the slots' own, which nothing shares.
std::size_t SlotCache::reclaimable(const PoolCounts& counts) {
  std::size_t pages = counts.prefetched + counts.cached;
  for (const Slot& slot : slots_) {
    for (const std::shared_ptr<Buffer>& buffer : slot.buffers) {
      if (buffer && !buffer->shares()) pages += buffer->pages_leaving();
    }
  }
  return pages;
}

}  // namespace vtensor
