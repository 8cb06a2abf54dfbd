#include "kv/slot_swaps.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "vmm/pending_work.h"

namespace vtensor {

SlotSwaps::SlotSwaps(SlotBuffers& buffers, const SlotLengths& lengths)
    : buffers_(buffers),
      lengths_(lengths),
      driver_(buffers.pool()->driver()),
      away_(buffers.shape().slots, std::vector<std::shared_ptr<Swapped>>(buffers.shape().bands)),
      arriving_(buffers.shape().slots) {}

std::vector<SlotSwaps::Part> SlotSwaps::parts_of(std::span<const std::size_t> slots,
                                                 Bands bands) const {
  std::vector<Part> parts;
  for (const std::size_t slot : slots) {
    if (bands.empty())
      parts.push_back({slot, lengths_.or_all({}), buffers_.groups_of({}), nullptr});
    for (std::size_t i = 0; i < bands.size(); ++i)
      parts.push_back(
          {slot, bands.subspan(i, 1), buffers_.groups_of(bands.subspan(i, 1)), nullptr});
  }
  return parts;
}

// Adds the copies between `memory` and the first `length` positions of a part: with `head` those in
// the pages that its group shares, else those past them. Returns the bytes of `memory`.
std::size_t SlotSwaps::add_copies(std::vector<Copy>& copies, const Part& part, bool head,
                                  std::size_t length, const Held& memory) const {
  const Swapped& swapped = *part.swapped;
  std::size_t offset = 0;
  for (const std::size_t i : part.groups) {
    const RowGroup& group = buffers_.group(i);
    const std::size_t shared = swapped.group == nullptr ? 0 : swapped.group->length;
    const std::size_t split = buffers_.page_of(i, shared) * buffers_.pool()->page_size();
    const std::size_t kept = split != 0 ? split : buffers_.begins(part.slot)[i] * group.item_bytes;
    const Interval left =
        head ? Interval{0, split} : Interval{kept, swapped.length * group.item_bytes};
    if (left.empty()) continue;
    const Interval wanted = intersection(left, {0, length * group.item_bytes});
    std::size_t row = 0;
    for (const RowContent& content : group.contents) {
      for (const std::size_t end = row + content.rows(); row < end; ++row, offset += left.size()) {
        if (wanted.empty()) continue;
        const Address at =
            buffers_.range(i)->range().address(row * buffers_.shape().slots + part.slot, 0);
        copies.push_back(
            {content.layers.front(), at + wanted.begin, &memory, offset, wanted.size()});
      }
    }
  }
  return offset;
}

// Makes a group of the slots that begin with the same pages as the first: whole units, so that page
// sets can keep them. Null if no slot does.
std::shared_ptr<SlotSwaps::Group> SlotSwaps::join(std::span<const Part> parts) const {
  auto group = std::make_shared<Group>();
  group->length = buffers_.shape().max_length;
  const PoolLock lock(buffers_.pool());
  const Part& first = parts.front();
  for (const Part& part : parts.subspan(1)) {
    std::size_t length = std::min(first.swapped->length, part.swapped->length);
    for (const std::size_t i : part.groups) {
      const Buffer& buffer = buffers_.at(part.slot, i);
      const std::size_t pages = buffer.shared_with(buffers_.at(first.slot, i));
      const bool whole = buffers_.begins(part.slot)[i] == 0;
      // The longest length with `pages` whole pages: a group swapped again has the same length.
      const std::size_t most =
          ((pages + 1) * buffers_.pool()->page_size() - 1) / buffers_.group(i).item_bytes;
      length = std::min(length, whole ? most : 0);
    }
    length -= length % buffers_.unit();
    if (length == 0) continue;
    group->length = std::min(group->length, length);
    part.swapped->group = group;
    ++group->waiting;
  }
  if (group->waiting == 0) return nullptr;
  first.swapped->group = group;
  ++group->waiting;
  return group;
}

// Has the copying stream wait for the work launched so far on a part's rows, and the unmapping of
// their pages wait for the copying stream.
void SlotSwaps::order_copies(const Caller& caller, const Part& part) {
  for (const std::size_t group : part.groups) {
    Buffer& buffer = buffers_.at(part.slot, group);
    buffer.use(caller);
    buffer.use({caller.operation, driver_.copy_stream()});
    for (const FencePtr& fence : buffer.work()) driver_.order(driver_.copy_stream(), *fence);
  }
}

void SlotSwaps::swap_out(const Caller& caller, std::span<const std::size_t> slots, Bands bands,
                         const AllocateHost& allocate) {
  if (slots.empty()) return;
  std::vector<Part> parts = parts_of(slots, bands);
  for (Part& part : parts) {
    part.swapped = std::make_shared<Swapped>();
    part.swapped->length = lengths_.length(part.slot, part.bands.front());
  }
  const std::shared_ptr<Group> group = bands.empty() ? join(parts) : nullptr;

  std::vector<Copy> copies;
  const auto add = [&](const Part& part, bool head, std::list<Held>& to) {
    Held& held = to.emplace_back();
    held.bytes = add_copies(copies, part, head, part.swapped->length, held);
    if (held.bytes != 0) held.memory = allocate(held.bytes);
  };
  for (const Part& part : parts) add(part, false, part.swapped->memory);
  if (group != nullptr) add(parts.front(), true, group->head);

  try {
    for (const Part& part : parts) order_copies(caller, part);
    for (const auto& [layer, at, memory, offset, bytes] : copies)
      driver_.copy(CopyDirection::out, at, memory->memory.get() + offset, bytes,
                   driver_.copy_stream());
    const FencePtr copied = driver_.fence(driver_.copy_stream());
    for (const Part& part : parts) part.swapped->copied = copied;
  } catch (...) {
    // Copies that were launched still write to this memory.
    for (const Part& part : parts) held_.splice(held_.end(), part.swapped->memory);
    if (group != nullptr) held_.splice(held_.end(), group->head);
    throw;
  }
  // From here on nothing is refused.
  if (group != nullptr) bytes_ += group->head.front().bytes;
  for (const Part& part : parts) {
    bytes_ += part.swapped->memory.front().bytes;
    for (const std::size_t band : part.bands) {
      away_[part.slot][band] = part.swapped;
      std::erase_if(arriving_[part.slot],
                    [band](const Arriving& copy) { return copy.band == band; });
    }
    send_back(part);
  }
}

void SlotSwaps::swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands) {
  std::vector<Part> parts = parts_of(slots, bands);
  for (Part& part : parts) part.swapped = away_[part.slot][part.bands.front()];
  std::vector<std::list<Arriving>> arriving;
  arriving.reserve(parts.size());
  coming_.reserve(coming_.size() + parts.size());
  std::vector<Group*> opened;  // whose pages are here by this call
  opened.reserve(parts.size());
  try {
    for (const Part& part : parts) {
      arriving.push_back(bring_in(caller, part));
      Group* const group = part.swapped->group.get();
      if (group == nullptr || !group->pages.empty() || group->waiting == 1) continue;
      opened.push_back(group);
      share_again(caller, part);
    }
  } catch (...) {
    for (std::size_t i = 0; i < arriving.size(); ++i) send_back(parts[i]);
    for (Group* const group : opened) group->pages.clear();
    throw;
  }
  // From here on nothing is refused.
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    arriving_[part.slot].splice(arriving_[part.slot].end(), arriving[i]);
    coming_.push_back(part.slot);
    drop(part.slot, part.bands);
    if (lengths_.length(part.slot, part.bands.front()) != 0) continue;
    for (const std::size_t group : part.groups) buffers_.begin_anew(part.slot, group);
  }
}

