// Slots that leave for host memory and come back, by copies beside their callers.
//
// The copies run in the driver's copying stream, which the slots' buffers know as one that uses
// their pages: so whatever else happens, pages that are being copied stay mapped until it is done.
#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "kv/slot_cache.h"
#include "tensor/growing.h"
#include "tensor/sharing.h"
#include "vmm/wait.h"

namespace vtensor {

namespace {

std::size_t total(const auto& rows) {
  std::size_t bytes = 0;
  for (const auto& row : rows) bytes += row.bytes;
  return bytes;
}

}  // namespace

// The bytes of a slot's positions, row after row: those in the whole pages of its first `shared`
// positions where `head`, or what lies behind these.
std::vector<SlotCache::SlotBytes> SlotCache::bytes_of(std::size_t slot,
                                                      std::span<const std::size_t> groups,
                                                      std::size_t length, std::size_t shared,
                                                      bool head) const {
  std::vector<SlotBytes> rows;
  for (const std::size_t i : groups) {
    const GroupRange& row_group = row_groups_[i];
    const std::size_t item = row_group.shape.item_bytes;
    const std::size_t split = page_of(row_group, shared) * pool_->page_size();
    const std::size_t kept = split != 0 ? split : slots_[slot].begins[i] * item;
    const Interval bytes = head ? Interval{0, split} : Interval{kept, length * item};
    if (bytes.empty()) continue;
    std::size_t row = 0;
    for (const RowContent& content : row_group.shape.contents) {
      for (const std::size_t end = row + content.rows(); row < end; ++row) {
        const Address at =
            row_group.range->range().address(row * slots_.size() + slot, 0) + bytes.begin;
        rows.push_back({content.layers.front(), at, bytes.size(), item});
      }
    }
  }
  return rows;
}

// What slots that go together share with the first of them: whole units, so that their pages can be
// kept. Null where that is nothing.
std::shared_ptr<SlotCache::SwapGroup> SlotCache::group_of(std::span<const std::size_t> slots,
                                                          std::vector<bool>& members) {
  members.assign(slots.size(), false);
  std::size_t least = shape_.max_length;
  std::size_t waiting = 0;
  {
    const PoolLock lock(pool_);
    for (std::size_t i = 1; i < slots.size(); ++i) {
      std::size_t length =
          static_cast<std::size_t>(std::min(lengths_[slots[0]], lengths_[slots[i]]));
      for (std::size_t row_group = 0; row_group < row_groups_.size(); ++row_group) {
        const Buffer& buffer = *slots_[slots[i]].buffers[row_group];
        const std::size_t pages = buffer.shared_with(*slots_[slots[0]].buffers[row_group]);
        const bool whole = slots_[slots[i]].begins[row_group] == 0;
        // Up to here no more pages are whole; so a group stays one, however often it is swapped.
        const std::size_t most =
            ((pages + 1) * pool_->page_size() - 1) / row_groups_[row_group].shape.item_bytes;
        length = std::min(length, whole ? most : 0);
      }
      if (length < unit()) continue;
      least = std::min(least, length / unit() * unit());
      members[i] = true;
      ++waiting;
    }
  }
  if (waiting == 0) return nullptr;
  members[0] = true;
  auto group = std::make_shared<SwapGroup>();
  group->length = least;
  group->waiting = waiting + 1;
  return group;
}

// Has the copying stream wait for the work launched so far over a slot's rows, and what unmaps
// their pages wait for that stream.
void SlotCache::order_copies(const Caller& caller, std::size_t slot,
                             std::span<const std::size_t> groups) {
  Driver& driver = pool_->driver();
  for (const std::size_t group : groups) {
    Buffer& buffer = *slots_[slot].buffers[group];
    buffer.use(caller);
    buffer.use({caller.operation, driver.copy_stream()});
    for (const FencePtr& fence : buffer.work()) driver.order(driver.copy_stream(), *fence);
  }
}

void SlotCache::require_named_once(const Caller& caller, std::span<const std::size_t> slots) const {
  for (const std::size_t slot : slots) {
    if (std::count(slots.begin(), slots.end(), slot) == 1) continue;
    throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                          " is named twice: name each slot once");
  }
}

