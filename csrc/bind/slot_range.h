// How views of a cache's layers find their cache: through the storage that all of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "bind/operation.h"
#include "bind/torch_bridge.h"
#include "kv/slot_cache.h"

namespace vtensor::bind {

namespace nb = nanobind;

// What a KVCache shares with the views of its layers, and with the mapper.
struct OpenCache {
  OwnedSlotCache cache;  // null once closed; set with the GIL held, during an operation
  OperationMutex mutex{"cache"};
};

// Reads a cache between two operations. Throws Closed, and Error in a forked child.
class CacheReading {
 public:
  explicit CacheReading(OpenCache& open);
  const SlotCache* operator->() const { return cache_; }

 private:
  const std::unique_lock<OperationMutex> lock_;
  const SlotCache* const cache_;
};

// Rows of a tensor that are slots of a cache, or parts of slots.
struct SlotRows {
  std::size_t slots = 0;             // of the cache
  std::size_t row = 0, apart = 0;    // the first row of the range, and the distance between rows
  std::int64_t first = 0, step = 0;  // the first token of each row, and tokens between positions

  std::size_t slot(std::size_t i) const { return (row + i * apart) % slots; }
  // Tokens that a slot must have so that the first `positions` of a row exist.
  std::int64_t tokens(std::int64_t positions) const {
    return positions == 0 ? 0 : first + (positions - 1) * step + 1;
  }
};

// The first positions of a row, which a kernel reads or writes.
struct RowNeed {
  std::size_t row;
  std::int64_t positions;
};

// The address range of one row group. Row r of slot s is its row r * slots + s.
class SlotRange {
 public:
  SlotRange(std::shared_ptr<OpenCache> open, std::size_t group, nb::object cache);

  // Sets `range` as an attribute of `storage`, where all views find it. Keeps nothing alive.
  static void mark(nb::handle storage, SlotRange range);
  // The attribute; None if `tensor` is over other memory.
  static nb::object of(nb::handle tensor);

  // `tensor` as rows along dimension 0 with positions along `positions_dim`, or as one row if that
  // is 0. Nothing if it does not consist of whole tokens of rows.
  std::optional<SlotRows> rows(const TensorFacts& tensor, std::size_t positions_dim) const;

  // Throws InvalidArgument for the first slot with fewer tokens than are needed.
  void require(const char* operation, const SlotRows& rows, std::span<const RowNeed> needed) const;

  // The KVCache. Throws Closed if it is closed or gone.
  nb::object open_cache() const;

 private:
  std::shared_ptr<OpenCache> open_;
  nb::object cache_;  // a weak reference
  Address begin_;
  std::size_t group_, slots_, row_bytes_, item_bytes_;
};

}  // namespace vtensor::bind
