// The half of a KVCache that Python does not see.
#include "core/slot_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/operation_lock.h"
#include "bind/released_gil.h"
#include "bind/slot_range.h"
#include "bind/torch_face.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

using Lengths = std::vector<std::int64_t>;

// Pages that an index keeps: of one run of positions, a shelf a kind.
struct KeptPrefix {
  Prefix shelves;

  std::size_t pages() const {
    std::size_t pages = 0;
    for (const auto& shelf : shelves) pages += shelf->pages();
    return pages;
  }
  bool in_use() const {
    if (shelves.empty()) return false;
    const PoolLock lock(shelves.front()->pool());
    return std::any_of(shelves.begin(), shelves.end(),
                       [](const auto& shelf) { return shelf->in_use(); });
  }
};

class CacheCore {
 public:
  CacheCore(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape) : pool_(pool) {
    refuse_in_forked_child("KVCache");
    const Caller asking = caller("KVCache");
    with_memory(*pool, asking, [&] { cache_ = std::make_unique<SlotCache>(pool, shape, asking); });
    *view_ = {cache_.get(), &mutex_};
  }
  ~CacheCore() { *view_ = {}; }

  bool step(const Lengths& lengths) {
    const Operation operation(*this, "KVCache.step");
    if (cache_->step_within(caller("KVCache.step"), lengths)) return true;
    try {
      run("KVCache.step", {}, [&](const Caller& caller) { cache_->step(caller, lengths); });
    } catch (const OutOfPages&) {
      return false;
    } catch (const DeviceOutOfMemory&) {
      return false;
    }
    return true;
  }

  std::size_t alloc(std::size_t expected) {
    const Operation operation(*this, "KVCache.alloc");
    std::size_t slot = 0;
    run("KVCache.alloc", {}, [&](const Caller& caller) { slot = cache_->alloc(caller, expected); });
    return slot;
  }

  std::size_t alloc_prefix(const std::vector<const KeptPrefix*>& parts, std::size_t length) {
    const Operation operation(*this, "KVCache.alloc");
    std::vector<Prefix> prefix;
    for (const KeptPrefix* part : parts) prefix.push_back(part->shelves);
    std::size_t slot = 0;
    run("KVCache.alloc", {},
        [&](const Caller& caller) { slot = cache_->alloc(caller, prefix, length); });
    return slot;
  }

  void free(std::size_t slot, std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.free");
    run("KVCache.free", stream, [&](const Caller& caller) { cache_->free(caller, slot); });
  }

  void truncate(std::size_t slot, std::size_t length, std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.truncate");
    run("KVCache.truncate", stream,
        [&](const Caller& caller) { cache_->truncate(caller, slot, length); });
  }

  std::vector<std::size_t> fork(std::size_t slot, std::size_t n, std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.fork");
    std::vector<std::size_t> forks;
    run("KVCache.fork", stream,
        [&](const Caller& caller) { forks = cache_->fork(caller, slot, n); });
    return forks;
  }

  std::vector<std::size_t> reorder(const std::vector<std::size_t>& slots,
                                   const std::vector<std::size_t>& sources,
                                   std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.reorder");
    std::vector<std::size_t> result;
    // Once only: part of it may have happened when it is refused.
    const Caller asking = caller("KVCache.reorder", stream);
    {
      const ReleasedGil released;
      result = cache_->reorder(asking, slots, sources);
    }
    return result;
  }

  std::vector<std::shared_ptr<KeptPrefix>> offer(std::size_t slot,
                                                 const std::vector<std::size_t>& bounds) {
    const Operation operation(*this, "KVCache.publish");
    std::vector<Prefix> parts;
    run("KVCache.publish", {},
        [&](const Caller& caller) { parts = cache_->offer(caller, slot, bounds); });
    std::vector<std::shared_ptr<KeptPrefix>> kept;
    for (Prefix& part : parts)
      kept.push_back(std::make_shared<KeptPrefix>(KeptPrefix{std::move(part)}));
    return kept;
  }

  void own(std::size_t slot, std::size_t start, std::size_t stop) {
    const Operation operation(*this, "KVCache.own");
    run("KVCache.own", {}, [&](const Caller& caller) { cache_->own(caller, slot, {start, stop}); });
  }

  void record_stream(std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.record_stream");
    // Not as a named one, which may end: it is asked again where pages go.
    cache_->use({"KVCache.record_stream", caller("KVCache.record_stream", stream).stream});
  }

  void set_aside(std::size_t slot) {
    const Operation operation(*this, "KVCache.swap_out");
    cache_->set_aside(caller("KVCache.swap_out"), slot);
  }

  void vacate(std::size_t slot, std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.swap_out");
    run("KVCache.swap_out", stream, [&](const Caller& caller) { cache_->vacate(caller, slot); });
  }