// Maps pages for the positions of a part that were not truncated meanwhile and launches the copies.
// The host memory stays until `drop`.
std::list<SlotSwaps::Arriving> SlotSwaps::bring_in(const Caller& caller, const Part& part) {
  const Swapped& swapped = *part.swapped;
  const Group* const group = swapped.group.get();
  const bool shared = group != nullptr && !group->pages.empty();
  const std::size_t length = lengths_.length(part.slot, part.bands.front());

  std::vector<Copy> copies;
  static_cast<void>(add_copies(copies, part, false, length, swapped.memory.front()));
  if (group != nullptr && !shared)
    static_cast<void>(add_copies(copies, part, true, length, group->head.front()));
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.layer < b.layer; });

  restore(caller, part, length, shared ? group->pages : Prefix());
  std::list<Arriving> arriving;
  try {
    order_copies(caller, part);
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const std::size_t layer = copies[i].layer;
      driver_.copy(CopyDirection::in, copies[i].at,
                   copies[i].memory->memory.get() + copies[i].offset, copies[i].bytes,
                   driver_.copy_stream());
      if (i + 1 < copies.size() && copies[i + 1].layer == layer) continue;
      arriving.push_back(
          {layer, buffers_.band_of_layer(layer), driver_.fence(driver_.copy_stream())});
    }
  } catch (...) {
    send_back(part);
    throw;
  }
  return arriving;
}

