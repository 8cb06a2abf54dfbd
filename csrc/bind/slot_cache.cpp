// The C++ half of a KVCache.
#include "kv/slot_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/sharing.h"
#include "bind/slot_range.h"
#include "bind/torch_bridge.h"
#include "policy/sleep.h"

namespace vtensor::bind {

namespace {

using Lengths = std::vector<std::int64_t>;
using Numbers = std::vector<std::size_t>;  // of slots, or of bands; no bands: all of them
// The fields of RowContent.
using Content = std::tuple<std::vector<std::size_t>, bool, std::size_t>;

std::vector<Token> tokens_of(const nb::bytes& ids) {
  std::vector<Token> tokens(ids.size() / sizeof(Token));
  std::memcpy(tokens.data(), ids.c_str(), tokens.size() * sizeof(Token));
  return tokens;
}

class CacheCore {
 public:
  CacheCore(const std::shared_ptr<PagePool>& pool, const SlotCacheShape& shape) {
    refuse_in_forked_child("KVCache");
    const Caller caller = caller_of("KVCache", {}, *pool);
    cache_ = with_memory(*pool, caller,
                         [&] { return OwnedSlotCache(new SlotCache(pool, shape, caller)); });
    pool->add(open_);
  }
  ~CacheCore() {
    // A forked child has no mapper. The parent's may have held the mutex at the fork.
    if (in_forked_child()) return;
    mutex_.await_end();
    cache_.reset();
    mutex_.unlock();
  }

  bool step(const Lengths& lengths, const Numbers& bands) {
    const Operation op(*this, "KVCache.step");
    return (bands.empty() && cache_->step_within(op.caller(), lengths)) ||
           op.run_if_it_fits([&] { cache_->step(op.caller(), lengths, bands); });
  }

  bool prepare(const Lengths& lengths) {
    const Operation op(*this, "KVCache.prepare");
    return cache_->has_room(lengths) ||
           without_gil([&] { return cache_->prepare({op.caller().operation}, lengths); });
  }

  bool fits(const Lengths& lengths, const Numbers& bands, bool waits) {
    const Operation op(*this, "KVCache.fits");
    return without_gil([&] { return cache_->fits(op.caller(), lengths, bands, waits); });
  }

  bool waits_for_others(const Lengths& lengths) {
    const Operation op(*this, "KVCache.waits_for_others");
    return without_gil([&] { return cache_->waits_for_others(op.caller(), lengths); });
  }

  std::size_t alloc(std::size_t expected, const std::optional<nb::bytes>& ids,
                    const std::string& salt, bool deferred) {
    const Operation op(*this, "KVCache.alloc");
    if (!ids) return op.with_memory([&] { return cache_->alloc(op.caller(), expected); });
    const std::vector<Token> tokens = tokens_of(*ids);
    return op.with_memory(
        [&] { return cache_->alloc(op.caller(), tokens, salt, expected, deferred); });
  }

  void free(std::size_t slot, std::optional<Stream> stream) {
    const Operation op(*this, "KVCache.free", stream);
    op.with_memory([&] { cache_->free(op.caller(), slot); });
  }

  void truncate(std::size_t slot, std::size_t length, std::optional<Stream> stream) {
    const Operation op(*this, "KVCache.truncate", stream);
    op.with_memory([&] { cache_->truncate(op.caller(), slot, length); });
  }

  std::vector<std::size_t> fork(std::size_t slot, std::size_t n, std::optional<Stream> stream) {
    const Operation op(*this, "KVCache.fork", stream);
    return op.with_memory([&] { return cache_->fork(op.caller(), slot, n); });
  }

  std::vector<std::size_t> reorder(const std::vector<std::size_t>& slots,
                                   const std::vector<std::size_t>& sources,
                                   std::optional<Stream> stream) {
    const Operation op(*this, "KVCache.reorder", stream);
    // Not tried again: a refused reorder may be partly done.
    return without_gil([&] { return cache_->reorder(op.caller(), slots, sources); });
  }

  std::size_t publish(std::size_t slot, const nb::bytes& ids, const std::string& salt) {
    const Operation op(*this, "KVCache.publish");
    const std::vector<Token> tokens = tokens_of(ids);
    return op.with_memory([&] { return cache_->publish(op.caller(), slot, tokens, salt); });
  }

