#include "kv/slot_swaps.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/align.h"
#include "base/errors.h"

namespace vtensor {

SlotSwaps::SlotSwaps(SlotBuffers& buffers, const SlotLengths& lengths)
    : buffers_(buffers),
      lengths_(lengths),
      driver_(buffers.pool()->driver()),
      away_(buffers.shape().slots, std::vector<Image*>(buffers.shape().bands)) {}

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

// Adds the copies between an image and the first `length` positions of a part: those in the pages
// of its head if the image is that, else those past them. Returns the bytes of the image.
std::size_t SlotSwaps::add_copies(std::vector<Copy>& copies, const Part& part, std::size_t length,
                                  const Image& image) const {
  const Image* const head = part.image->head;
  std::size_t offset = 0;
  for (const std::size_t i : part.groups) {
    const RowGroup& group = buffers_.group(i);
    const std::size_t shared = head == nullptr ? 0 : head->length;
    const std::size_t split = buffers_.page_of(i, shared) * buffers_.pool()->page_size();
    const std::size_t kept = split != 0 ? split : buffers_.begin(part.slot, i) * group.item_bytes;
    const Interval left =
        &image == head ? Interval{0, split} : Interval{kept, image.length * group.item_bytes};
    if (left.empty()) continue;
    const Interval wanted = intersection(left, {0, length * group.item_bytes});
    std::size_t row = 0;
    for (const RowContent& content : group.contents) {
      for (const std::size_t end = row + content.rows(); row < end; ++row, offset += left.size()) {
        if (wanted.empty()) continue;
        const Address at =
            buffers_.range(i)->range().address(row * buffers_.shape().slots + part.slot, 0);
        copies.push_back(
            {content.layers.front(), at + wanted.begin, &image, offset, wanted.size()});
      }
    }
  }
  return offset;
}

// Adds a head to `images` if slots begin with the same pages as the first one: whole units, so that
// page sets can keep them.
void SlotSwaps::join(std::span<const Part> parts, std::list<Image>& images) const {
  Image head{.length = buffers_.shape().max_length};
  std::vector<Image*> joined{parts.front().image};
  const PoolLock lock(buffers_.pool());
  const Part& first = parts.front();
  for (const Part& part : parts.subspan(1)) {
    std::size_t length = std::min(first.image->length, part.image->length);
    for (const std::size_t i : part.groups) {
      const Buffer& buffer = buffers_.at(part.slot, i);
      const std::size_t pages = buffer.shared_with(buffers_.at(first.slot, i));
      const bool whole = buffers_.begin(part.slot, i) == 0;
      // The longest length with `pages` whole pages: a group swapped again has the same length.
      const std::size_t most =
          ((pages + 1) * buffers_.pool()->page_size() - 1) / buffers_.group(i).item_bytes;
      length = std::min(length, whole ? most : 0);
    }
    length -= length % buffers_.unit();
    if (length == 0) continue;
    head.length = std::min(head.length, length);
    joined.push_back(part.image);
  }
  if (joined.size() == 1) return;
  images.push_back(std::move(head));
  for (Image* const image : joined) image->head = &images.back();
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
  std::list<Image> made;
  for (Part& part : parts) {
    part.image = &made.emplace_back();
    part.image->length = lengths_.length(part.slot, part.bands.front());
  }
  if (bands.empty()) join(parts, made);

  std::vector<Copy> copies;
  for (const Part& part : parts) {
    for (Image* const image : {part.image, part.image->head}) {
      if (image == nullptr || image->bytes != 0) continue;
      image->bytes = add_copies(copies, part, part.image->length, *image);
      if (image->bytes != 0) image->memory = allocate(image->bytes);
    }
  }
  // Copies that were launched before a refusal still write to them.
  const auto first = made.begin();
  unused_.splice(unused_.end(), made);
  for (const Part& part : parts) order_copies(caller, part);
  for (const auto& [layer, at, image, offset, bytes] : copies)
    driver_.copy(CopyDirection::out, at, image->memory.get() + offset, bytes,
                 driver_.copy_stream());
  const FencePtr copied = driver_.fence(driver_.copy_stream());
  // From here on nothing is refused.
  images_.splice(images_.end(), unused_, first, unused_.end());
  for (const Part& part : parts) {
    part.image->copied = copied;
    part.image->uses = part.bands.size();
    if (part.image->head != nullptr) ++part.image->head->uses;
    for (const std::size_t band : part.bands) away_[part.slot][band] = part.image;
    arriving_.remove_if([&](const Arriving& copy) {
      return copy.slot == part.slot && names(part.bands, buffers_.band_of_layer(copy.layer));
    });
    send_back(part);
  }
}

void SlotSwaps::swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands) {
  std::vector<Part> parts = parts_of(slots, bands);
  for (Part& part : parts) part.image = away_[part.slot][part.bands.front()];
  std::list<Arriving> arriving;
  std::size_t here = 0;        // parts that are
  std::vector<Image*> opened;  // heads whose pages are here by this call
  opened.reserve(parts.size());
  try {
    for (const Part& part : parts) {
      bring_in(caller, part, arriving);
      ++here;
      Image* const head = part.image->head;
      if (head == nullptr || !head->pages.empty() || head->uses == 1) continue;
      opened.push_back(head);
      share_again(caller, part);
    }
  } catch (...) {
    for (std::size_t i = 0; i < here; ++i) send_back(parts[i]);
    for (Image* const head : opened) head->pages.clear();
    throw;
  }
  // From here on nothing is refused.
  arriving_.splice(arriving_.end(), arriving);
  for (const Part& part : parts) drop(part.slot, part.bands);
}