// Maps pages for the first `length` positions of a part: those of `prefix` first, then fresh ones.
void SlotSwaps::restore(const Caller& caller, const Part& part, std::size_t length,
                        const Prefix& prefix) {
  const SlotBuffers::Buffers& buffers = buffers_.of(part.slot);
  try {
    for (std::size_t group = 0; group < prefix.size(); ++group) {
      const std::shared_ptr<PageSet>& page_set = prefix[group];
      if (page_set->indices().empty()) continue;
      // What begins in the last of these pages is there, and its end in a page that is new.
      const std::size_t end = ceil_div(page_set->indices().end * buffers_.pool()->page_size(),
                                       buffers_.group(group).item_bytes);
      buffers[group]->accept(caller, {0, std::min(length, end)}, {&page_set, 1});
    }
    std::vector<Growth> growths;
    for (const std::size_t group : part.groups) {
      const std::size_t written = std::min(buffers[group]->positions().end, length);
      growths.push_back(
          {buffers[group].get(), buffers_.needed(part.slot, group, length), {written, length}});
    }
    Buffer::grow_all(caller, growths, false);
  } catch (...) {
    for (const std::size_t group : part.groups) buffers[group]->retract({});
    throw;
  }
}

// Unmaps a part's pages, after the copies from and to them, which `order_copies` has noted.
void SlotSwaps::send_back(const Part& part) noexcept {
  for (const std::size_t group : part.groups) buffers_.at(part.slot, group).retract({});
}

// The first slot of a group is back: the others will map its pages. If a refusal prevents that,
// they copy the bytes instead.
void SlotSwaps::share_again(const Caller& caller, const Part& part) noexcept {
  Group& group = *part.swapped->group;
  try {
    Prefix pages;
    for (const std::size_t i : part.groups) {
      const Interval whole{0, buffers_.page_of(i, group.length)};
      pages.push_back(buffers_.at(part.slot, i).offer(caller, {&whole, 1}).front());
    }
    group.pages = std::move(pages);
  } catch (const std::exception&) {
  }
}

// Releases the host memory of `bands`, and a group's with its last slot.
void SlotSwaps::drop(std::size_t slot, Bands bands) noexcept {
  std::vector<std::shared_ptr<Swapped>>& away = away_[slot];
  for (const std::size_t band : bands) {
    const std::shared_ptr<Swapped> left = std::exchange(away[band], nullptr);
    if (left == nullptr || std::find(away.begin(), away.end(), left) != away.end()) continue;
    release(left->memory);
    if (left->group == nullptr || --left->group->waiting != 0) continue;
    release(left->group->head);
    left->group->pages.clear();  // they stay with the slots that have mapped them
  }
}

void SlotSwaps::release(std::list<Held>& memory) noexcept {
  for (const Held& held : memory) bytes_ -= held.bytes;
  held_.splice(held_.end(), memory);
}

void SlotSwaps::forget(std::size_t slot) noexcept {
  drop(slot, lengths_.or_all({}));
  arriving_[slot].clear();
}

void SlotSwaps::settle() noexcept {
  if (coming_.empty() && held_.empty()) return;
  try {
    std::erase_if(coming_, [&](std::size_t slot) {
      const FencePtr last = last_arrival(slot);
      if (last != nullptr && !driver_.passed(*last)) return false;
      arriving_[slot].clear();
      return true;
    });
    for (auto held = held_.begin(); held != held_.end();) {
      if (!held->until) held->until = driver_.fence(driver_.copy_stream());
      const FencePtr& until = *held->until;
      if (until != nullptr && !driver_.passed(*until)) return;  // later ones have not passed either
      held = held_.erase(held);
    }
  } catch (const std::exception&) {
    // Asked again by the next operation.
  }
}

