// What views of a cache's layers know of their cache, by the storage that all of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "bind/dlpack_abi.h"
#include "bind/operation_lock.h"
#include "kv/slot_cache.h"

namespace vtensor::bind {

namespace nb = nanobind;

// A cache as its views see it; null once it is closed. Read and written with the GIL held.
struct SlotCacheView {
  const SlotCache* cache = nullptr;
  OperationMutex* mutex = nullptr;
};

// Rows of a tensor that are slots of a cache, or parts of slots.
struct SlotRows {
  std::size_t slots = 0;             // of the cache
  std::size_t row = 0, apart = 0;    // of the range: the first, and from one to the next
  std::int64_t first = 0, step = 0;  // the token each begins with; tokens from position to position

  std::size_t slot(std::size_t i) const { return (row + i * apart) % slots; }
  // Tokens that a slot must have for the first `positions` of a row to be there.
  std::int64_t tokens(std::int64_t positions) const {
    return positions == 0 ? 0 : first + (positions - 1) * step + 1;
  }
};

// The memory of one kind of rows: row r of slot s is its (r * slots + s)-th.
class SlotRange {
 public:
  SlotRange(std::shared_ptr<const SlotCacheView> view, std::size_t kind, nb::object cache);

  // Notes it on `storage`, which all views of it share; keeps nothing alive.
  static void mark(nb::handle storage, SlotRange range);
  // What was noted; None where `tensor` is over other memory.
  static nb::object of(nb::handle tensor);

  // `tensor` as rows along dimension 0 with positions along `positions_dim`; one row where that is
  // 0. Nothing where it is no such rows.
  std::optional<SlotRows> rows(const dlpack::Tensor& tensor, std::size_t positions_dim) const;

  // What is read and written: of the first `count` rows, or of those that `index` names if it is
  // not empty, the first `lengths` positions, of all rows alike where that is one number, and
  // `added` more.
  struct Needed {
    std::span<const std::int64_t> lengths;
    std::int64_t added;
    std::span<const std::int64_t> index;
    std::size_t count;
  };
  struct Missing {
    std::size_t slot;
    std::int64_t tokens, has;
  };
  // The first slot that has fewer tokens than are needed of it. `cache` is the KVCache.
  std::optional<Missing> missing(const SlotRows& rows, const Needed& needed,
                                 nb::handle cache) const;

  // The KVCache; raises Closed where it is closed, or gone.
  nb::object open_cache() const;

 private:
  std::shared_ptr<const SlotCacheView> view_;
  nb::object cache_;  // a weak reference
  Address begin_;
  std::size_t slots_, row_bytes_, item_bytes_;
};

}  // namespace vtensor::bind
