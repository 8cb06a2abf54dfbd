// Which free slot a new request gets: one whose cached pages fit, or one with nothing mapped where
// shared pages are to go.
#include <algorithm>
#include <limits>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "kv/slot_cache.h"
#include "tensor/sharing.h"

namespace vtensor {

namespace {

constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

}  // namespace

// Whether `n` slots are free, those on their way out included.
bool SlotCache::has_free(std::size_t n) const { return n <= ready_.size() || n <= count_free(); }

std::size_t SlotCache::count_free() const {
  const PoolLock lock(pool_);
  const auto lost =
      std::count_if(settling_.begin(), settling_.end(),
                    [this](std::size_t slot) VT_LOCKED { return is_lost(slots_[slot]); });
  return ready_.size() + settling_.size() - static_cast<std::size_t>(lost);
}

void SlotCache::require_free(const Caller& caller, std::size_t n) const {
  if (has_free(n)) return;
  throw NoFreeSlot("[" + std::string(caller.operation) + "] need " + std::to_string(n) +
                   " free slots, " + std::to_string(count_free()) + " of " +
                   std::to_string(slots_.size()) +
                   " are: free(slot) one, or make the cache with a larger max_batch=");
}

SlotCache::Fit SlotCache::fit(const Slot& slot) const {
  Fit fit{true, kAll, kAll};
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    const Buffer* buffer = slot.buffers[group].get();
    if (buffer == nullptr || buffer->vacant()) {
      fit.cached = 0;
      continue;
    }
    if (!buffer->reusable()) return {};
    const Interval cached = buffer->cached();
    fit.before = std::min(fit.before, cached.begin);
    const std::size_t end = cached.begin == 0 ? cached.end * pool_->page_size() : 0;
    fit.cached = std::min(fit.cached, end / row_groups_[group].shape.item_bytes);
  }
  return fit;
}

// Moves freed slots to those that can be had, as far as their pages have come to rest. A slot moves
// once, and few that cannot are looked at, so that this costs an alloc nothing that grows with the
// slots.
void SlotCache::admit_settled() {
  std::size_t looks = 8;
  while (!settling_.empty() && looks != 0) {
    std::size_t& at = settling_[look_at_ % settling_.size()];
    const Fit seen = fit(slots_[at]);
    if (!seen.ready) {
      ++look_at_;
      --looks;
      continue;
    }
    list_ready(at, seen.cached);
    at = settling_.back();
    settling_.pop_back();
  }
}

void SlotCache::list_ready(std::size_t slot, std::size_t cached) {
  ready_.insert({cached, slot});
  listed_as_[slot] = cached;
}

// Whether a ready slot is still as it was when it was listed; lists it anew where it is not: the
// pool takes cached pages back.
bool SlotCache::confirm(Ready::iterator listed, Fit& seen) {
  const auto [cached, slot] = *listed;
  seen = fit(slots_[slot]);
  if (seen.ready && seen.cached == cached) return true;
  ready_.erase(listed);
  if (seen.ready) {
    list_ready(slot, seen.cached);
  } else {
    settling_.push_back(slot);
  }
  return false;
}

// The smallest that has enough, or else the largest; of those that are alike the first.
std::optional<std::size_t> SlotCache::choose(std::size_t expected) {
  admit_settled();
  while (!ready_.empty()) {
    auto found = expected == 0 ? ready_.end() : ready_.lower_bound({expected, 0});
    if (found == ready_.end()) found = ready_.lower_bound({ready_.rbegin()->first, 0});
    Fit seen;
    if (confirm(found, seen)) return found->second;
  }
  return std::nullopt;
}

// One with nothing mapped below `pages` of each row group. Those with the fewest cached pages come
// first; where a slot has some from its beginning on, so have all behind it.
std::optional<std::size_t> SlotCache::choose_empty(std::span<const std::size_t> pages) {
  const std::size_t most = pages.empty() ? 0 : *std::max_element(pages.begin(), pages.end());
  admit_settled();
  for (auto listed = ready_.begin(); listed != ready_.end();) {
    Fit seen;
    if (!confirm(listed, seen)) {
      listed = ready_.begin();
      continue;
    }
    if (seen.before >= most) return listed->second;
    if (seen.cached != 0) break;
    ++listed;
  }
  return std::nullopt;
}