void SlotSwaps::close() noexcept {
  if (held_.empty()) return;
  std::shared_ptr<std::list<Held>> rest;
  try {
    const FencePtr copied = driver_.fence(driver_.copy_stream());
    if (copied == nullptr || driver_.passed(*copied)) return held_.clear();
    rest = std::make_shared<std::list<Held>>();
    rest->swap(held_);
    buffers_.pool()->keep_until(copied, rest);
  } catch (const std::exception&) {
    // Nothing says when the device's copies end: this memory is leaked.
    if (auto* const lost = new (std::nothrow) std::list<Held>)
      lost->swap(rest == nullptr ? held_ : *rest);
  }
}

bool SlotSwaps::is_away(std::size_t slot, std::optional<std::size_t> layer) const {
  const std::vector<std::shared_ptr<Swapped>>& away = away_[slot];
  if (layer) return away[buffers_.band_of_layer(*layer)] != nullptr;
  return std::any_of(away.begin(), away.end(), [](const auto& part) { return part != nullptr; });
}

std::size_t SlotSwaps::shared_positions(std::size_t slot,
                                        std::unordered_set<const void*>& groups) const {
  const std::shared_ptr<Swapped>& swapped = away_[slot].front();
  const Group* const group = swapped == nullptr ? nullptr : swapped->group.get();
  if (group == nullptr || (group->pages.empty() && groups.insert(group).second)) return 0;
  return group->length;
}

FencePtr SlotSwaps::last_arrival(std::size_t slot) const {
  return arriving_[slot].empty() ? nullptr : arriving_[slot].back().over;
}

FencePtr SlotSwaps::copies(std::size_t slot, std::optional<std::size_t> layer) {
  settle();
  if (lengths_.state(slot) == SlotState::swapped) return away_[slot].front()->copied;
  if (!layer) {
    // One fence after copies in both directions: they run in one stream.
    return is_away(slot, layer) ? driver_.fence(driver_.copy_stream()) : last_arrival(slot);
  }
  const std::size_t band = buffers_.band_of_layer(*layer);
  if (away_[slot][band] != nullptr) return away_[slot][band]->copied;
  const std::list<Arriving>& arriving = arriving_[slot];
  for (auto copy = arriving.rbegin(); copy != arriving.rend(); ++copy) {
    if (copy->band == band && copy->layer <= *layer) return copy->over;
  }
  return nullptr;
}

FencePtr SlotSwaps::arrivals() {
  settle();
  return coming_.empty() ? nullptr : driver_.fence(driver_.copy_stream());
}

void SlotSwaps::await_arrival(const Caller& caller, std::size_t slot) {
  settle();
  const auto patience = buffers_.pool()->options().patience;
  if (wait_for(driver_, last_arrival(slot), patience)) return;
  throw TimedOut(caller.operation, patience,
                 "slot " + std::to_string(slot) +
                     " is still being copied from host memory; it stays as it is");
}

void SlotSwaps::order_arrival(const Caller& caller, std::size_t slot) {
  settle();
  if (const FencePtr last = last_arrival(slot)) driver_.order(caller.stream, *last);
}

void SlotSwaps::await_departure(const Caller& caller, std::size_t slot,
                                std::optional<std::size_t> layer) const {
  const bool whole = lengths_.state(slot) == SlotState::swapped;
  std::vector<const Buffer*> buffers;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const std::size_t band = buffers_.group(group).band;
    if (lengths_.is_away(slot, band) && (whole || !layer || buffers_.band_of_layer(*layer) == band))
      buffers.push_back(&buffers_.at(slot, group));
  }
  if (buffers.empty()) return;
  const std::shared_ptr<PagePool>& pool = buffers_.pool();
  PoolLock lock(pool);
  pool->await(
      lock, caller.operation, "the unmapping of a slot that was swapped out", [&]() VT_LOCKED {
        static_cast<void>(pool->settle_all(lock));
        return std::all_of(buffers.begin(), buffers.end(), [](const Buffer* buffer) VT_LOCKED {
          return buffer->pages_leaving() == 0;
        });
      });
}

}  // namespace vtensor