// Maps pages for the positions of a part that were not truncated meanwhile, and launches the
// copies. The host memory stays until `drop`.
void SlotSwaps::bring_in(const Caller& caller, const Part& part, std::list<Arriving>& arriving) {
  const Image* const head = part.image->head;
  const bool shared = head != nullptr && !head->pages.empty();
  const std::size_t length = lengths_.length(part.slot, part.bands.front());

  std::vector<Copy> copies;
  static_cast<void>(add_copies(copies, part, length, *part.image));
  if (head != nullptr && !shared) static_cast<void>(add_copies(copies, part, length, *head));
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.layer < b.layer; });

  restore(caller, part, length, shared ? head->pages : Prefix());
  try {
    order_copies(caller, part);
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const std::size_t layer = copies[i].layer;
      driver_.copy(CopyDirection::in, copies[i].at,
                   copies[i].image->memory.get() + copies[i].offset, copies[i].bytes,
                   driver_.copy_stream());
      if (i + 1 < copies.size() && copies[i + 1].layer == layer) continue;
      arriving.push_back({part.slot, layer, driver_.fence(driver_.copy_stream())});
    }
  } catch (...) {
    send_back(part);
    throw;
  }
}

// Maps pages for the first `length` positions of a part: those of `prefix` first, then fresh ones.
void SlotSwaps::restore(const Caller& caller, const Part& part, std::size_t length,
                        const Prefix& prefix) {
  const SlotBuffers::Buffers& buffers = buffers_.of(part.slot);
  try {
    for (std::size_t group = 0; group < prefix.size(); ++group) {
      const std::shared_ptr<PageSet>& page_set = prefix[group];
      if (page_set->indices().empty()) continue;
      // An item that begins in the last shared page is there, and its end in a fresh page.
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
    send_back(part);
    throw;
  }
}

// Unmaps a part's pages, after the copies from and to them, which `order_copies` has noted. Its
// buffers keep the position at which they begin.
void SlotSwaps::send_back(const Part& part) noexcept {
  for (const std::size_t group : part.groups) {
    const std::size_t begin = buffers_.begin(part.slot, group);
    buffers_.at(part.slot, group).shrink_to({begin, begin});
  }
}

// The first slot of a head is back: the others will map its pages. If a refusal prevents that,
// they copy the bytes instead.
void SlotSwaps::share_again(const Caller& caller, const Part& part) noexcept {
  Image& head = *part.image->head;
  try {
    Prefix pages;
    for (const std::size_t i : part.groups) {
      const Interval whole{0, buffers_.page_of(i, head.length)};
      pages.push_back(buffers_.at(part.slot, i).offer(caller, {&whole, 1}).front());
    }
    head.pages = std::move(pages);
  } catch (const std::exception&) {
  }
}

void SlotSwaps::end_use(Image& image) noexcept {
  if (--image.uses != 0) return;
  image.pages.clear();  // they stay with the slots that have mapped them
  const auto at = std::find_if(images_.begin(), images_.end(),
                               [&image](const Image& one) { return &one == &image; });
  unused_.splice(unused_.end(), images_, at);
}

// Ends the use of the images of `bands`, and of their heads.
void SlotSwaps::drop(std::size_t slot, Bands bands) noexcept {
  for (const std::size_t band : bands) {
    Image* const image = std::exchange(away_[slot][band], nullptr);
    if (image == nullptr) continue;
    end_use(*image);
    if (image->uses == 0 && image->head != nullptr) end_use(*image->head);
  }
}

void SlotSwaps::forget(std::size_t slot) noexcept {
  drop(slot, lengths_.or_all({}));
  arriving_.remove_if([slot](const Arriving& copy) { return copy.slot == slot; });
}

void SlotSwaps::forget_ended() noexcept {
  try {
    while (!arriving_.empty()) {
      const FencePtr& over = arriving_.front().over;
      if (over != nullptr && !driver_.passed(*over)) break;
      arriving_.pop_front();
    }
    for (auto image = unused_.begin(); image != unused_.end();) {
      const auto it = image++;
      if (!it->until) it->until = driver_.fence(driver_.copy_stream());
      if (*it->until != nullptr && !driver_.passed(**it->until)) continue;
      unused_.erase(it);
    }
  } catch (const std::exception&) {
    // Asked again by the next operation.
  }
}

void SlotSwaps::close() noexcept {
  if (unused_.empty()) return;
  std::shared_ptr<std::list<Image>> rest;
  try {
    const FencePtr copied = driver_.fence(driver_.copy_stream());
    if (copied == nullptr || driver_.passed(*copied)) return unused_.clear();
    rest = std::make_shared<std::list<Image>>();
    rest->swap(unused_);
    buffers_.pool()->keep_until(copied, rest);
  } catch (const std::exception&) {
    // Nothing says when the device's copies end: this memory is leaked.
    if (auto* const lost = new (std::nothrow) std::list<Image>)
      lost->swap(rest == nullptr ? unused_ : *rest);
  }
}

bool SlotSwaps::is_away(std::size_t slot, std::optional<std::size_t> layer) const {
  const std::vector<Image*>& away = away_[slot];
  if (layer) return away[buffers_.band_of_layer(*layer)] != nullptr;
  return std::any_of(away.begin(), away.end(), [](const Image* image) { return image != nullptr; });
}

void SlotSwaps::hide_absent(std::span<std::int64_t> lengths) const noexcept {
  for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
    if (is_away(slot, std::nullopt)) lengths[slot] = 0;
  }
  for (const Arriving& copy : arriving_) lengths[copy.slot] = 0;
}

