// Whether memory suffices for other lengths of a cache's slots, asked before anything is done:
// pages that the slots would need, and pages that are free or could be taken back.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/align.h"
#include "kv/slot_cache.h"
#include "vmm/copy_on_write.h"

namespace vtensor {

// `alone`: as if the other pools of a shared budget held nothing.
bool SlotCache::fits_now(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                         bool alone) {
  lengths_->require_possible(caller, lengths, bands);
  PageStore& store = pool_->store();
  {
    PoolLock lock(pool_);
    const std::size_t pages = need(lengths, bands).pages;
    if (!alone && pages <= std::min(store.unused(), store.beside_reserve())) return true;
  }
  const std::size_t elsewhere = pool_->shrinkable() + (alone ? 0 : pool_->spared_elsewhere());
  PoolLock lock(pool_);
  static_cast<void>(pool_->finish_unmapping(lock));
  if (store.private_copies() != 0) pool_->count_private_copies();  // as a growth does
  const auto [pages, ready, copied] = need(lengths, bands);
  const std::size_t unused =
      std::min(alone ? store.left(copied) : store.unused(copied), store.beside_reserve());
  // The cheapest question first: most are answered before the last.
  if (const std::size_t most = sub_sat(pages + ready, unused + elsewhere);
      prefixes_.pages() >= most && prefixes_.evictable(most) >= most)
    return true;
  const MakeRoom::Spare given = given_up();
  const std::size_t still =
      sub_sat(pages + std::min(ready, given.pages), unused + elsewhere + given.taken_back);
  return still <= prefixes_.pages() && prefixes_.evictable(still) >= still;
}

// Pages for a step of `bands` to `lengths`.
SlotCache::Need SlotCache::need(std::span<const std::int64_t> lengths, Bands bands) const {
  Need need;
  const std::vector<std::size_t> all = buffers_.groups_of({}), named = buffers_.groups_of(bands);
  std::unordered_map<const Page*, std::uint32_t> unsharing;
  std::unordered_set<const void*> groups;  // of swapped slots
  for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
    // Named bands that are in host memory come back too.
    if (lengths[slot] == 0) continue;
    if (lengths[slot] <= lengths_->room(slot) && (!lengths_->differ(slot) || bands.empty()))
      continue;
    const std::size_t shared = swaps_.shared_positions(slot, groups);
    // A whole slot comes back whole, a band with all it has.
    for (const std::size_t group : lengths_->state(slot) == SlotState::swapped ? all : named) {
      const std::size_t band = buffers_.group(group).band;
      const std::size_t back = lengths_->is_away(slot, band) ? lengths_->length(slot, band) : 0;
      const Interval written{lengths_->here(slot, band),
                             std::max(static_cast<std::size_t>(lengths[slot]), back)};
      if (written.empty()) continue;
      const Buffer& buffer = buffers_.at(slot, group);
      const Reservation& range = buffer.range();
      Interval pages = buffer.indices_of(buffers_.needed(slot, group, written.end));
      if (buffer.owned_until() != 0) pages.begin = buffer.owned_until();
      pages.begin = std::max(pages.begin, buffers_.page_of(group, shared));
      if (!pages.empty()) {
        // A page with other references may not become free when it leaves this slot.
        const std::size_t taken = range.count_sole(pages);
        need.ready += taken;
        need.pages += pages.size() * range.rows() - taken;
      }
      if (range.copy_on_write() == 0 && !is_deferred(slot)) continue;
      const Interval own = intersection(buffer.indices_of(written), {0, buffer.owned_until()});
      if (pool_->store().private_copies() != 0)
        need.copied += count_private_copies(range, range.collect(own, is_copy_on_write));
      for (std::size_t row = 0; row < range.rows(); ++row) {
        for (std::size_t index = own.begin; index < own.end; ++index) {
          const Page* const page = buffer.shared_at(row, index);
          if (page != nullptr) need.pages += takes_fresh_page(range, *page, unsharing[page]);
        }
      }
    }
  }
  return need;
}

// What a growth that lacks pages gives up, and unshared pages of this cache's slots that wait to be
// unmapped.
MakeRoom::Spare SlotCache::given_up() const {
  MakeRoom::Spare given = MakeRoom(*pool_).spare();
  const bool read = buffers_.range(0)->range().is_read();
  for (const std::shared_ptr<Buffer>& buffer : buffers_.all()) {
    const std::size_t pages = buffer->pages_coming({0, buffer->range().reserved()});
    given.pages += pages;
    if (!read) given.taken_back += pages;
  }
  return given;
}

}  // namespace vtensor