  void unshare(std::size_t slot, std::size_t start, std::size_t stop) {
    const Operation op(*this, "KVCache.unshare");
    op.run_evicting([&] { cache_->unshare(op.caller(), slot, {start, stop}); });
  }

  // `writes`: of each, the slot, the first token and the number of tokens. `store` copies them
  // there: inside the operation, so no other thread takes the pages away meanwhile.
  void write(std::size_t group, std::size_t layer,
             const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& writes,
             const nb::callable& store) {
    const Operation op(*this, "KVCache.write");
    std::vector<SlotCache::Write> all;
    all.reserve(writes.size());
    for (const auto& [slot, start, count] : writes) all.push_back({slot, {start, start + count}});
    op.run_evicting([&] { cache_->begin_write(op.caller(), group, layer, all); });
    store();
  }

  void record_stream(std::optional<Stream> stream) {
    const Operation op(*this, "KVCache.record_stream", stream);
    cache_->use(op.recorded());
  }

  void swap_out(const Numbers& slots, const Numbers& bands) {
    const Operation op(*this, "KVCache.swap_out");
    const bool pinned = !cache_->pool()->traits().device.on_host();
    const AllocateHost allocate = [&](std::size_t bytes) {
      return TorchBridge::get().host_memory(op.caller().operation, bytes, pinned,
                                            "free some, or free the slot and compute it again");
    };
    op.with_memory([&] { cache_->swap_out(op.caller(), slots, allocate, bands); });
  }

  bool swap_in(const Numbers& slots, const Numbers& bands) {
    const Operation op(*this, "KVCache.swap_in");
    return op.run_if_it_fits([&] { cache_->swap_in(op.caller(), slots, bands); });
  }

  // Waits outside the operation, so that other threads can use the cache. Ctrl-C ends the wait.
  void wait(std::size_t slot, std::optional<std::size_t> layer) {
    constexpr const char* name = "KVCache.wait";
    std::shared_ptr<PagePool> pool;
    FencePtr copied;
    bool leaves = false;
    Caller caller{name};
    {
      const Operation op(*this, name);
      if (cache_->is_deferred(slot))
        op.with_memory([&] { cache_->finish_prefix(op.caller(), slot); });
      pool = cache_->pool();
      copied = cache_->swaps().copies(slot, layer);
      leaves = cache_->swaps().is_away(slot, layer);
      caller = op.caller();
    }
    if (pool->traits().asynchronous && !leaves) {
      if (copied != nullptr) pool->driver().order(caller.stream, *copied);
      return;
    }
    const auto patience = pool->options().patience;
    if (!await(*pool, copied, std::chrono::steady_clock::now() + patience))
      throw TimedOut(name, patience, "the slot is still being copied; it stays as it is");
    if (!leaves && copied == nullptr) return;
    const Operation op(*this, name);  // as it ends, readers see a slot that came
    if (leaves) {
      without_gil([&] { cache_->swaps().await_departure(caller, slot, layer); });
    } else {
      static_cast<void>(cache_->swaps().arrivals());
    }
  }

  // Whether the copies to slots that come back end within that time. A closed cache has none.
  bool await_arrivals(std::chrono::nanoseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    for (;;) {
      std::shared_ptr<PagePool> pool;
      FencePtr copied;
      try {
        const SoleOperation operation(mutex_, cache_, "Pool.wait_idle");
        pool = cache_->pool();
        copied = cache_->swaps().arrivals();
        cache_->show_lengths();
      } catch (const Closed&) {
        return true;
      }
      if (copied == nullptr) return true;
      if (!await(*pool, copied, until)) return false;
    }
  }

  ReaderFiles open_for_readers() {
    const Operation op(*this, "KVCache.share");
    without_gil([&] { cache_->share(op.caller()); });
    return reader_files(op.caller().operation, cache_->buffers().ranges());
  }
  // The whole address range of a row group as bytes. It keeps the addresses reserved, and no page.
  // Its views find their cache through `cache`, a weak reference. A broken pool's is readable too.
  nb::object storage(std::size_t group, nb::object cache) {
    const SoleOperation operation(mutex_, cache_, "KVCache");
    const std::shared_ptr<Buffer>& range = cache_->buffers().range(group);
    range->raise_if_asleep("KVCache");
    Generation* const generation = without_gil([&] { return range->publish({}); });
    const Reservation& rows = range->range();
    nb::object storage = TorchBridge::get().storage_over(generation, rows.base(), rows.bytes());
    const SlotBuffers& buffers = cache_->buffers();
    SlotRange of{open_,
                 std::move(cache),
                 group,
                 rows.base(),
                 buffers.shape().slots,
                 rows.row_bytes(),
                 buffers.group(group).item_bytes};
    nb::setattr(storage, SlotRange::kName, nb::cast(std::move(of)));
    return storage;
  }

