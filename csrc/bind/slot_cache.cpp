// The C++ half of a KVCache.
#include "kv/slot_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/host_memory.h"
#include "bind/operation.h"
#include "bind/operation_lock.h"
#include "bind/released_gil.h"
#include "bind/sleep.h"
#include "bind/slot_range.h"
#include "bind/torch_bridge.h"
#include "policy/keeper.h"
#include "vmm/wait.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

constexpr int kCudaDevice = 2;  // as DLPack numbers them

using Lengths = std::vector<std::int64_t>;
using Bands = std::optional<std::vector<std::size_t>>;  // all unless given
// The fields of RowContent.
using Content = std::tuple<std::vector<std::size_t>, bool, std::size_t>;

std::vector<Token> tokens_of(const nb::bytes& ids) {
  std::vector<Token> tokens(ids.size() / sizeof(Token));
  std::memcpy(tokens.data(), ids.c_str(), tokens.size() * sizeof(Token));
  return tokens;
}

class CacheCore {
 public:
  CacheCore(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape) : pool_(pool) {
    refuse_in_forked_child("KVCache");
    const Caller asking = caller("KVCache");
    with_memory(*pool, asking, [&] { cache_ = std::make_unique<SlotCache>(pool, shape, asking); });
    *view_ = {cache_.get(), &mutex_};
    pool->add(prefixes_);
  }
  ~CacheCore() {
    // A forked child has no mapper, which may have held the mutex as it was forked.
    if (!in_forked_child.load(std::memory_order_relaxed)) prefixes_->leave();
    *view_ = {};
  }

  bool step(const Lengths& lengths, const Bands& bands) {
    const Operation operation(*this, "KVCache.step");
    if (bands) {
      return run_if_it_fits("KVCache.step", [&](const Caller& caller) {
        cache_->step_bands(caller, lengths, *bands);
      });
    }
    if (cache_->step_within(caller("KVCache.step"), lengths)) return true;
    return run_if_it_fits("KVCache.step",
                          [&](const Caller& caller) { cache_->step(caller, lengths); });
  }

  bool prepare(const Lengths& lengths) {
    const Operation operation(*this, "KVCache.prepare");
    if (cache_->has_room(lengths)) return true;
    const ReleasedGil released;
    return cache_->prepare({"KVCache.prepare"}, lengths);
  }

  bool fits(const Lengths& lengths, const Bands& bands, bool waits) {
    const Operation operation(*this, "KVCache.fits");
    const Caller asking = caller("KVCache.fits");
    const ReleasedGil released;
    return cache_->fits(asking, lengths, bands.value_or(std::vector<std::size_t>()), waits);
  }

  bool waits_for_others(const Lengths& lengths) {
    const Operation operation(*this, "KVCache.waits_for_others");
    const Caller asking = caller("KVCache.waits_for_others");
    const ReleasedGil released;
    return cache_->waits_for_others(asking, lengths);
  }

  std::size_t alloc(std::size_t expected, const std::optional<nb::bytes>& ids,
                    const std::string& salt, bool deferred) {
    const Operation operation(*this, "KVCache.alloc");
    const std::vector<Token> tokens = ids ? tokens_of(*ids) : std::vector<Token>();
    std::size_t slot = 0;
    run("KVCache.alloc", {}, [&](const Caller& caller) {
      slot = ids ? cache_->alloc(caller, tokens, salt, expected, deferred)
                 : cache_->alloc(caller, expected);
    });
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
    // Not tried again: a refused reorder may be partly done.
    const Caller asking = caller("KVCache.reorder", stream);
    {
      const ReleasedGil released;
      result = cache_->reorder(asking, slots, sources);
    }
    return result;
  }

  std::size_t publish(std::size_t slot, const nb::bytes& ids, const std::string& salt) {
    const Operation operation(*this, "KVCache.publish");
    const std::vector<Token> tokens = tokens_of(ids);
    std::size_t published = 0;
    run("KVCache.publish", {},
        [&](const Caller& caller) { published = cache_->publish(caller, slot, tokens, salt); });
    return published;
  }

  void unshare(std::size_t slot, std::size_t start, std::size_t stop) {
    const Operation operation(*this, "KVCache.unshare");
    run_evicting("KVCache.unshare",
                 [&](const Caller& caller) { cache_->unshare(caller, slot, {start, stop}); });
  }

  // `writes`: a slot, its first token and how many follow, of each.
  void begin_write(std::size_t group, std::size_t layer,
                   const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& writes) {
    const Operation operation(*this, "KVCache.write");
    std::vector<SlotCache::Write> all;
    all.reserve(writes.size());
    for (const auto& [slot, start, count] : writes) all.push_back({slot, {start, start + count}});
    run_evicting("KVCache.write",
                 [&](const Caller& caller) { cache_->begin_write(caller, group, layer, all); });
  }