void SlotCache::swap_out(const Caller& caller, std::span<const std::size_t> slots,
                         const AllocateHost& allocate) {
  for (const std::size_t slot : slots) {
    if (slot < slots_.size() && states_[slot] == SlotState::swapped) {
      throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                            " is swapped out already: name slots in use");
    }
    require_together(caller, slot);
  }
  require_named_once(caller, slots);
  settle_copies();
  for (const std::size_t slot : slots) finish_prefix(caller, slot);
  std::vector<bool> members;
  const std::shared_ptr<SwapGroup> group = group_of(slots, members);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    parts.push_back({slots[i], all_groups_, std::make_unique<Swapped>()});
    parts.back().swapped->length = static_cast<std::size_t>(lengths_[slots[i]]);
    if (members[i]) parts.back().swapped->group = group;
  }
  copy_out(caller, parts, group.get(), allocate);
  // From here on nothing is refused.
  for (Part& part : parts) {
    states_[part.slot] = SlotState::swapped;
    slots_[part.slot].swapped = std::move(part.swapped);
    slots_[part.slot].arriving.clear();
    lengths_[part.slot] = room_[part.slot] = 0;
    send_back(caller, part.slot, part.groups);
  }
}

// Copies each part to memory of its own, but what those of `group` share once.
void SlotCache::copy_out(const Caller& caller, std::span<const Part> parts, SwapGroup* group,
                         const AllocateHost& allocate) {
  const auto hold = [&allocate](const std::vector<SlotBytes>& rows) {
    std::list<Held> held;
    const std::size_t bytes = total(rows);
    held.push_back({bytes == 0 ? nullptr : allocate(bytes), bytes});
    return held;
  };
  std::vector<std::vector<SlotBytes>> rows;
  std::vector<SlotBytes> head;
  for (const Part& part : parts) {
    Swapped& swapped = *part.swapped;
    const std::size_t shared = swapped.group == nullptr ? 0 : group->length;
    rows.push_back(bytes_of(part.slot, part.groups, swapped.length, shared, false));
    swapped.memory = hold(rows.back());
  }
  if (group != nullptr) {
    head = bytes_of(parts.front().slot, all_groups_, group->length, group->length, true);
    group->head = hold(head);
  }

  Driver& driver = pool_->driver();
  const auto copy = [&driver](const std::vector<SlotBytes>& from, const std::list<Held>& to) {
    std::byte* at = to.front().memory.get();
    for (const SlotBytes& row : from) {
      driver.copy_out(at, row.at, row.bytes);
      at += row.bytes;
    }
  };
  try {
    for (const Part& part : parts) order_copies(caller, part.slot, part.groups);
    for (std::size_t i = 0; i < parts.size(); ++i) copy(rows[i], parts[i].swapped->memory);
    if (group != nullptr) copy(head, group->head);
    const FencePtr copied = driver.fence(driver.copy_stream());
    for (const Part& part : parts) part.swapped->copied = copied;
  } catch (...) {
    // What was launched by then still writes there.
    for (const Part& part : parts) held_.splice(held_.end(), part.swapped->memory);
    if (group != nullptr) held_.splice(held_.end(), group->head);
    throw;
  }
}

void SlotCache::swap_in(const Caller& caller, std::span<const std::size_t> slots) {
  for (const std::size_t slot : slots) {
    if (slot < slots_.size() && states_[slot] == SlotState::swapped) continue;
    throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                          " is not swapped out: call swap_out first");
  }
  require_named_once(caller, slots);
  settle_copies();
  std::vector<std::vector<Arriving>> arriving;
  arriving.reserve(slots.size());
  arriving_.reserve(arriving_.size() + slots.size());
  std::vector<SwapGroup*> opened;  // whose pages are here by this call
  opened.reserve(slots.size());
  try {
    for (const std::size_t slot : slots) {
      arriving.push_back(
          bring_in(caller, slot, all_groups_, *slots_[slot].swapped, slots_[slot].swapped->length));
      SwapGroup* const group = slots_[slot].swapped->group.get();
      if (group == nullptr || !group->pages.empty() || group->waiting == 1) continue;
      opened.push_back(group);
      share_again(caller, slot, *group);
    }
  } catch (...) {
    for (std::size_t i = 0; i < arriving.size(); ++i) send_back(caller, slots[i], all_groups_);
    for (SwapGroup* const group : opened) group->pages.clear();
    throw;
  }
  // From here on nothing is refused.
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& it = slots_[slots[i]];
    const std::unique_ptr<Swapped> left = std::move(it.swapped);
    states_[slots[i]] = SlotState::used;
    it.arriving = std::move(arriving[i]);
    arriving_.push_back(slots[i]);
    lengths_[slots[i]] = static_cast<std::int64_t>(left->length);
    leave_swap(*left);
  }
  look_further(slots);
}