  std::size_t unit() {
    return open_->read([](const auto& cache) { return cache.buffers().unit(); });
  }
  std::size_t length(std::size_t slot, std::optional<std::size_t> band) {
    return open_->read([&](const SlotCache& cache) {
      return band ? cache.lengths().length(slot, *band) : cache.lengths().length(slot);
    });
  }
  Lengths lengths() {
    return open_->read([](const SlotCache& cache) {
      return Lengths(cache.lengths().all().begin(), cache.lengths().all().end());
    });
  }
  std::size_t slots_used() {
    return open_->read(
        [](const SlotCache& cache) { return cache.lengths().count(SlotState::used); });
  }
  Numbers bands_away(std::size_t slot) {
    return open_->read([&](const SlotCache& cache) {
      const SlotLengths& lengths = cache.lengths();
      Numbers away;
      if (lengths.state(slot) != SlotState::used) return away;
      for (const std::size_t band : lengths.or_all({}))
        if (lengths.is_away(slot, band)) away.push_back(band);
      return away;
    });
  }

  SlotCacheCounts counts() {
    const SoleOperation operation(mutex_, cache_, "KVCache.stats");
    return without_gil([&] { return cache_->counts(); });
  }

  std::vector<PageRecord> pages(std::size_t slot, std::size_t group) {
    const SoleOperation operation(mutex_, cache_, "KVCache.pages");
    return without_gil([&] { return cache_->pages(slot, group); });
  }

  void close(std::optional<Stream> stream) {
    const auto lock = mutex_.hold("KVCache.close");
    if (!cache_) return;
    const Caller caller = caller_of("KVCache.close", stream, *cache_->pool());
    OwnedSlotCache cache = std::move(cache_);
    const ReleasedGil released;
    cache->close(caller);
    cache.reset();
  }
  bool closed() const { return cache_ == nullptr; }

  // Adds all slots to the sleep. Gives the prefix index up: pages that only the index has are not
  // mapped, so their contents cannot be copied.
  void fall_asleep(FallAsleep& sleep, bool discard) {
    constexpr const char* name = "Pool.sleep";
    const SoleOperation operation(mutex_, cache_, name);
    if (cache_->buffers().range(0)->asleep.load() != 0) return;
    const SlotLengths& lengths = cache_->lengths();
    const std::size_t in_use = lengths.count(SlotState::used) + lengths.count(SlotState::swapped);
    if (discard && in_use != 0)
      refuse(name, "a cache has ", in_use,
             " slots in use, whose K and V would be lost: free them, or keep what they hold, with "
             "contents=\"host\" or a folder");
    const std::vector<std::shared_ptr<Client>> clients = without_gil([&] {
      cache_->prefixes().clear();
      return cache_->clients();
    });
    for (const std::shared_ptr<Client>& client : clients) sleep.add(client);
  }

 private:
  // One operation on the cache. Only wait_idle() raises what the driver refused the mapper for a
  // slot (I10): the next step makes its own calls, and a free() must not fail for another slot.
  class Operation : public SoleOperation {
   public:
    Operation(CacheCore& core, const char* name, std::optional<Stream> stream = {})
        : SoleOperation(core.mutex_, core.cache_, name, stream), cache_(*core.cache_) {
      cache_.prefetch_shown();
      cache_.pool()->store().raise_if_broken();
      cache_.buffers().range(0)->raise_if_asleep(name);  // this buffer is asleep if the slots are
    }
    // Readers in other processes see whole steps.
    ~Operation() { cache_.show_lengths(); }
    Operation& operator=(Operation&&) = delete;
    // As with_memory(). If memory is short, evicts prefixes that no request uses.
    void run_evicting(const std::function<void()>& body) const {
      with_memory(body, [this](unsigned tries) { return cache_.evict(tries); });
    }
    // `run_evicting`, but returns false if memory is still short.
    bool run_if_it_fits(const std::function<void()>& body) const {
      try {
        run_evicting(body);
      } catch (const OutOfPages&) {
        return false;
      }
      return true;
    }