  void record_stream(std::optional<Stream> stream) {
    const Operation operation(*this, "KVCache.record_stream");
    // Not as a named stream: those may be destroyed, but this one is used again when pages go.
    cache_->use({"KVCache.record_stream", caller("KVCache.record_stream", stream).stream});
  }

  void swap_out(const std::vector<std::size_t>& slots, const Bands& bands) {
    const Operation operation(*this, "KVCache.swap_out");
    const bool pinned = pool_->traits().device.type == kCudaDevice;
    run("KVCache.swap_out", {}, [&](const Caller& caller) {
      const AllocateHost allocate = [&](std::size_t bytes) {
        return allocate_host_memory(caller.operation, bytes, pinned);
      };
      bands ? cache_->swap_out_bands(caller, slots, *bands, allocate)
            : cache_->swap_out(caller, slots, allocate);
    });
  }

  bool swap_in(const std::vector<std::size_t>& slots, const Bands& bands) {
    const Operation operation(*this, "KVCache.swap_in");
    return run_if_it_fits("KVCache.swap_in", [&](const Caller& caller) {
      bands ? cache_->swap_in_bands(caller, slots, *bands) : cache_->swap_in(caller, slots);
    });
  }

  // Waits outside the operation, so that other threads can use the cache. Ctrl-C ends the wait.
  void wait(std::size_t slot, std::optional<std::size_t> layer) {
    std::shared_ptr<PagePool> pool;
    FencePtr copied;
    bool leaves = false;
    Caller asking{"KVCache.wait"};
    {
      const Operation operation(*this, "KVCache.wait");
      if (cache_->expects(slot)) {
        run("KVCache.wait", {}, [&](const Caller& caller) { cache_->finish_prefix(caller, slot); });
      }
      pool = pool_;
      copied = cache_->copies(slot, layer);
      leaves = cache_->is_away(slot, layer);
      asking = caller("KVCache.wait");
    }
    if (pool->traits().asynchronous && !leaves) {
      if (copied != nullptr) pool->driver().order(asking.stream, *copied);
      return;
    }
    await(*pool, copied);
    if (!leaves) return;
    const Operation operation(*this, "KVCache.wait");
    const ReleasedGil released;
    cache_->await_departure(asking, slot, layer);
  }