// Pages for the first `length` positions of what is in host memory, and their copies launched. That
// memory stays until it is left.
std::vector<SlotCache::Arriving> SlotCache::bring_in(const Caller& caller, std::size_t slot,
                                                     std::span<const std::size_t> groups,
                                                     const Swapped& swapped, std::size_t length) {
  const SwapGroup* const group = swapped.group.get();
  const bool shared = group != nullptr && !group->pages.empty();

  struct Coming {
    SlotBytes row;
    const std::byte* from;
  };
  std::vector<Coming> coming;
  const auto add = [&](const std::vector<SlotBytes>& rows, const std::list<Held>& from) {
    const std::byte* at = from.front().memory.get();
    for (const SlotBytes& row : rows) {
      coming.push_back({row, at});
      coming.back().row.bytes -= std::min(row.bytes, (swapped.length - length) * row.item);
      at += row.bytes;
    }
    std::erase_if(coming, [](const Coming& some) { return some.row.bytes == 0; });
  };
  add(bytes_of(slot, groups, swapped.length, group ? group->length : 0, false), swapped.memory);
  if (group != nullptr && !shared)
    add(bytes_of(slot, groups, group->length, group->length, true), group->head);
  std::sort(coming.begin(), coming.end(),
            [](const Coming& a, const Coming& b) { return a.row.layer < b.row.layer; });
  std::vector<Arriving> arriving;

  restore(caller, slot, groups, length, shared ? group->pages : Prefix());
  Driver& driver = pool_->driver();
  try {
    order_copies(caller, slot, groups);
    for (std::size_t i = 0; i < coming.size(); ++i) {
      const std::size_t layer = coming[i].row.layer;
      driver.copy_in(coming[i].row.at, coming[i].from, coming[i].row.bytes);
      if (i + 1 < coming.size() && coming[i + 1].row.layer == layer) continue;
      arriving.push_back({layer, band_of(layer), driver.fence(driver.copy_stream())});
    }
  } catch (...) {
    send_back(caller, slot, groups);
    throw;
  }
  return arriving;
}

// Pages go once what is being copied from or to them is done.
void SlotCache::send_back(const Caller& caller, std::size_t slot,
                          std::span<const std::size_t> groups) noexcept {
  for (const std::size_t group : groups) {
    slots_[slot].buffers[group]->retract({caller.operation, pool_->driver().copy_stream()}, {});
  }
}

// Its host memory goes once copies no longer use it, and that of its group with the last slot.
void SlotCache::leave_swap(Swapped& swapped) noexcept {
  held_.splice(held_.end(), swapped.memory);
  if (swapped.group == nullptr || --swapped.group->waiting != 0) return;
  held_.splice(held_.end(), swapped.group->head);
  swapped.group->pages.clear();  // they stay with the slots that have mapped them
}

// Pages of its own for the first `length` positions, but those of `prefix` for the first of these.
void SlotCache::restore(const Caller& caller, std::size_t slot, std::span<const std::size_t> groups,
                        std::size_t length, const Prefix& prefix) {
  const std::vector<std::shared_ptr<Buffer>>& buffers = slots_[slot].buffers;
  try {
    for (std::size_t row_group = 0; row_group < prefix.size(); ++row_group) {
      const std::shared_ptr<PageSet>& page_set = prefix[row_group];
      if (page_set->indices().empty()) continue;
      // What begins in the last of these pages is there, and its end in a page that is new.
      const std::size_t end = ceil_div(page_set->indices().end * pool_->page_size(),
                                       row_groups_[row_group].shape.item_bytes);
      Sharing(*buffers[row_group], caller).accept({0, std::min(length, end)}, {&page_set, 1});
    }
    std::vector<Growth> growths;
    for (const std::size_t row_group : groups) {
      Buffer& buffer = *buffers[row_group];
      const std::size_t written = std::min(buffer.positions().end, length);
      growths.push_back({&buffer, needed(row_group, slot, length), {written, length}});
    }
    grow_all(caller, growths, false);
  } catch (...) {
    for (const std::size_t row_group : groups) buffers[row_group]->retract(caller, {});
    throw;
  }
}

// The first slot of a group has its pages: the others map them. Where that is refused they copy
// them too.
void SlotCache::share_again(const Caller& caller, std::size_t slot, SwapGroup& group) noexcept {
  try {
    Prefix pages;
    for (std::size_t row_group = 0; row_group < row_groups_.size(); ++row_group) {
      const Interval whole{0, page_of(row_groups_[row_group], group.length)};
      pages.push_back(Sharing(*slots_[slot].buffers[row_group], caller).offer({&whole, 1}).front());
    }
    group.pages = std::move(pages);
  } catch (const std::exception&) {
  }
}