   private:
    SlotCache& cache_;
  };

  // Whether the fence passes before `until`. Ctrl-C ends the wait.
  static bool await(PagePool& pool, const FencePtr& fence,
                    std::chrono::steady_clock::time_point until) {
    constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(50);
    for (;;) {
      const auto left = std::min(kLook, until - std::chrono::steady_clock::now());
      if (without_gil([&] { return wait_for(pool.driver(), fence, left); })) return true;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (left < kLook) return false;
    }
  }

  const std::shared_ptr<OpenCache> open_ = std::make_shared<OpenCache>();
  OwnedSlotCache& cache_ = open_->cache;
  OperationMutex& mutex_ = open_->mutex;
};

}  // namespace

void bind_slot_cache(nb::module_& module) {
  using Counts = SlotCacheCounts;
  bind_fields(nb::class_<Counts>(module, "SlotCacheCounts"), VT_FIELD(Counts, pages),
              VT_FIELD(Counts, free), VT_FIELD(Counts, used), VT_FIELD(Counts, swapped),
              VT_FIELD(Counts, tokens), VT_FIELD(Counts, live_bytes), VT_FIELD(Counts, distinct),
              VT_FIELD(Counts, shared), VT_FIELD(Counts, swapped_bytes),
              VT_FIELD(Counts, prefix_units), VT_FIELD(Counts, prefix_evictions),
              VT_FIELD(Counts, prefix_queries), VT_FIELD(Counts, prefix_hits));

  nb::class_<SlotRange>(module, "SlotRange");

  const auto no_stream = "stream"_a = nb::none();
  const auto no_bands = "bands"_a = Numbers();
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
            new (core) CacheCore(pool, shape);
          },
          "pool"_a, "slots"_a, "max_length"_a, "tile"_a, "lookahead"_a, "row_groups"_a)
      .def("step", &CacheCore::step, "lengths"_a, no_bands)
      .def("prepare", &CacheCore::prepare, "lengths"_a)
      .def("fits", &CacheCore::fits, "lengths"_a, no_bands, "wait"_a = false)
      .def("waits_for_others", &CacheCore::waits_for_others)
      .def("alloc", &CacheCore::alloc, "expected"_a, "tokens"_a = nb::none(), "salt"_a = "",
           "deferred"_a = false)
      .def("free", &CacheCore::free, "slot"_a, no_stream)
      .def("truncate", &CacheCore::truncate, "slot"_a, "length"_a, no_stream)
      .def("fork", &CacheCore::fork, "slot"_a, "n"_a, no_stream)
      .def("reorder", &CacheCore::reorder, "slots"_a, "sources"_a, no_stream)
      .def("publish", &CacheCore::publish)
      .def("unshare", &CacheCore::unshare)
      .def("write", &CacheCore::write)
      .def("record_stream", &CacheCore::record_stream, no_stream)
      .def("swap_out", &CacheCore::swap_out, "slots"_a, no_bands)
      .def("swap_in", &CacheCore::swap_in, "slots"_a, no_bands)
      .def("wait", &CacheCore::wait, "slot"_a, "layer"_a = nb::none())
      .def("await_arrivals", &CacheCore::await_arrivals)
      .def("open_for_readers", &CacheCore::open_for_readers)
      .def("storage", &CacheCore::storage, "row_group"_a, "cache"_a)
      .def("length", &CacheCore::length, "slot"_a, "band"_a = nb::none())
      .def("bands_away", &CacheCore::bands_away)
      .def("counts", &CacheCore::counts)
      .def("pages", &CacheCore::pages)
      .def("close", &CacheCore::close, no_stream)
      .def("fall_asleep", &CacheCore::fall_asleep, "sleep"_a, "discard"_a)
      .def_prop_ro("unit", &CacheCore::unit)
      .def_prop_ro("lengths", &CacheCore::lengths)
      .def_prop_ro("slots_used", &CacheCore::slots_used)
      .def_prop_ro("closed", &CacheCore::closed);
}

}  // namespace vtensor::bind
