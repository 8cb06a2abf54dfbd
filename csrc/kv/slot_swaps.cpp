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
std::vector<SlotCache::SlotBytes> SlotCache::bytes_of(std::size_t slot, std::size_t length,
                                                      std::size_t shared, bool head) const {
  std::vector<SlotBytes> rows;
  for (std::size_t i = 0; i < row_groups_.size(); ++i) {
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
        rows.push_back({content.layers.front(), at, bytes.size()});
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

// Has the copying stream wait for the work launched so far over a slot, and what unmaps its pages
// wait for that stream.
void SlotCache::order_copies(const Caller& caller, std::size_t slot) {
  Driver& driver = pool_->driver();
  for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) {
    buffer->use(caller);
    buffer->use({caller.operation, driver.copy_stream()});
    for (const FencePtr& fence : buffer->work()) driver.order(driver.copy_stream(), *fence);
  }
}

void SlotCache::swap_out(const Caller& caller, std::span<const std::size_t> slots,
                         const AllocateHost& allocate) {
  for (const std::size_t slot : slots) {
    if (slot < slots_.size() && states_[slot] == SlotState::swapped) {
      throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                            " is swapped out already: name slots in use");
    }
    require_used(caller, slot);
    if (std::count(slots.begin(), slots.end(), slot) != 1) {
      throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                            " is named twice: name each slot once");
    }
  }
  settle_copies();
  const auto hold = [&allocate](const std::vector<SlotBytes>& rows) {
    std::list<Held> held;
    const std::size_t bytes = total(rows);
    held.push_back({bytes == 0 ? nullptr : allocate(bytes), bytes});
    return held;
  };
  std::vector<bool> members;
  const std::shared_ptr<SwapGroup> group = group_of(slots, members);
  std::vector<std::vector<SlotBytes>> rows;
  std::vector<std::unique_ptr<Swapped>> swapped;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto length = static_cast<std::size_t>(lengths_[slots[i]]);
    rows.push_back(bytes_of(slots[i], length, members[i] ? group->length : 0, false));
    swapped.push_back(std::make_unique<Swapped>());
    swapped.back()->length = length;
    swapped.back()->memory = hold(rows.back());
    if (members[i]) swapped.back()->group = group;
  }
  std::vector<SlotBytes> head;
  if (group != nullptr) {
    head = bytes_of(slots[0], group->length, group->length, true);
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
    for (const std::size_t slot : slots) order_copies(caller, slot);
    for (std::size_t i = 0; i < slots.size(); ++i) copy(rows[i], swapped[i]->memory);
    if (group != nullptr) copy(head, group->head);
    const FencePtr copied = driver.fence(driver.copy_stream());
    for (const auto& one : swapped) one->copied = copied;
  } catch (...) {
    // What was launched by then still writes there.
    for (const auto& one : swapped) held_.splice(held_.end(), one->memory);
    if (group != nullptr) held_.splice(held_.end(), group->head);
    throw;
  }
  // From here on nothing is refused.
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = slots_[slots[i]];
    states_[slots[i]] = SlotState::swapped;
    slot.swapped = std::move(swapped[i]);
    slot.arriving = nullptr;
    lengths_[slots[i]] = room_[slots[i]] = 0;
    for (const std::shared_ptr<Buffer>& buffer : slot.buffers)
      buffer->retract({caller.operation, driver.copy_stream()}, {});
  }
}