  // Whether what is being copied to slots that come back is there within `seconds`. Of a closed
  // cache nothing is.
  bool await_arrivals(double seconds) {
    std::shared_ptr<PagePool> pool;
    FencePtr copied;
    try {
      const SoleOperation operation(mutex_, cache_, "cache", "Pool.wait_idle");
      pool = pool_;
      copied = cache_->arrivals();
    } catch (const Closed&) {
      return true;
    }
    const ReleasedGil released;
    return wait_for(pool->driver(), copied,
                    std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::duration<double>(seconds)));
  }

  std::vector<std::size_t> begins(std::size_t slot) { return read()->begins(slot); }

  // The whole address range of a row group as bytes. It keeps the addresses reserved, and no page.
  // Its views find their cache through `cache`, a weak reference.
  nb::object storage(std::size_t group, nb::object cache) {
    const Operation operation(*this, "KVCache");
    const std::shared_ptr<Buffer>& range = cache_->range(group);
    Generation* generation;
    {
      const ReleasedGil released;
      generation = range->publish();
    }
    nb::object storage = TorchBridge::get().storage_over(
        generation, range->range().base(), range->range().bytes(), pool_->traits().device);
    SlotRange::mark(storage, SlotRange(view_, group, std::move(cache)));
    return storage;
  }

  std::size_t row_bytes(std::size_t group) { return read()->range(group)->range().row_bytes(); }
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
  // Tokens of a row group that have pages, of each slot.
  Lengths lengths_here(std::size_t group) {
    const Reading cache = read();
    Lengths lengths;
    for (std::size_t slot = 0; slot < cache->shape().slots; ++slot)
      lengths.push_back(cache->length_here(slot, group));
    return lengths;
  }
  std::size_t length(std::size_t slot, std::optional<std::size_t> band) {
    const Reading cache = read();
    return band ? cache->band_length(slot, *band) : cache->length(slot);
  }
  std::vector<bool> away(std::size_t slot) {
    const Reading cache = read();
    std::vector<bool> away;
    for (std::size_t band = 0; band < cache->shape().bands; ++band)
      away.push_back(cache->is_band_away(slot, band));
    return away;
  }
  std::size_t unit() { return read()->unit(); }

  SlotCacheCounts counts() {
    const SoleOperation operation(mutex_, cache_, "cache", "KVCache.stats");
    const ReleasedGil released;
    return cache_->counts();
  }

  std::vector<PageRecord> pages(std::size_t slot, std::size_t group) {
    const SoleOperation operation(mutex_, cache_, "cache", "KVCache.pages");
    const ReleasedGil released;
    return cache_->pages(slot, group);
  }

  void close(std::optional<Stream> stream) {
    const OperationLock lock(mutex_, "KVCache.close");
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

  // With its slots. The index is given up: pages that it has alone are mapped nowhere, so nothing
  // could keep what they hold.
  void fall_asleep(SleepCore& sleep, bool discard) {
    constexpr const char* name = "Pool.sleep";
    const SoleOperation operation(mutex_, cache_, "cache", name);
    if (cache_->range(0)->asleep.load() != 0) return;
    if (discard && cache_->count_used() != 0) {
      refuse(name, "a cache has " + std::to_string(cache_->count_used()) +
                       " slots in use, whose K and V would be lost: free them, or keep what they "
                       "hold, with contents=\"host\" or a path");
    }
    std::vector<std::shared_ptr<Client>> clients;
    {
      const ReleasedGil released;
      cache_->forget_prefixes();
      clients = cache_->clients();
    }
    for (const std::shared_ptr<Client>& client : clients) sleep.add(client);
  }

 private:
  // The cache's prefixes, for the other pools of a shared budget. The mapper may have it for longer
  // than the cache lives, and takes it between two operations.
  class Prefixes final : public Keeper {
   public:
    explicit Prefixes(CacheCore& core) : core_(&core) {}
    void leave() {
      const std::lock_guard lock(mutex_);
      core_ = nullptr;
    }
    std::optional<std::size_t> give_up(std::size_t pages) noexcept override {
      std::size_t given = 0;
      const bool between =
          between_operations([&](SlotCache& cache) { given = cache.evict_pages(pages); });
      return between ? std::optional(given) : std::nullopt;
    }
    std::size_t kept() noexcept override {
      between_operations([this](SlotCache& cache) { kept_ = cache.evictable_pages(); });
      return kept_;
    }

   private:
    // False if an operation is under way.
    template <typename Body>
    bool between_operations(Body body) noexcept {
      const std::lock_guard lock(mutex_);  // the cache does not end meanwhile
      if (core_ == nullptr) return true;
      if (!core_->mutex_.try_lock()) return false;
      try {
        if (core_->cache_) body(*core_->cache_);
      } catch (const std::exception&) {
        // No memory for it: they stay.
      }
      core_->mutex_.unlock();
      return true;
    }

    std::mutex mutex_;
    CacheCore* core_;
    std::size_t kept_ = 0;
  };

  struct Operation : SoleOperation {
    Operation(CacheCore& core, const char* name)
        : SoleOperation(core.mutex_, core.cache_, "cache", name) {
      core.cache_->range(0)->raise_error();  // which sleeps with all slots
    }
  };

  // Reads the cache between two operations. In a forked child it takes no lock, because a thread of
  // the parent may hold it.
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

  // The same. If memory is short, evicts prefixes that no request uses.
  template <typename Body>
  void run_evicting(const char* operation, Body body) {
    const Caller asking = caller(operation, {});
    with_memory(
        *pool_, asking, [&] { body(asking); },
        [this](unsigned tries) {
          const ReleasedGil released;
          return cache_->evict(tries);
        });
  }
  // The same. Returns false if memory is still short.
  template <typename Body>
  bool run_if_it_fits(const char* operation, Body body) {
    try {
      run_evicting(operation, body);
    } catch (const OutOfPages&) {
      return false;
    } catch (const DeviceOutOfMemory&) {
      return false;
    }
    return true;
  }

  static void await(PagePool& pool, const FencePtr& fence) {
    constexpr std::chrono::milliseconds kLook{50};
    const auto until = std::chrono::steady_clock::now() + pool.options().patience;
    for (;;) {
      bool over = false;
      {
        const ReleasedGil released;
        over = wait_for(pool.driver(), fence, kLook);
      }
      if (over) return;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (std::chrono::steady_clock::now() < until) continue;
      throw TimedOut("KVCache.wait", pool.options().patience,
                     "the slot is still being copied; it stays as it is");
    }
  }

  std::shared_ptr<PagePool> pool_;  // both null once closed
  std::unique_ptr<SlotCache> cache_;
  std::atomic<bool> closed_{false};
  OperationMutex mutex_;
  const std::shared_ptr<SlotCacheView> view_ = std::make_shared<SlotCacheView>();
  const std::shared_ptr<Prefixes> prefixes_ = std::make_shared<Prefixes>(*this);
};

}  // namespace

