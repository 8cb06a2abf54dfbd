#include "kv/slot_buffers.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/fault_report.h"

namespace vtensor {

namespace {

// Reports of faults in a row group: which layer, slot and token, and why.
class SlotFaults final : public faults::Range {
 public:
  SlotFaults(const SlotCacheShape& shape, RowGroup group,
             std::shared_ptr<const SlotLengths> lengths)
      : slots_(shape.slots),
        max_length_(shape.max_length),
        group_(std::move(group)),
        lengths_(std::move(lengths)) {}

  void name(faults::Text& text, std::uintptr_t at) const noexcept override {
    std::size_t first_row = 0;
    auto content = group_.contents.begin();
    while (first_row + content->rows() <= row_of(at) / slots_) first_row += (content++)->rows();
    const std::size_t part_bytes = group_.item_bytes / content->layers.size();
    const std::size_t part = in_row(at) % group_.item_bytes / part_bytes;
    const std::size_t layer = content->layers[part];
    text << (content->values ? "V" : "K") << " of layer " << layer;
    if (content->heads != 0) text << ", head " << row_of(at) / slots_ - first_row;
    text << ", slot " << row_of(at) % slots_ << ", token " << token_of(at) << " of the KVCache of "
         << slots_ << " slots of " << max_length_ << " tokens with cache[" << layer << "]["
         << (content->values ? "1" : "0") << "] at ";
    text.address(base() + bytes() / group_.rows * first_row + part * part_bytes);
  }

  void explain(faults::Text& text, std::uintptr_t at) const noexcept override {
    const std::size_t token = token_of(at);
    const auto [state, length, away, closed] = lengths_->glimpse(row_of(at) % slots_, group_.band);
    if (closed) {
      text << "no page is mapped there, because the cache is closed: make a new one";
    } else if (token >= max_length_) {
      text << "no page is ever mapped there: check what computed the address";
    } else if (state == SlotState::free) {
      text << "no page is mapped there, because the slot is free: alloc() names the slots in use, "
              "and step() gives them pages";
    } else if (state == SlotState::swapped) {
      text << "no page is mapped there, because the slot is swapped out: call swap_in() first";
    } else if (away) {
      text << "no page is mapped there, because band " << group_.band
           << " of the slot is swapped out: call swap_in() for it first";
    } else if (token >= length) {
      text << "no page is mapped there, because the slot has " << length
           << " tokens: call step() first, with a length of at least " << token + 1 << " for it";
    } else if (token < group_.first_seen(length)) {
      text << "no page is mapped there, because the layer's window of " << group_.window
           << " has given back what is before token " << group_.first_seen(length)
           << ": write what the window can still see";
    } else {
      text << "the slot has " << length
           << " tokens now, so a page is there: it came after the fault, or is shared and "
              "read-only; call unshare() before such a write";
    }
  }

 private:
  std::size_t row_bytes() const noexcept { return bytes() / (group_.rows * slots_); }
  std::size_t row_of(std::uintptr_t at) const noexcept { return (at - base()) / row_bytes(); }
  std::size_t in_row(std::uintptr_t at) const noexcept { return (at - base()) % row_bytes(); }
  std::size_t token_of(std::uintptr_t at) const noexcept { return in_row(at) / group_.item_bytes; }

