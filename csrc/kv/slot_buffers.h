// The rows of a cache's slots: one address range for each row group, which all slots share, and
// each slot's buffers in those ranges. The addresses stay for the cache's life.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/interval.h"
#include "kv/slot_lengths.h"
#include "kv/slot_shape.h"
#include "policy/page_pool.h"
#include "tensor/buffer.h"
#include "vmm/caller.h"

namespace vtensor {

class SlotBuffers {
 public:
  using Buffers = std::vector<std::shared_ptr<Buffer>>;  // one of each row group

  // Reserves the addresses. `lengths` is for reports of faults. Throws CapacityExceeded,
  // DriverError.
  SlotBuffers(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape,
              const std::shared_ptr<const SlotLengths>& lengths, const Caller& caller);
  ~SlotBuffers() { close(); }
  SlotBuffers& operator=(SlotBuffers&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const SlotCacheShape& shape() const { return shape_; }
  // Whether pages are to be ready before a step needs them.
  bool looks_ahead() const { return shape_.lookahead != 0 && pool_->looks_ahead(); }
  std::size_t groups() const { return shape_.row_groups.size(); }
  const RowGroup& group(std::size_t group) const { return shape_.row_groups[group]; }
  // The buffer whose range a row group's rows lie in: row r of slot s is its row r * slots + s.
  const std::shared_ptr<Buffer>& range(std::size_t group) const { return ranges_[group]; }
  const Buffers& ranges() const { return ranges_; }
  // A slot's buffers; null until the slot is first used.
  const Buffers& of(std::size_t slot) const { return buffers_[slot]; }
  Buffer& at(std::size_t slot, std::size_t group) const { return *buffers_[slot][group]; }
  // The buffers of all slots that were ever used.
  std::vector<std::shared_ptr<Buffer>> all() const;
  // The first position that the slot still has in a row group, also while it is in host memory.
  std::size_t begin(std::size_t slot, std::size_t group) const {
    return at(slot, group).positions().begin;
  }

  // The row groups of `bands`; all of them if none is named.
  std::vector<std::size_t> groups_of(Bands bands) const;
  std::size_t band_of_layer(std::size_t layer) const;
  // Positions that fill a page in every row group.
  std::size_t unit() const;
  std::size_t page_of(std::size_t group, std::size_t position) const {
    return position * shape_.row_groups[group].item_bytes / pool_->page_size();
  }
  // The positions that a slot of `length` has mapped in a row group.
  Interval needed(std::size_t slot, std::size_t group, std::size_t length) const;

  // Gives a free slot its buffers: reuses cached ones, places others where nothing is mapped. False
  // if a buffer is neither cached nor vacant any more.
  bool place(const Caller& caller, std::size_t slot);
  void abandon(std::size_t slot) noexcept;
  // Work in the caller's stream uses the slot's rows.
  void use(const Caller& caller, std::size_t slot);
  // Gives back the pages that a window no longer sees at `length` positions.
  void give_back_passed(std::size_t slot, std::size_t group, std::size_t length) noexcept;
  // Gives back the pages past `length`, its tile and its look-ahead.
  void truncate(std::size_t slot, std::size_t group, std::size_t length) noexcept;
  // Shows the pages to readers in other processes. Returns what they see of the first range, with
  // a word for each slot. Throws InvalidArgument if the pool is not shareable, DriverError.
  SharedRange* share(const Caller& caller);
  // Readers learn that nothing more comes, and keep what they have.
  void close_to_readers() noexcept;
  // Drops cached pages; the addresses are freed with the last view.
  void close() noexcept;

 private:
  SlotBuffers(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape);

  const std::shared_ptr<PagePool> pool_;
  const SlotCacheShape shape_;
  std::vector<std::size_t> band_of_layer_;  // band index of each layer
  Buffers ranges_;
  std::vector<Buffers> buffers_;  // [slot]
};

}  // namespace vtensor