void bind_slot_cache(nb::module_& module) {
  nb::class_<SlotCacheCounts>(module, "SlotCacheCounts")
      .def_ro("pages", &SlotCacheCounts::pages)
      .def_ro("distinct", &SlotCacheCounts::distinct)
      .def_ro("shared", &SlotCacheCounts::shared)
      .def_ro("lost", &SlotCacheCounts::lost)
      .def_ro("swapped_bytes", &SlotCacheCounts::swapped_bytes)
      .def_ro("prefix_units", &SlotCacheCounts::prefix_units)
      .def_ro("prefix_evictions", &SlotCacheCounts::prefix_evictions)
      .def_ro("prefix_queries", &SlotCacheCounts::prefix_queries)
      .def_ro("prefix_hits", &SlotCacheCounts::prefix_hits);

  nb::class_<SlotRange>(module, "SlotRange");

  const auto no_stream = nb::arg("stream") = nb::none();
  const auto no_bands = nb::arg("bands") = nb::none();
  nb::class_<CacheCore>(module, "CacheCore")
      .def(
          "__init__",
          [](CacheCore* core, const std::shared_ptr<PagePool>& pool, std::size_t slots,
             std::size_t max_length, std::size_t tile, std::size_t lookahead,
             const std::vector<std::tuple<std::vector<Content>, std::size_t, std::size_t,
                                          std::size_t>>& row_groups) {
            SlotCacheShape shape{slots, max_length, tile, lookahead, {}};
            for (const auto& [contents, item_bytes, window, band] : row_groups) {
              RowGroup& group =
                  shape.row_groups.emplace_back(RowGroup{0, item_bytes, window, {}, band});
              shape.bands = std::max(shape.bands, band + 1);
              for (const auto& [layers, values, heads] : contents)
                group.rows += group.contents.emplace_back(RowContent{layers, values, heads}).rows();
            }
            new (core) CacheCore(pool, std::move(shape));
          },
          nb::arg("pool"), nb::arg("slots"), nb::arg("max_length"), nb::arg("tile"),
          nb::arg("lookahead"), nb::arg("row_groups"))
      .def("step", &CacheCore::step, nb::arg("lengths"), no_bands)
      .def("prepare", &CacheCore::prepare, nb::arg("lengths"))
      .def("fits", &CacheCore::fits, nb::arg("lengths"), no_bands, nb::arg("wait") = false)
      .def("waits_for_others", &CacheCore::waits_for_others)
      .def("alloc", &CacheCore::alloc, nb::arg("expected"), nb::arg("tokens") = nb::none(),
           nb::arg("salt") = "", nb::arg("deferred") = false)
      .def("free", &CacheCore::free, nb::arg("slot"), no_stream)
      .def("truncate", &CacheCore::truncate, nb::arg("slot"), nb::arg("length"), no_stream)
      .def("fork", &CacheCore::fork, nb::arg("slot"), nb::arg("n"), no_stream)
      .def("reorder", &CacheCore::reorder, nb::arg("slots"), nb::arg("sources"), no_stream)
      .def("publish", &CacheCore::publish)
      .def("unshare", &CacheCore::unshare)
      .def("begin_write", &CacheCore::begin_write)
      .def("record_stream", &CacheCore::record_stream, no_stream)
      .def("swap_out", &CacheCore::swap_out, nb::arg("slots"), no_bands)
      .def("swap_in", &CacheCore::swap_in, nb::arg("slots"), no_bands)
      .def("wait", &CacheCore::wait, nb::arg("slot"), nb::arg("layer") = nb::none())
      .def("await_arrivals", &CacheCore::await_arrivals)
      .def("begins", &CacheCore::begins)
      .def("storage", &CacheCore::storage, nb::arg("row_group"), nb::arg("cache"))
      .def("row_bytes", &CacheCore::row_bytes)
      .def("length", &CacheCore::length, nb::arg("slot"), nb::arg("band") = nb::none())
      .def("lengths_here", &CacheCore::lengths_here)
      .def("away", &CacheCore::away)
      .def("counts", &CacheCore::counts)
      .def("pages", &CacheCore::pages)
      .def("close", &CacheCore::close, no_stream)
      .def("fall_asleep", &CacheCore::fall_asleep, nb::arg("sleep"), nb::arg("discard"))
      .def_prop_ro("unit", &CacheCore::unit)
      .def_prop_ro("lengths", &CacheCore::lengths)
      .def_prop_ro("states", &CacheCore::states)
      .def_prop_ro("closed", &CacheCore::closed);
}

}  // namespace vtensor::bind