// Whether pages of some free slot are on their way out, as far as the driver lets them go.
bool SlotCache::leaving() const {
  return std::any_of(settling_.begin(), settling_.end(), [this](std::size_t at) VT_LOCKED {
    const Slot& slot = slots_[at];
    if (is_lost(slot) || fit(slot).ready) return false;
    return std::none_of(slot.buffers.begin(), slot.buffers.end(),
                        [](const auto& buffer) VT_LOCKED { return buffer && buffer->refusal(); });
  });
}

// Why the pages of some free slot stay.
std::exception_ptr SlotCache::refusal() const {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (states_[slot] != SlotState::free) continue;
    for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) {
      if (buffer && buffer->refusal()) return buffer->refusal();
    }
  }
  return nullptr;
}

// Whether places of the slot can never be used again.
bool SlotCache::is_lost(const Slot& slot) {
  return std::any_of(slot.buffers.begin(), slot.buffers.end(), [](const auto& buffer) {
    return buffer && buffer->range().quarantined() != 0;
  });
}

std::size_t SlotCache::cached_pages(const Slot& slot) {
  std::size_t pages = 0;
  for (const std::shared_ptr<Buffer>& buffer : slot.buffers) {
    if (buffer && !buffer->cached().empty())
      pages += buffer->cached().size() * buffer->shape().rows;
  }
  return pages;
}

// Has the free slot with the fewest cached positions give them back. False where none has any.
bool SlotCache::evict_one() {
  const auto fewest = std::find_if(
      ready_.begin(), ready_.end(),
      [this](const auto& listed) VT_LOCKED { return cached_pages(slots_[listed.second]) != 0; });
  if (fewest == ready_.end()) return false;
  for (const std::shared_ptr<Buffer>& buffer : slots_[fewest->second].buffers) {
    if (buffer && !buffer->cached().empty()) buffer->evict();
  }
  return true;
}

// The slot that `choose` names, taken; waits for one where all that are free are on their way out.
template <typename Choose>
std::size_t SlotCache::take(const Caller& caller, Choose choose) {
  require_free(caller, 1);
  for (;;) {
    std::optional<std::size_t> slot;
    {
      PoolLock lock(pool_);
      pool_->reap();
      slot = choose();
      if (!slot) {
        pool_->await(lock, caller.operation, "the work that used the pages of a freed slot",
                     [&]() VT_LOCKED {
                       static_cast<void>(pool_->settle_all(lock));
                       slot = choose();
                       if (slot || leaving()) return slot.has_value();
                       if (const std::exception_ptr refused = refusal())
                         std::rethrow_exception(refused);
                       return false;
                     });
      }
    }
    if (slot && enter(caller, *slot)) return *slot;
  }
}

// Makes a free slot one in use: reuses what is cached, and takes its places where nothing is.
// False where that has changed meanwhile.
bool SlotCache::enter(const Caller& caller, std::size_t slot) {
  std::vector<std::shared_ptr<Buffer>>& buffers = slots_[slot].buffers;
  std::size_t entered = 0;
  const auto undo = [&] {
    for (std::size_t group = 0; group < entered; ++group) buffers[group]->abandon();
  };
  try {
    for (; entered < row_groups_.size(); ++entered) {
      const GroupRange& group = row_groups_[entered];
      std::shared_ptr<Buffer>& buffer = buffers[entered];
      if (buffer && buffer->reuse_cached(caller)) continue;
      bool vacant = !buffer;
      if (buffer) {
        const PoolLock lock(pool_);
        vacant = buffer->vacant();
      }
      if (!vacant) {
        undo();
        return false;
      }
      buffer =
          Buffer::place(group.range, group.range->range().address(slot, 0), group.rows, caller);
    }
  } catch (...) {
    undo();
    throw;
  }
  states_[slot] = SlotState::used;
  ready_.erase({listed_as_[slot], slot});
  return true;
}