  const std::size_t slots_, max_length_;
  const RowGroup group_;
  const std::shared_ptr<const SlotLengths> lengths_;
};

}  // namespace

SlotBuffers::SlotBuffers(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape)
    : pool_(pool), shape_(std::move(shape)), buffers_(shape_.slots, Buffers(groups())) {
  for (const RowGroup& group : shape_.row_groups) {
    for (const RowContent& content : group.contents) {
      for (const std::size_t layer : content.layers) {
        band_of_layer_.resize(std::max(band_of_layer_.size(), layer + 1));
        band_of_layer_[layer] = group.band;
      }
    }
  }
  ranges_.reserve(groups());
}

// Once the tables are made, so that what this throws closes the ranges made before.
SlotBuffers::SlotBuffers(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape,
                         const std::shared_ptr<const SlotLengths>& lengths, const Caller& caller)
    : SlotBuffers(pool, std::move(shape)) {
  try {
    for (const RowGroup& group : shape_.row_groups) {
      const auto rows = checked_multiply(group.rows, shape_.slots);
      if (!rows) throw CapacityExceeded("too many rows");
      // cache[layer] begins at the first token of slot 0. Kernels are given that address whether or
      // not a page is mapped there.
      const std::size_t first_token = ceil_div(group.item_bytes, pool_->page_size());
      ranges_.push_back(Buffer::make(pool_, {*rows, group.item_bytes, shape_.max_length}, caller,
                                     std::make_unique<SlotFaults>(shape_, group, lengths),
                                     shape_.slots, first_token));
    }
  } catch (const CapacityExceeded&) {
    throw CapacityExceeded("[KVCache] ", shape_.slots, " slots of ", shape_.max_length,
                           " tokens pass the address space: lower max_batch or max_len");
  }
}

std::vector<std::shared_ptr<Buffer>> SlotBuffers::all() const {
  std::vector<std::shared_ptr<Buffer>> all;
  for (const Buffers& buffers : buffers_) {
    std::copy_if(buffers.begin(), buffers.end(), std::back_inserter(all),
                 [](const auto& buffer) { return buffer != nullptr; });
  }
  return all;
}

std::vector<std::size_t> SlotBuffers::groups_of(Bands bands) const {
  std::vector<std::size_t> groups;
  for (std::size_t group = 0; group < shape_.row_groups.size(); ++group) {
    if (names(bands, shape_.row_groups[group].band)) groups.push_back(group);
  }
  return groups;
}

std::size_t SlotBuffers::band_of_layer(std::size_t layer) const {
  return band_of_layer_[std::min(layer,
                                 band_of_layer_.size() - 1)];  // past the last: no copy is later
}

std::size_t SlotBuffers::unit() const {
  std::size_t unit = 1;
  for (const RowGroup& group : shape_.row_groups)
    unit = std::max(unit, ceil_div(pool_->page_size(), group.item_bytes));
  return unit;
}

Interval SlotBuffers::needed(std::size_t slot, std::size_t group, std::size_t length) const {
  if (length == 0) return {};
  return {begin(slot, group), std::min(shape_.max_length, length + shape_.tail())};
}

bool SlotBuffers::place(const Caller& caller, std::size_t slot) {
  Buffers& buffers = buffers_[slot];
  std::size_t placed = 0;
  const auto undo = [&] {
    for (std::size_t group = 0; group < placed; ++group) buffers[group]->abandon();
  };
  try {
    for (; placed < groups(); ++placed) {
      std::shared_ptr<Buffer>& buffer = buffers[placed];
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
      const std::shared_ptr<Buffer>& range = ranges_[placed];
      const std::size_t pages = range->range().row_bytes() / pool_->page_size();
      buffer = Buffer::place(range, range->range().address(slot, 0),
                             {.rows = shape_.row_groups[placed].rows,
                              .item_bytes = shape_.row_groups[placed].item_bytes,
                              .capacity = shape_.max_length,
                              .row_stride = pages * shape_.slots},
                             caller);
    }
  } catch (...) {
    undo();
    throw;
  }
  return true;
}

void SlotBuffers::abandon(std::size_t slot) noexcept {
  for (const std::shared_ptr<Buffer>& buffer : buffers_[slot]) buffer->abandon();
}

void SlotBuffers::use(const Caller& caller, std::size_t slot) {
  for (const std::shared_ptr<Buffer>& buffer : buffers_[slot]) buffer->use(caller);
}

void SlotBuffers::give_back_passed(std::size_t slot, std::size_t group,
                                   std::size_t length) noexcept {
  Buffer& buffer = at(slot, group);
  const Interval kept{shape_.row_groups[group].first_seen(length), buffer.positions().end};
  if (page_of(group, kept.begin) > page_of(group, begin(slot, group)))
    buffer.shrink_to(kept, shape_.max_length);
}

void SlotBuffers::truncate(std::size_t slot, std::size_t group, std::size_t length) noexcept {
  Buffer& buffer = at(slot, group);
  Interval kept = needed(slot, group, length);
  kept.end = std::min(kept.end, buffer.positions().end);  // a prefix comes without its tile
  buffer.shrink_to(kept, length + shape_.tail() + shape_.lookahead);
}

SharedRange* SlotBuffers::share(const Caller& caller) {
  for (std::size_t group = 0; group < groups(); ++group)
    ranges_[group]->share(caller.operation, group == 0 ? shape_.slots : 0);
  const PoolLock lock(pool_);
  for (const Buffers& buffers : buffers_) {
    for (std::size_t group = 0; group < groups(); ++group) {
      if (buffers[group] == nullptr || buffers[group]->range().shared()) continue;
      buffers[group]->range().show_in(ranges_[group]->range().shared());
    }
  }
  return ranges_.front()->range().shared().get();
}

void SlotBuffers::close_to_readers() noexcept {
  const PoolLock lock(pool_);
  for (const std::shared_ptr<Buffer>& range : ranges_) {
    if (range->range().shared()) range->range().shared()->close();
  }
}

void SlotBuffers::close() noexcept {
  {
    const PoolLock lock(pool_);
    for (const Buffers& buffers : buffers_) {
      for (const std::shared_ptr<Buffer>& buffer : buffers) {
        if (buffer) buffer->keep_nothing();
      }
    }
  }
  buffers_.clear();
  for (const std::shared_ptr<Buffer>& range : ranges_) range->abandon();
  ranges_.clear();
}

}  // namespace vtensor