std::size_t SlotSwaps::bytes() const {
  std::size_t bytes = 0;
  for (const Image& image : images_) bytes += image.bytes;
  return bytes;
}

std::size_t SlotSwaps::shared_positions(std::size_t slot,
                                        std::unordered_set<const void*>& heads) const {
  const Image* const image = away_[slot].front();
  const Image* const head = image == nullptr ? nullptr : image->head;
  if (head == nullptr || (head->pages.empty() && heads.insert(head).second)) return 0;
  return head->length;
}

// The fence after a slot's copies. With `layer`: after the copies into rows of one band that this
// layer or an earlier one reads first.
FencePtr SlotSwaps::last_arrival(std::size_t slot, std::optional<std::size_t> layer) const {
  for (auto copy = arriving_.rbegin(); copy != arriving_.rend(); ++copy) {
    if (copy->slot != slot) continue;
    if (!layer || (copy->layer <= *layer &&
                   buffers_.band_of_layer(copy->layer) == buffers_.band_of_layer(*layer)))
      return copy->over;
  }
  return nullptr;
}

FencePtr SlotSwaps::copies(std::size_t slot, std::optional<std::size_t> layer) {
  forget_ended();
  if (lengths_.state(slot) == SlotState::swapped) return away_[slot].front()->copied;
  if (!layer) {
    // One fence after copies in both directions: they run in one stream.
    return is_away(slot, layer) ? driver_.fence(driver_.copy_stream()) : last_arrival(slot);
  }
  const Image* const image = away_[slot][buffers_.band_of_layer(*layer)];
  return image != nullptr ? image->copied : last_arrival(slot, layer);
}

FencePtr SlotSwaps::arrivals() {
  forget_ended();
  return arriving_.empty() ? nullptr : driver_.fence(driver_.copy_stream());
}

void SlotSwaps::await_arrival(const Caller& caller, std::size_t slot) {
  const auto patience = buffers_.pool()->options().patience;
  if (wait_for(driver_, last_arrival(slot), patience)) return;
  throw TimedOut(caller.operation, patience,
                 "slot " + std::to_string(slot) +
                     " is still being copied from host memory; it stays as it is");
}

void SlotSwaps::order_arrival(const Caller& caller, std::size_t slot) {
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
        static_cast<void>(pool->finish_unmapping(lock));
        return std::all_of(buffers.begin(), buffers.end(), [](const Buffer* buffer) VT_LOCKED {
          return buffer->pages_leaving() == 0;
        });
      });
}

}  // namespace vtensor