  bool restore(std::size_t slot, const KeptPrefix* prefix) {
    const Operation operation(*this, "KVCache.swap_in");
    const Prefix shelves = prefix ? prefix->shelves : Prefix();
    try {
      run("KVCache.swap_in", {},
          [&](const Caller& caller) { cache_->restore(caller, slot, shelves); });
    } catch (const OutOfPages&) {
      return false;
    } catch (const DeviceOutOfMemory&) {
      return false;
    }
    return true;
  }

  std::vector<std::size_t> shared_pages(std::size_t slot, std::size_t other) {
    const Operation operation(*this, "KVCache.swap_out");
    return cache_->shared_pages(slot, other);
  }

  std::vector<std::size_t> begins(std::size_t slot) { return read()->begins(slot); }

  // The whole range of a kind, as bytes; it keeps the addresses reserved, and no page. Views of it
  // know `cache`, a weak reference.
  nb::object storage(std::size_t kind, nb::object cache) {
    const Operation operation(*this, "KVCache");
    const std::shared_ptr<Buffer>& range = cache_->range(kind);
    Generation* generation;
    {
      const ReleasedGil released;
      generation = range->publish();
    }
    nb::object storage = TorchFace::get().storage_over(
        generation, range->slot_address(0, 0), range->reserved_bytes(), pool_->traits().device);
    SlotRange::mark(storage, SlotRange(view_, kind, std::move(cache)));
    return storage;
  }

  // Makes the memory of whole pages present, a piece at a time, without the cache's lock. Requires:
  // they are mapped, and the cache is not closed meanwhile.
  void populate(Address at, std::size_t nbytes) {
    const ReleasedGil released;
    constexpr std::size_t kPiece = std::size_t{2} << 20;
    const std::size_t page = pool_->page_size();
    const std::size_t piece = std::max<std::size_t>(kPiece / page, 1);
    for (std::size_t done = 0, n = ceil_div(nbytes, page); done < n; done += piece)
      pool_->driver().populate(at + done * page, std::min(piece, n - done));
  }

  std::size_t row_bytes(std::size_t kind) { return read()->range(kind)->row_bytes(); }
  Lengths lengths() {
    const Reading cache = read();
    return {cache->lengths().begin(), cache->lengths().end()};
  }
  std::vector<int> states() {
    const Reading cache = read();
    std::vector<int> states;
    for (std::size_t slot = 0; slot < cache->shape().slots; ++slot)
      states.push_back(static_cast<int>(cache->state(slot)));
    return states;
  }
  std::size_t length(std::size_t slot) { return read()->length(slot); }
  std::size_t covered(std::size_t position) { return read()->covered(position); }

  SlotCacheCounts counts() {
    const Operation operation(*this, "KVCache.stats");
    const ReleasedGil released;
    return cache_->counts();
  }

  std::vector<PageRecord> pages(std::size_t slot, std::size_t kind) {
    const Operation operation(*this, "KVCache.pages");
    const ReleasedGil released;
    return cache_->pages(slot, kind);
  }

  void close(std::optional<Stream> stream) {
    refuse_in_forked_child("KVCache.close");
    mutex_.lock("KVCache.close");
    const std::unique_ptr<OperationMutex, void (*)(OperationMutex*)> unlock(
        &mutex_, [](OperationMutex* mutex) { mutex->unlock(); });
    if (cache_) {
      const Caller asking = caller("KVCache.close", stream);
      closed_ = true;
      *view_ = {};
      const ReleasedGil released;
      cache_->close(asking);
      cache_.reset();
      pool_.reset();
    }
  }
  bool closed() const { return closed_; }

 private:
  // One operation: refused in a forked child, on a closed cache and beside another operation.
  class Operation {
   public:
    Operation(CacheCore& core, const char* name) : core_(core) {
      refuse_in_forked_child(name);
      core.mutex_.lock(name);
      if (core.cache_) return;
      core.mutex_.unlock();
      throw Closed("[" + std::string(name) + "] the cache is closed: make a new one");
    }
    ~Operation() { core_.mutex_.unlock(); }

   private:
    CacheCore& core_;
  };

  // A look between two operations; in a forked child without the lock, which a thread of the parent
  // may have held.
  class Reading {
   public:
    explicit Reading(CacheCore& core)
        : core_(core), locked_(!in_forked_child.load(std::memory_order_relaxed)) {
      if (locked_) core.mutex_.lock("KVCache");
      if (core.cache_) return;
      if (locked_) core.mutex_.unlock();
      throw Closed("[KVCache] the cache is closed: make a new one");
    }
    ~Reading() {
      if (locked_) core_.mutex_.unlock();
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    const SlotCache* operator->() const { return core_.cache_.get(); }

   private:
    CacheCore& core_;
    const bool locked_;
  };
  Reading read() { return Reading(*this); }

