// A slot cache beside a plain model of it: of each slot, which number was written to each position.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/errors.h"
#include "cpp/hammered.h"
#include "kv/slot_cache.h"
#include "simcuda/client.h"
#include "support.h"
#include "vmm/pending_work.h"

namespace vtensor::slots {

constexpr std::size_t kPage = 4096;
inline const Caller kCaller{"test"};

struct OnHost {
  static constexpr bool is_cuda = false;
  static std::unique_ptr<Driver> open() { return make_host_driver({.page_size = kPage}); }
  static std::string leaks() { return host_leaks(); }
};

struct OnSimulation {
  static constexpr bool is_cuda = true;
  static const SimcudaControl& control() {
    static const SimcudaControl control;
    return control;
  }
  static std::unique_ptr<Driver> open() {
    control().reset();
    control().configure("granularity", kPage);
    return make_cuda_driver(simulated(kPage));
  }
  static std::string leaks() { return describe(control().leaks()); }
};

// Host memory for slots that are swapped out, which counts what is not freed yet.
class HostBytes {
 public:
  HostMemory operator()(std::size_t bytes) const {
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(64, ceil_div(bytes, 64) * 64));
    *live_ += bytes;
    return {data, [live = live_, bytes](std::byte* at) {
              std::memset(at, 0xdd, bytes);  // a copy that comes too late is seen
              std::free(at);
              *live -= bytes;
            }};
  }
  std::size_t live() const { return *live_; }

 private:
  std::shared_ptr<std::atomic<std::size_t>> live_ = std::make_shared<std::atomic<std::size_t>>(0);
};

// Without contents, each row has K of layer 0.
inline SlotCacheShape with_contents(SlotCacheShape shape) {
  for (RowGroup& group : shape.row_groups) {
    if (group.contents.empty()) group.contents.resize(group.rows);
  }
  return shape;
}