void SlotCache::swap_in(const Caller& caller, std::span<const std::size_t> slots) {
  const std::string operation = "[" + std::string(caller.operation) + "] slot ";
  for (const std::size_t slot : slots) {
    if (slot >= slots_.size() || states_[slot] != SlotState::swapped) {
      throw InvalidArgument(operation + std::to_string(slot) +
                            " is not swapped out: call swap_out first");
    }
    if (std::count(slots.begin(), slots.end(), slot) != 1) {
      throw InvalidArgument(operation + std::to_string(slot) +
                            " is named twice: name each slot once");
    }
  }
  settle_copies();
  std::vector<std::unique_ptr<Arriving>> arriving;
  arriving.reserve(slots.size());
  arriving_.reserve(arriving_.size() + slots.size());
  std::vector<SwapGroup*> opened;  // whose pages are here by this call
  opened.reserve(slots.size());
  try {
    for (const std::size_t slot : slots) {
      arriving.push_back(bring_in(caller, slot));
      SwapGroup* const group = slots_[slot].swapped->group.get();
      if (group == nullptr || !group->pages.empty() || group->waiting == 1) continue;
      opened.push_back(group);
      share_again(caller, slot, *group);
    }
  } catch (...) {
    for (std::size_t i = 0; i < arriving.size(); ++i) send_back(caller, slots[i]);
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

// Pages for a swapped slot, and its copies launched. Its host memory stays until the slot leaves
// it.
std::unique_ptr<SlotCache::Arriving> SlotCache::bring_in(const Caller& caller, std::size_t slot) {
  const Swapped& swapped = *slots_[slot].swapped;
  const SwapGroup* const group = swapped.group.get();
  const bool shared = group != nullptr && !group->pages.empty();

  struct Coming {
    SlotBytes row;
    const std::byte* from;
  };
  std::vector<Coming> coming;
  const auto add = [&coming](const std::vector<SlotBytes>& rows, const std::list<Held>& from) {
    const std::byte* at = from.front().memory.get();
    for (const SlotBytes& row : rows) {
      coming.push_back({row, at});
      at += row.bytes;
    }
  };
  add(bytes_of(slot, swapped.length, group ? group->length : 0, false), swapped.memory);
  if (group != nullptr && !shared)
    add(bytes_of(slot, group->length, group->length, true), group->head);
  std::sort(coming.begin(), coming.end(),
            [](const Coming& a, const Coming& b) { return a.row.layer < b.row.layer; });
  auto arriving = std::make_unique<Arriving>();

  restore(caller, slot, shared ? group->pages : Prefix());
  Driver& driver = pool_->driver();
  try {
    order_copies(caller, slot);
    for (std::size_t i = 0; i < coming.size(); ++i) {
      driver.copy_in(coming[i].row.at, coming[i].from, coming[i].row.bytes);
      if (i + 1 < coming.size() && coming[i + 1].row.layer == coming[i].row.layer) continue;
      arriving->layers.push_back(coming[i].row.layer);
      arriving->fences.push_back(driver.fence(driver.copy_stream()));
    }
  } catch (...) {
    send_back(caller, slot);
    throw;
  }
  return arriving;
}

// Its pages go once what is being copied there has arrived.
void SlotCache::send_back(const Caller& caller, std::size_t slot) noexcept {
  for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers)
    buffer->retract({caller.operation, pool_->driver().copy_stream()}, {});
}

// Its host memory goes once copies no longer use it, and that of its group with the last slot.
void SlotCache::leave_swap(Swapped& swapped) noexcept {
  held_.splice(held_.end(), swapped.memory);
  if (swapped.group == nullptr || --swapped.group->waiting != 0) return;
  held_.splice(held_.end(), swapped.group->head);
  swapped.group->pages.clear();  // they stay with the slots that have mapped them
}

// Pages of its own for the positions that a swapped slot had, but those of `prefix` for the first.
void SlotCache::restore(const Caller& caller, std::size_t slot, const Prefix& prefix) {
  const Slot& restored = slots_[slot];
  const std::size_t length = restored.swapped->length;
  try {
    for (std::size_t row_group = 0; row_group < prefix.size(); ++row_group) {
      const std::shared_ptr<PageSet>& page_set = prefix[row_group];
      if (page_set->indices().empty()) continue;
      // What begins in the last of these pages is there, and its end in a page that is new.
      const std::size_t end = ceil_div(page_set->indices().end * pool_->page_size(),
                                       row_groups_[row_group].shape.item_bytes);
      restored.buffers[row_group]->accept(caller, {0, std::min(length, end)}, {&page_set, 1});
    }
    std::vector<Buffer::Growth> growths;
    for (std::size_t row_group = 0; row_group < row_groups_.size(); ++row_group) {
      Buffer& buffer = *restored.buffers[row_group];
      const std::size_t written = std::min(buffer.positions().end, length);
      growths.push_back({&buffer, needed(row_group, slot, length), {written, length}});
    }
    Buffer::grow(caller, growths, false);
  } catch (...) {
    for (const std::shared_ptr<Buffer>& buffer : restored.buffers) buffer->retract(caller, {});
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
      pages.push_back(slots_[slot].buffers[row_group]->offer(caller, {&whole, 1}).front());
    }
    group.pages = std::move(pages);
  } catch (const std::exception&) {
  }
}

FencePtr SlotCache::copies(std::size_t slot, std::optional<std::size_t> layer) {
  settle_copies();
  if (slots_[slot].swapped != nullptr) return slots_[slot].swapped->copied;
  const Arriving* const arriving = slots_[slot].arriving.get();
  if (arriving == nullptr || arriving->fences.empty()) return nullptr;
  if (!layer) return arriving->fences.back();
  const auto behind = std::upper_bound(arriving->layers.begin(), arriving->layers.end(), *layer);
  if (behind == arriving->layers.begin()) return nullptr;
  return arriving->fences[static_cast<std::size_t>(behind - arriving->layers.begin()) - 1];
}

FencePtr SlotCache::arrivals() {
  settle_copies();
  for (auto slot = arriving_.rbegin(); slot != arriving_.rend(); ++slot) {
    const Arriving* const arriving = slots_[*slot].arriving.get();
    if (arriving != nullptr && !arriving->fences.empty()) return arriving->fences.back();
  }
  return nullptr;
}

void SlotCache::await_departure(const Caller& caller, std::size_t slot) {
  if (states_[slot] != SlotState::swapped) return;
  PoolLock lock(pool_);
  const auto& buffers = slots_[slot].buffers;
  pool_->await(
      lock, caller.operation, "the unmapping of a slot that was swapped out", [&]() VT_LOCKED {
        static_cast<void>(pool_->settle_all(lock));
        return std::all_of(buffers.begin(), buffers.end(), [](const auto& buffer) VT_LOCKED {
          return buffer->pages_leaving() == 0;
        });
      });
}

// What the caller's stream does to a slot comes behind what is being copied into it.
void SlotCache::await_arrival(const Caller& caller, std::size_t slot) {
  const FencePtr fence = copies(slot, {});
  if (fence != nullptr) pool_->driver().order(caller.stream, *fence);
}

// Forgets copies that are over.
void SlotCache::settle_copies() noexcept {
  if (arriving_.empty() && held_.empty()) return;
  Driver& driver = pool_->driver();
  try {
    std::erase_if(arriving_, [&](std::size_t slot) {
      std::unique_ptr<Arriving>& arriving = slots_[slot].arriving;
      if (arriving == nullptr) return true;
      const FencePtr last = arriving->fences.empty() ? nullptr : arriving->fences.back();
      if (last != nullptr && !driver.passed(*last)) return false;
      arriving = nullptr;
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
    slot.arriving = nullptr;
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
