// How views of a cache's layers find their cache: through the storage that all of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <mutex>

#include "base/errors.h"
#include "bind/operation.h"
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
  explicit CacheReading(OpenCache& open)
      : lock_(open.mutex.hold("KVCache")), cache_(open.cache.get()) {
    if (cache_ == nullptr) throw Closed("[KVCache] the cache is closed: make a new one");
  }
  const SlotCache* operator->() const { return cache_; }

 private:
  const std::unique_lock<OperationMutex> lock_;
  const SlotCache* const cache_;
};

// The address range of one row group: row r of slot s is its row r * slots + s. An attribute of the
// storage over it, which keeps nothing alive.
struct SlotRange {
  static constexpr const char* kName = "_vtensor_slot_range";

  std::shared_ptr<OpenCache> open;
  nb::object cache;  // a weak reference
  std::size_t group;
  Address begin;
  std::size_t slots, row_bytes, item_bytes;
};

}  // namespace vtensor::bind