template <class T>
class Bench {
 public:
  Bench(SlotCacheShape shape, std::size_t pages, PoolOptions options = {})
      : Bench(open(pages, options), std::move(shape), true) {}
  // In a pool that others use too.
  Bench(std::shared_ptr<PagePool> shared, SlotCacheShape shape)
      : Bench(std::move(shared), std::move(shape), false) {}
  ~Bench() {
    cache.reset();
    if (alone) let_go<T>(pool);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  static std::shared_ptr<PagePool> open(std::size_t pages, PoolOptions options) {
    options.budget = pages * kPage;
    options.patience = std::min<std::chrono::nanoseconds>(options.patience, kPatience);
    return PagePool::create(T::open(), options);
  }

  std::vector<std::int64_t> lengths() const {
    return {cache->lengths().all().begin(), cache->lengths().all().end()};
  }
  std::size_t alloc(std::size_t expected = 0) { return entered(cache->alloc(kCaller, expected)); }
  // A slot with so many positions.
  std::size_t begin(std::int64_t length) {
    const std::size_t slot = alloc();
    REQUIRE(grow(slot, length));
    return slot;
  }
  void free(std::size_t slot) {
    cache->free(kCaller, slot);
    model.erase(slot);
    away.erase(slot);
  }
  // As the bindings do it: false where memory is short.
  bool step(const std::vector<std::int64_t>& wanted) {
    try {
      if (!cache->step_within(kCaller, wanted)) cache->step(kCaller, wanted);
    } catch (const OutOfPages&) {
      return false;
    }
    write_new();
    return true;
  }
  bool grow(std::size_t slot, std::int64_t n) {
    std::vector<std::int64_t> wanted = lengths();
    wanted[slot] += n;
    return step(wanted);
  }
  std::vector<std::size_t> fork(std::size_t slot, std::size_t n) {
    std::vector<std::size_t> forks = cache->fork(kCaller, slot, n);
    for (const std::size_t fork : forks) model[fork] = model.at(slot);
    return forks;
  }
  void truncate(std::size_t slot, std::size_t length) {
    cache->truncate(kCaller, slot, length);
    model.at(slot).resize(length);
  }
  // Into earlier positions, as a direct write.
  void rewrite(std::size_t slot, std::size_t position) {
    cache->unshare(kCaller, slot, {position, position + 1});
    model.at(slot)[position] = ++last_;
    write(slot, position);
  }
  // A slot's tokens are the numbers in its cells: what requests with the same tokens share is the
  // same.
  std::vector<Token> tokens(std::size_t slot) const {
    return {model.at(slot).begin(), model.at(slot).end()};
  }
  std::size_t publish(std::size_t slot) { return cache->publish(kCaller, slot, tokens(slot), ""); }
  std::size_t alloc(const std::vector<Token>& wanted) {
    const std::size_t slot = cache->alloc(kCaller, wanted, "", 0);
    const auto found = static_cast<std::ptrdiff_t>(cache->lengths().length(slot));
    model[slot] = {wanted.begin(), wanted.begin() + found};
    return slot;
  }
  void swap_out(const std::vector<std::size_t>& slots) {
    cache->swap_out(kCaller, slots, host);
    for (const std::size_t slot : slots) {
      away[slot] = std::move(model.at(slot));
      model.erase(slot);
    }
  }
  void swap_in(std::size_t slot) {
    cache->swap_in(kCaller, std::array{slot});
    model[slot] = std::move(away.at(slot));
    away.erase(slot);
  }
  std::size_t entered(std::size_t slot) {
    model[slot].resize(cache->lengths().length(slot));
    return slot;
  }

  // What was written to a position of a slot, and where no window has passed it, is there.
  bool whole(std::size_t slot) const {
    for (std::size_t group = 0; group < cache->buffers().shape().row_groups.size(); ++group) {
      for (std::size_t row = 0; row < cache->buffers().shape().row_groups[group].rows; ++row) {
        for (std::size_t i = cache->buffers().begin(slot, group); i < model.at(slot).size(); ++i) {
          const std::uint32_t mark = mark_of(group, row, model.at(slot)[i]);
          const char* at = item(slot, group, row, i);
          const std::size_t bytes = cache->buffers().shape().row_groups[group].item_bytes;
          if (std::memcmp(at, &mark, sizeof mark) != 0 ||
              std::memcmp(at + bytes - sizeof mark, &mark, sizeof mark) != 0)
            return false;
        }
      }
    }
    return true;
  }
  // I2, I4, I5, I6, and that the cache and the model agree.
  void check() const {
    for (const auto& [slot, cells] : model) {
      REQUIRE(cache->lengths().state(slot) == SlotState::used);
      CHECK(cache->lengths().length(slot) == cells.size());
      CHECK(wait_for(pool->driver(), cache->swaps().copies(slot, {}), kPatience));
      CHECK(whole(slot));
      static_cast<void>(cache->swaps().copies(slot, {}));  // lets go of what they used
    }
    for (const auto& [slot, cells] : away) {
      CHECK(cache->lengths().state(slot) == SlotState::swapped);
      CHECK(cache->lengths().length(slot) == cells.size());
    }
    CHECK_NOTHROW(pool->check_invariants());
    const PoolCounts counts = pool->counts();
    CHECK(counts.mapped == counts.active + counts.prefetched + counts.cached + counts.pinned);
  }
  // I14: nothing is left of the cache, or of the pool once its last user has gone.
  void finish() {
    model.clear();
    away.clear();
    cache.reset();
    if (!alone) return;
    if (pool->store().broken()) return end();
    hammered::come_to_rest(*pool);
    if constexpr (T::is_cuda) CHECK(T::control().illegal_accesses() == 0);  // I3
    CHECK(host.live() == 0);
    const PoolCounts left = pool->counts();
    CHECK(left.mapped == 0);
    CHECK(left.cached == 0);
    CHECK(left.reserved_pages == 0);
    CHECK(left.in_page_sets == 0);
    CHECK(left.used == 0);
    CHECK_NOTHROW(pool->check_invariants());
    end();
  }
  void end() {
    pool->retire();
    let_go<T>(pool);
  }

  std::size_t used() const { return pool->counts().used; }
  char* item(std::size_t slot, std::size_t group, std::size_t row, std::size_t position) const {
    const Buffer& range = *cache->buffers().range(group);
    return reinterpret_cast<char*>(
        range.address_of(row * cache->buffers().shape().slots + slot, position));
  }

  std::shared_ptr<PagePool> pool;
  OwnedSlotCache cache;
  std::map<std::size_t, std::vector<std::uint32_t>> model;  // of slots in use
  std::map<std::size_t, std::vector<std::uint32_t>> away;   // of those swapped out
  HostBytes host;
  const bool alone;

 private:
  Bench(std::shared_ptr<PagePool> from, SlotCacheShape shape, bool is_alone)
      : pool(std::move(from)),
        cache(new SlotCache(pool, with_contents(std::move(shape)), kCaller)),
        alone(is_alone) {}
  static std::uint32_t mark_of(std::size_t group, std::size_t row, std::uint32_t number) {
    return number * 64 + static_cast<std::uint32_t>(group * 16 + row);
  }
  void write(std::size_t slot, std::size_t position) {
    for (std::size_t group = 0; group < cache->buffers().shape().row_groups.size(); ++group) {
      if (position < cache->buffers().begin(slot, group)) continue;
      const std::size_t bytes = cache->buffers().shape().row_groups[group].item_bytes;
      for (std::size_t row = 0; row < cache->buffers().shape().row_groups[group].rows; ++row) {
        const std::uint32_t mark = mark_of(group, row, model.at(slot)[position]);
        char* at = item(slot, group, row, position);
        std::memcpy(at, &mark, sizeof mark);
        std::memcpy(at + bytes - sizeof mark, &mark, sizeof mark);
      }
    }
  }
  void write_new() {
    for (auto& [slot, cells] : model) {
      for (std::size_t i = cells.size(); i < static_cast<std::size_t>(cache->lengths().all()[slot]);
           ++i) {
        cells.push_back(++last_);
        write(slot, i);
      }
    }
  }

  std::uint32_t last_ = 0;
};

}  // namespace vtensor::slots