bool SlotCache::is_away(std::size_t slot, std::optional<std::size_t> layer) const {
  if (states_[slot] == SlotState::swapped) return true;
  const std::vector<Band>& bands = slots_[slot].bands;
  if (layer) return is_band_away(slot, band_of(*layer));
  return std::any_of(bands.begin(), bands.end(),
                     [](const Band& band) { return band.swapped != nullptr; });
}

FencePtr SlotCache::copies(std::size_t slot, std::optional<std::size_t> layer) {
  settle_copies();
  const Slot& it = slots_[slot];
  if (it.swapped != nullptr) return it.swapped->copied;
  if (!layer) {
    // Those that go and those that come are in no order but that of their stream.
    if (is_away(slot, layer)) return pool_->driver().fence(pool_->driver().copy_stream());
    return last_arrival(slot);
  }
  const std::size_t band = band_of(*layer);
  if (is_band_away(slot, band)) return it.bands[band].swapped->copied;
  for (auto arriving = it.arriving.rbegin(); arriving != it.arriving.rend(); ++arriving) {
    if (arriving->band == band && arriving->layer <= *layer) return arriving->over;
  }
  return nullptr;
}

FencePtr SlotCache::arrivals() {
  settle_copies();
  return arriving_.empty() ? nullptr : pool_->driver().fence(pool_->driver().copy_stream());
}

void SlotCache::await_departure(const Caller& caller, std::size_t slot,
                                std::optional<std::size_t> layer) {
  if (!is_away(slot, layer)) return;
  const bool whole = states_[slot] == SlotState::swapped;
  std::vector<const Buffer*> buffers;
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    const std::size_t band = row_groups_[group].shape.band;
    if (whole || (is_band_away(slot, band) && (!layer || band_of(*layer) == band)))
      buffers.push_back(slots_[slot].buffers[group].get());
  }
  PoolLock lock(pool_);
  pool_->await(
      lock, caller.operation, "the unmapping of a slot that was swapped out", [&]() VT_LOCKED {
        static_cast<void>(pool_->settle_all(lock));
        return std::all_of(buffers.begin(), buffers.end(), [](const Buffer* buffer) VT_LOCKED {
          return buffer->pages_leaving() == 0;
        });
      });
}

// What the caller's stream does to a slot comes behind what is being copied into it.
void SlotCache::await_arrival(const Caller& caller, std::size_t slot) {
  settle_copies();
  finish_prefix(caller, slot);
  const FencePtr last = last_arrival(slot);
  if (last != nullptr) pool_->driver().order(caller.stream, *last);
}

// Forgets copies that are over.
void SlotCache::settle_copies() noexcept {
  if (arriving_.empty() && held_.empty()) return;
  Driver& driver = pool_->driver();
  try {
    std::erase_if(arriving_, [&](std::size_t slot) {
      std::vector<Arriving>& arriving = slots_[slot].arriving;
      const FencePtr last = last_arrival(slot);
      if (last != nullptr && !driver.passed(*last)) return false;
      arriving.clear();
      return true;
    });
    for (auto held = held_.begin(); held != held_.end();) {
      if (!held->fenced) held->until = driver.fence(driver.copy_stream());
      held->fenced = true;
      if (held->until != nullptr && !driver.passed(*held->until)) return;  // nor those behind it
      held = held_.erase(held);
    }
  } catch (const Error&) {
    // Asked again by the next operation.
  }
}

// For the cache's end. Memory that copies may still use after the pool's patience is never given
// back.
void SlotCache::finish_copies() noexcept {
  for (Slot& slot : slots_) {
    if (slot.swapped != nullptr) leave_swap(*std::exchange(slot.swapped, nullptr));
    for (Band& band : slot.bands) {
      if (band.swapped != nullptr) leave_swap(*std::exchange(band.swapped, nullptr));
    }
    slot.arriving.clear();
  }
  if (held_.empty()) return;
  try {
    Driver& driver = pool_->driver();
    if (wait_for(driver, driver.fence(driver.copy_stream()), pool_->options().patience)) {
      held_.clear();
      return;
    }
  } catch (const Error&) {
    // Nobody knows what the device still does.
  }
  if (auto* const lost = new (std::nothrow) std::list<Held>) lost->swap(held_);
}

}  // namespace vtensor
