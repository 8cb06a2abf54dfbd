// How views of a cache's layers find their cache: through the storage that all of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "bind/operation.h"
#include "kv/slot_cache.h"

namespace vtensor::bind {

namespace nb = nanobind;

// What a KVCache shares with the views of its layers, and with the pool, for which it gives up
// prefixes between two operations. Both may hold it for longer than the cache lives.
struct OpenCache final : Shrinker {
  // The result of `get`, which reads the cache between two operations. Throws Closed, and Error in
  // a forked child.
  template <typename Get>
  auto read(const Get& get) {
    const auto lock = mutex.hold("KVCache");
    if (cache == nullptr) throw Closed("[KVCache] the cache is closed: make a new one");
    return get(std::as_const(*cache));
  }
  std::optional<std::size_t> shrink(std::size_t pages) noexcept override {
    std::size_t given = 0;
    const bool between = between_operations([&] { given = cache->prefixes().evict(pages); });
    return between ? std::optional(given) : std::nullopt;
  }
  std::size_t shrinkable() noexcept override {
    if (mutex.is_mine()) return 0;
    between_operations([this] {
      const PoolLock lock(cache->pool());
      kept_ = cache->prefixes().evictable(SIZE_MAX);
    });
    return kept_;
  }

  OwnedSlotCache cache;  // null once closed; set with the GIL held, during an operation
  OperationMutex mutex{"cache"};

 private:
  // False if an operation is under way.
  template <typename Body>
  bool between_operations(const Body& body) noexcept {
    if (!mutex.try_lock()) return false;
    try {
      if (cache == nullptr) {
        kept_ = 0;
      } else {
        body();
      }
    } catch (const std::exception&) {
      // No memory for the eviction: the prefixes stay.
    }
    mutex.unlock();
    return true;
  }

  std::atomic<std::size_t> kept_{0};  // pages of prefixes, as last counted
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