std::size_t SlotCache::alloc(const Caller& caller, std::size_t expected) {
  const std::size_t slot = take(caller, [&]() VT_LOCKED { return choose(expected); });
  look_further({&slot, 1});
  return slot;
}

std::size_t SlotCache::alloc_prefix(const Caller& caller, std::span<const Prefix> prefix,
                                    std::size_t length, bool deferred) {
  const std::size_t slot = accept(caller, prefix, length, nullptr, deferred);
  look_further({&slot, 1});
  return slot;
}

std::size_t SlotCache::take_empty(const Caller& caller, std::span<const std::size_t> pages) {
  return take(caller, [&]() VT_LOCKED -> std::optional<std::size_t> {
    for (;;) {
      const auto slot = choose_empty(pages);
      if (slot || leaving() || !evict_one()) return slot;
    }
  });
}

// A free slot with the pages of `parts`: positions from 0 on, or those that a parent has.
std::size_t SlotCache::accept(const Caller& caller, std::span<const Prefix> parts,
                              std::size_t length, const Slot* parent, bool deferred) {
  std::vector<std::size_t> pages(row_groups_.size());
  std::vector<std::vector<std::shared_ptr<PageSet>>> page_sets(row_groups_.size());
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    for (const Prefix& part : parts) {
      if (part.at(group)->indices().empty()) continue;
      page_sets[group].push_back(part[group]);
      pages[group] = part[group]->indices().end;
    }
  }
  std::vector<Token> tokens = parent ? parent->tokens : std::vector<Token>();
  const std::size_t slot = take_empty(caller, pages);
  try {
    for (std::size_t group = 0; group < row_groups_.size(); ++group) {
      if (page_sets[group].empty()) continue;
      const Interval positions = parent ? parent->buffers[group]->positions() : Interval{0, length};
      const Sharing sharing(*slots_[slot].buffers[group], caller);
      if (deferred) {
        sharing.expect(positions, page_sets[group]);
        slots_[slot].expects = true;
      } else {
        sharing.accept(positions, page_sets[group]);
      }
    }
  } catch (...) {
    leave(slot);
    throw;
  }
  if (parent) {
    slots_[slot].begins = parent->begins;
    slots_[slot].tokens = std::move(tokens);
  }
  lengths_[slot] = static_cast<std::int64_t>(length);
  return slot;
}

SlotCacheCounts SlotCache::counts() {
  SlotCacheCounts counts;
  const PoolLock lock(pool_);
  pool_->reap();
  std::unordered_set<const Page*> seen;
  for (const Slot& slot : slots_) {
    for (const std::shared_ptr<Buffer>& buffer : slot.buffers) {
      if (!buffer) continue;
      buffer->add_to(counts.pages);
      counts.shared += buffer->range().add_pages(seen);
    }
    counts.lost += is_lost(slot);
  }
  counts.distinct = seen.size();
  std::unordered_set<const SwapGroup*> groups;
  for (const Slot& slot : slots_) {
    for (const Band& band : slot.bands) {
      if (band.swapped != nullptr) counts.swapped_bytes += band.swapped->memory.front().bytes;
    }
    if (slot.swapped == nullptr) continue;
    for (const Held& held : slot.swapped->memory) counts.swapped_bytes += held.bytes;
    const SwapGroup* const group = slot.swapped->group.get();
    if (group == nullptr || !groups.insert(group).second) continue;
    for (const Held& held : group->head) counts.swapped_bytes += held.bytes;
  }
  counts.prefix_units = prefixes_.size();
  counts.prefix_evictions = prefixes_.evictions();
  counts.prefix_queries = prefix_queries_;
  counts.prefix_hits = prefix_hits_;
  counts.pages.budget_pages = pool_->store().budget();
  return counts;
}

std::vector<PageRecord> SlotCache::pages(std::size_t slot, std::size_t group) {
  const std::shared_ptr<Buffer>& buffer = slots_.at(slot).buffers.at(group);
  return buffer ? buffer->pages() : std::vector<PageRecord>();
}

}  // namespace vtensor