  Caller caller(const char* operation, std::optional<Stream> stream = {}) const {
    return caller_of(operation, stream, *pool_);
  }
  template <typename Body>
  void run(const char* operation, std::optional<Stream> stream, Body body) {
    const Caller asking = caller(operation, stream);
    with_memory(*pool_, asking, [&] { body(asking); });
  }

  std::shared_ptr<PagePool> pool_;  // both null once closed
  std::unique_ptr<SlotCache> cache_;
  std::atomic<bool> closed_{false};
  OperationMutex mutex_;
  const std::shared_ptr<SlotCacheView> view_ = std::make_shared<SlotCacheView>();
};

}  // namespace

void bind_slot_cache(nb::module_& module) {
  nb::class_<SlotCacheCounts>(module, "SlotCacheCounts")
      .def_ro("pages", &SlotCacheCounts::pages)
      .def_ro("distinct", &SlotCacheCounts::distinct)
      .def_ro("shared", &SlotCacheCounts::shared)
      .def_ro("lost", &SlotCacheCounts::lost);

  nb::class_<KeptPrefix>(module, "KeptPrefix")
      .def_prop_ro("pages", &KeptPrefix::pages)
      .def_prop_ro("in_use", &KeptPrefix::in_use);

  using Numbers = std::vector<std::int64_t>;
  nb::class_<SlotRange>(module, "SlotRange")
      .def_static("of", &SlotRange::of, nb::arg("tensor"),
                  nb::sig("def of(tensor: object) -> SlotRange | None"))
      .def(
          "rows",
          [](const SlotRange& range, std::size_t offset, std::size_t item_size,
             const Numbers& sizes, const Numbers& strides, std::size_t positions_dim)
              -> std::optional<std::tuple<std::vector<std::size_t>, std::int64_t, std::int64_t>> {
            const auto rows = range.rows(offset, item_size, sizes, strides, positions_dim);
            if (!rows) return {};
            std::vector<std::size_t> slots(positions_dim == 0 ? 1
                                                              : static_cast<std::size_t>(sizes[0]));
            for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = rows->slot(i);
            return std::tuple{slots, rows->first, rows->step};
          },
          nb::arg("offset"), nb::arg("item_size"), nb::arg("sizes"), nb::arg("strides"),
          nb::arg("positions_dim"))
      .def_prop_ro("cache", &SlotRange::cache);

  const auto no_stream = nb::arg("stream") = nb::none();
  nb::class_<CacheCore>(module, "CacheCore")
      .def(
          "__init__",
          [](CacheCore* core, const std::shared_ptr<PagePool>& pool, std::size_t slots,
             std::size_t max_length, std::size_t tile, std::size_t lookahead,
             const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& kinds) {
            SlotCacheShape shape{slots, max_length, tile, lookahead, {}};
            for (const auto& [rows, item_bytes, window] : kinds)
              shape.kinds.push_back({rows, item_bytes, window});
            new (core) CacheCore(pool, std::move(shape));
          },
          nb::arg("pool"), nb::arg("slots"), nb::arg("max_length"), nb::arg("tile"),
          nb::arg("lookahead"), nb::arg("kinds"))
      .def("step", &CacheCore::step)
      .def("alloc", &CacheCore::alloc)
      .def("alloc_prefix", &CacheCore::alloc_prefix)
      .def("free", &CacheCore::free, nb::arg("slot"), no_stream)
      .def("truncate", &CacheCore::truncate, nb::arg("slot"), nb::arg("length"), no_stream)
      .def("fork", &CacheCore::fork, nb::arg("slot"), nb::arg("n"), no_stream)
      .def("reorder", &CacheCore::reorder, nb::arg("slots"), nb::arg("sources"), no_stream)
      .def("offer", &CacheCore::offer)
      .def("own", &CacheCore::own)
      .def("record_stream", &CacheCore::record_stream, no_stream)
      .def("vacate", &CacheCore::vacate, nb::arg("slot"), no_stream)
      .def("set_aside", &CacheCore::set_aside)
      .def("restore", &CacheCore::restore, nb::arg("slot"), nb::arg("prefix") = nb::none())
      .def("shared_pages", &CacheCore::shared_pages)
      .def("begins", &CacheCore::begins)
      .def("storage", &CacheCore::storage, nb::arg("kind"), nb::arg("cache"))
      .def("populate", &CacheCore::populate, nb::arg("at"), nb::arg("nbytes"))
      .def("row_bytes", &CacheCore::row_bytes)
      .def("length", &CacheCore::length)
      .def("covered", &CacheCore::covered)
      .def("counts", &CacheCore::counts)
      .def("pages", &CacheCore::pages)
      .def("close", &CacheCore::close, no_stream)
      .def_prop_ro("lengths", &CacheCore::lengths)
      .def_prop_ro("states", &CacheCore::states)
      .def_prop_ro("closed", &CacheCore::closed);
}

}  // namespace vtensor::bind
