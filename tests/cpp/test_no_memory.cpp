// Operations, and calls of the CUDA driver, whose n-th allocation is refused, for every n: what
// they throw leaves nothing half done, and what cannot throw needs no memory.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/descriptor.h"
#include "cpp/owner.h"
#include "cpp/slot_cache_bench.h"
#include "heap/heap.h"
#include "kv/slot_cache.h"
#include "policy/page_pool.h"
#include "policy/sleep.h"
#include "tensor/buffer.h"
#include "vmm/range_reader.h"

// Refuses one allocation of a thread: this replaces operator new. The allocations of the simulated
// libcuda and of other libraries do not count.
namespace {

extern "C" const char __executable_start, etext;  // of the linker

// Allocations of this thread before one is refused; below 0 none is.
thread_local long allowed = -1;

void* allocate(std::size_t bytes, std::size_t alignment, const void* caller) {
  const bool ours = caller >= &__executable_start && caller < &etext;
  const bool refused = ours && allowed == 0;
  if (ours && allowed >= 0) --allowed;
  void* const at = refused
                       ? nullptr
                       : std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return allocate(bytes, alignof(std::max_align_t), __builtin_return_address(0));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }

namespace vtensor {
namespace {

using slots::kPage;
using slots::OnHost;
using slots::OnSimulation;

constexpr std::size_t kPages = 256;
constexpr std::size_t kRows[] = {0, 1};
const Caller kCaller{"test"};
const RowShape kShape{2, kPage / 2, 64, 0, false};

// A pool, and what is to end before it.
struct Bench {
  std::shared_ptr<PagePool> pool;
  std::vector<std::shared_ptr<Client>> clients = {};
  std::shared_ptr<Heap> heap = nullptr;
  std::shared_ptr<SlotCache> cache = nullptr;

  std::shared_ptr<Buffer> buffer(std::size_t length) {
    const std::shared_ptr<Buffer> made = Buffer::create(pool, kShape, kCaller);
    clients.push_back(made);
    if (length != 0) made->grow(kCaller, {0, length}, false);
    return made;
  }
  std::shared_ptr<Arena> arena() {
    const auto made = Arena::make(pool, 64 * kPage, false, kCaller);
    clients.push_back(made);  // has room
    return made;
  }
  void end() {
    for (const auto& client : clients) client->abandon();
    clients.clear();
    heap.reset();
    cache.reset();
  }
};

// I3: each slot has the positions that its length says. Each other slot is free.
void check_slots(SlotCache& cache) {
  for (std::size_t slot = 0; slot < cache.buffers().shape().slots; ++slot) {
    if (cache.lengths().state(slot) != SlotState::used || cache.is_deferred(slot)) continue;
    for (std::size_t group = 0; group < cache.buffers().groups(); ++group) {
      const Interval needed = cache.buffers().needed(slot, group, cache.lengths().length(slot));
      CHECK(intersection(needed, cache.buffers().at(slot, group).positions()) == needed);
    }
  }
  for (std::size_t free = cache.lengths().count(SlotState::free); free != 0; --free)
    CHECK_NOTHROW(cache.alloc(kCaller, 0));
}

using Operation = std::function<void()>;

// Whether the n-th allocation of the operation was refused, from 0 on: it had so many.
bool refuses(long n, const Operation& operation) {
  allowed = n;
  try {
    operation();
  } catch (const std::bad_alloc&) {
  }
  return std::exchange(allowed, -1) < 0;
}

// `prepare` returns the operation.
template <class T>
void each_allocation(const std::string& name, const std::function<Operation(Bench&)>& prepare) {
  for (const bool ahead : {false, true}) {
    bool refused = true;
    for (long n = 0; refused; ++n) {
      INFO(name, ", allocation ", n, ahead ? ", with look-ahead" : "");
      PoolOptions options{.budget = kPages * kPage, .patience = kPatience};
      if (ahead) options.prefetch = options.cache = 64 * kPage;
      Bench bench{PagePool::create(T::open(), options)};
      bench.clients.reserve(8);
      {
        const Operation operation = prepare(bench);
        refused = refuses(n, operation);
      }
      CHECK_NOTHROW(bench.pool->check_invariants());
      if (bench.cache) check_slots(*bench.cache);
      bench.end();
      bench.pool->retire();
      CHECK_NOTHROW(bench.pool->wait_idle(kPatience));
      CHECK_NOTHROW(bench.pool->trim());
      CHECK_NOTHROW(bench.pool->check_invariants());
      const PoolCounts counts = bench.pool->counts();
      CHECK(counts.used == 0);
      CHECK(counts.reserved_pages == 0);
      let_go<T>(bench.pool);
    }
  }
}

TEST_CASE_TEMPLATE("tensors", T, OnHost, OnSimulation) {
  each_allocation<T>("make", [](Bench& bench) { return [&] { bench.buffer(0); }; });
  each_allocation<T>("make in a stream", [](Bench& bench) {
    return [&] {
      const Caller caller{"test", bench.pool->driver().copy_stream()};
      bench.clients.push_back(Buffer::create(bench.pool, kShape, caller));
    };
  });
  each_allocation<T>("make again", [](Bench& bench) {
    bench.buffer(40);
    bench.end();
    return [&] {
      const Caller caller{"test", bench.pool->driver().copy_stream(), true};
      bench.clients.push_back(Buffer::create(bench.pool, kShape, caller));
    };
  });
  each_allocation<T>("grow", [](Bench& bench) {
    return [buffer = bench.buffer(3)] { buffer->grow(kCaller, {0, 40}, true); };
  });
  each_allocation<T>("shrink_to", [](Bench& bench) {
    return [buffer = bench.buffer(40)] { buffer->shrink_to({5, 20}); };
  });
  each_allocation<T>("close", [](Bench& bench) {
    return [buffer = bench.buffer(40), &bench] {
      bench.clients.clear();
      buffer->abandon();
    };
  });
  each_allocation<T>("publish", [](Bench& bench) {
    return [buffer = bench.buffer(40)] { buffer->pool()->end(publish(*buffer)); };
  });
}

TEST_CASE("the addresses of a buffer that is refused go back at once") {
  each_allocation<OnSimulation>("make", [](Bench& bench) {
    return [&bench, before = OnSimulation::control().leaks().ranges] {
      try {
        bench.buffer(0);
      } catch (const std::bad_alloc&) {
        CHECK(OnSimulation::control().leaks().ranges == before);
        throw;
      }
    };
  });
}

TEST_CASE("a growth that is refused leaves the memory of free pages to others") {
  constexpr std::size_t kFew = 4, kMany = 16;
  const auto shape = [](std::size_t pages) { return RowShape{1, kPage, pages, 0, false}; };
  bool refused = true;
  for (long n = 0; refused; ++n) {
    CAPTURE(n);
    const auto pool = PagePool::create(OnHost::open(), {.budget = kPages * kPage});
    const auto grown = [&pool, &shape](std::size_t pages) {
      const std::shared_ptr<Buffer> buffer = Buffer::create(pool, shape(pages), kCaller);
      buffer->grow(kCaller, {0, pages}, false);
      return buffer;
    };
    grown(kFew)->abandon();
    const std::shared_ptr<Buffer> large = Buffer::create(pool, shape(kMany), kCaller);
    refused = refuses(n, [&] { large->grow(kCaller, {0, kMany}, false); });
    large->abandon();
    const std::uint64_t before = pool->events().pages_recycled;
    const std::shared_ptr<Buffer> next = grown(kFew);
    CHECK(pool->events().pages_recycled == before + kFew);
    next->abandon();
  }
}

TEST_CASE("a pool knows each page that the device has made for it") {
  const auto each_known = [](const std::function<void(PagePool&)>& operate) {
    bool refused = true;
    for (long n = 0; refused; ++n) {
      CAPTURE(n);
      auto pool = PagePool::create(OnSimulation::open(), {.budget = kPages * kPage});
      refused = refuses(n, [&] { operate(*pool); });
      const PoolCounts counts = pool->counts();
      CHECK(OnSimulation::control().leaks().handles == counts.used + counts.spare);
      let_go<OnSimulation>(pool);
    }
  };
  SUBCASE("as it is taken") {
    each_known([](PagePool& pool) {
      const auto buffer = Buffer::create(pool.shared_from_this(), kShape, kCaller);
      try {
        buffer->grow(kCaller, {0, 40}, false);
      } catch (const std::bad_alloc&) {
        buffer->abandon();
        throw;
      }
      buffer->abandon();
    });
  }
  SUBCASE("in advance") {
    each_known([](PagePool& pool) {
      PoolLock lock(pool.shared_from_this());
      pool.store().make_ready(lock, 8);
    });
  }
}

// Growth waits for zeroing by its fence.
TEST_CASE("the mapper needs no memory to enter what it has mapped or zeroed") {
  std::shared_ptr<PagePool> pool =
      PagePool::create(OnSimulation::open(), {.budget = kPages * kPage, .cache = 64 * kPage});
  const Stream side = pool->driver().side_stream();
  OnSimulation::control().hold(side);
  SUBCASE("mapped") {
    const std::shared_ptr<Buffer> first = Buffer::create(pool, {1, kPage, 8, 0, false}, kCaller);
    first->grow(kCaller, {0, 8}, false);
    {
      const PoolLock lock(pool);
      first->keep_nothing();
    }
    first->abandon();
    const std::shared_ptr<Buffer> buffer = Buffer::create(pool, kShape, kCaller);
    Reservation::Arrival arrival;
    {
      const PoolLock lock(pool);
      buffer->want_until(16, false);
      REQUIRE(buffer->claim_ahead(arrival, 4));
    }
    Reservation::Arrival* const one = &arrival;
    Reservation::carry_out({&one, 1}, side, true);
    REQUIRE(arrival.zeroed != nullptr);
    buffer->use({"test", pool->driver().copy_stream()});  // noted meanwhile
    {
      const PoolLock lock(pool);
      allowed = 0;
      CHECK_NOTHROW(buffer->enter_ahead(arrival));
      allowed = -1;
      CHECK_FALSE(buffer->is_quiet());
    }
    buffer->abandon();
  }
  SUBCASE("zeroed") {  // each allocation is refused in turn, those that make the fence among them
    const auto launched = [&pool] {
      return pool->driver().meter().count(ThreadRole::caller, Call::cuMemsetD8Async);
    };
    bool refused = true;
    for (long n = 0; refused; ++n) {
      const std::shared_ptr<Buffer> buffer = Buffer::create(pool, kShape, kCaller);
      buffer->grow(kCaller, {0, 16}, false);
      {
        PoolLock lock(pool);
        buffer->abandon();
        pool->drain_ended();
        const auto before = launched();
        bool zeroed = false;
        refused = refuses(n, [&] { zeroed = buffer->clean_some(lock, 4); });
        CHECK((zeroed || (refused && launched() == before)));
        CHECK(buffer->is_quiet() == !zeroed);
        buffer->keep_nothing();
      }
      OnSimulation::control().release(side);
      pool->wait_idle(kPatience);
      OnSimulation::control().hold(side);
    }
  }
  OnSimulation::control().release(side);
  pool->retire();
  let_go<OnSimulation>(pool);
}

TEST_CASE_TEMPLATE("shared pages", T, OnHost, OnSimulation) {
  each_allocation<T>("fork", [](Bench& bench) {
    return [buffer = bench.buffer(40)] {
      buffer->share_rows(kCaller, kShape, kRows, false)->abandon();
    };
  });
  each_allocation<T>("unshare", [](Bench& bench) {
    const auto buffer = bench.buffer(40);
    const auto fork = buffer->share_rows(kCaller, kShape, kRows, false);
    bench.clients.push_back(fork);
    if (!T::is_cuda) *reinterpret_cast<char*>(fork->address_of(0, 0)) = 1;
    return [fork] { fork->unshare(kCaller, {0, 40}); };
  });
  each_allocation<T>("prefix", [](Bench& bench) {
    return [from = bench.buffer(40), to = bench.buffer(0)] {
      constexpr Interval some[] = {{0, 4}, {4, 8}};
      to->accept(kCaller, {0, 16}, from->offer(kCaller, some, true), true);
      to->accept_deferred(kCaller);
    };
  });
  if (T::is_cuda) return;  // no driver of a device remaps in one step
  each_allocation<T>("reindex", [](Bench& bench) {
    return [buffer = bench.buffer(40)] {
      constexpr std::size_t rows[] = {1, 1};
      const Buffer::Reindexing one{buffer.get(), rows};
      Buffer::reindex(kCaller, {&one, 1});
    };
  });
}

// I5, I14: whichever allocation was refused, also as they went.
TEST_CASE("pages that a reader has gone on from are free") {
  bool refused = true;
  for (long n = 0; refused; ++n) {
    CAPTURE(n);
    const auto pool = PagePool::create(make_host_driver({.page_size = kPage, .shareable = true}),
                                       {.budget = kPages * kPage, .patience = kPatience});
    const std::shared_ptr<Buffer> buffer = Buffer::create(pool, kShape, kCaller);
    buffer->grow(kCaller, {0, 31}, false);
    buffer->share("test", 2);
    const Descriptor range = buffer->range().shared()->open_for_reader("test");
    RangeReaders readers({&range, 1}, pool->open_for_readers("test"), 2, {});
    readers.sync(kCaller, true);
    buffer->share_rows(kCaller, kShape, kRows, false)->abandon();
    const std::shared_ptr<Buffer> fork = buffer->share_rows(kCaller, kShape, kRows, false);
    allowed = n;
    try {
      buffer->grow(kCaller, {0, 40}, false);  // the page that it has with the fork goes
      buffer->shrink_to({0, 3});
    } catch (const std::bad_alloc&) {
    }
    refused = std::exchange(allowed, -1) < 0;
    CHECK_NOTHROW(pool->check_invariants());
    buffer->shrink_to({});
    CHECK_NOTHROW(pool->wait_idle(kPatience));
    readers.sync(kCaller, readers.stale());
    fork->abandon();
    const PoolCounts counts = pool->counts();
    CHECK(counts.held_by_readers == 0);
    CHECK(counts.used == 0);
    CHECK_NOTHROW(pool->check_invariants());
    buffer->abandon();
  }
}

TEST_CASE_TEMPLATE("arenas and heaps", T, OnHost, OnSimulation) {
  each_allocation<T>("make", [](Bench& bench) { return [&] { bench.arena(); }; });
  each_allocation<T>("map", [](Bench& bench) {
    return [arena = bench.arena()] {
      constexpr Interval some[] = {{0, 5 * kPage}, {3 * kPage, 10 * kPage}};
      arena->map(kCaller, some);
      arena->unmap(kCaller, some);
      arena->prepare(some);
      arena->trim(kCaller, some);
    };
  });
  each_allocation<T>("allocate", [](Bench& bench) {
    bench.heap = std::make_shared<Heap>(bench.pool);
    return [&heap = *bench.heap] {
      const Address at = heap.allocate(kCaller, 3 * kPage);
      const Address other = heap.allocate(kCaller, 100);
      heap.pool()->end(heap.publish(at));
      heap.free(kCaller, other);
      heap.trim(kCaller);
    };
  });
}

TEST_CASE_TEMPLATE("pools", T, OnHost, OnSimulation) {
  each_allocation<T>("finish_unmapping", [](Bench& bench) {
    const auto buffer = bench.buffer(40);
    bench.pool->driver().meter().fail_after(0);
    buffer->shrink_to({0, 3});  // whose unmapping is refused
    bench.pool->driver().meter().disarm();
    return [&pool = *bench.pool] {
      pool.counts();
      pool.set_budget(100 * kPage);
      pool.trim();
      pool.wait_idle(kPatience);
    };
  });
  each_allocation<T>("sleep", [](Bench& bench) {
    return [buffer = bench.buffer(40)] {
      FallAsleep falling(buffer->pool());
      const std::array numbers{falling.next_number()};
      falling.add(buffer);
      falling.begin(kCaller);
      falling.finish();
      WakeUp(buffer->pool(), kCaller, numbers).finish(numbers);
    };
  });
}

TEST_CASE_TEMPLATE("slots", T, OnHost, OnSimulation) {
  for (const std::size_t lookahead : {std::size_t{0}, std::size_t{8}}) {
    const SlotCacheShape shape =
        slots::with_contents({4, 64, 1, lookahead, {{2, 1024, 0}, {1, 2048, 16}}});
    const auto open = [shape](Bench& bench) {
      bench.cache = std::make_shared<SlotCache>(bench.pool, shape, kCaller);
    };
    each_allocation<T>("make", [&](Bench& bench) { return [&] { open(bench); }; });
    each_allocation<T>("alloc in a stream", [&](Bench& bench) {
      open(bench);
      return [&cache = *bench.cache] {
        cache.alloc({"test", cache.pool()->driver().copy_stream()}, 10);
      };
    });
    each_allocation<T>("alloc after an eviction", [&](Bench& bench) {
      open(bench);
      std::vector<std::int64_t> lengths(4);
      const std::array slots{bench.cache->alloc(kCaller, 0), bench.cache->alloc(kCaller, 0)};
      lengths[slots[0]] = 14, lengths[slots[1]] = 7;
      bench.cache->step(kCaller, lengths);
      for (const std::size_t slot : slots) bench.cache->free(kCaller, slot);
      const std::size_t again = bench.cache->alloc(kCaller, 5);
      // The other one is listed with what it has cached.
      CHECK((again == slots[0] || again == slots[1]));
      bench.pool->trim();
      return [&cache = *bench.cache] { cache.alloc(kCaller, 5); };
    });
    each_allocation<T>("truncate in a stream", [&](Bench& bench) {
      open(bench);
      std::vector<std::int64_t> lengths(4);
      lengths[bench.cache->alloc(kCaller, 40)] = 40;
      bench.cache->step(kCaller, lengths);
      return [&cache = *bench.cache] {
        cache.truncate({"test", cache.pool()->driver().copy_stream()}, 0, 30);
      };
    });
    each_allocation<T>("step", [&](Bench& bench) {
      open(bench);
      return [&cache = *bench.cache] {
        std::vector<std::int64_t> lengths(4);
        const std::size_t slot = cache.alloc(kCaller, 10);
        lengths[slot] = 12;
        cache.prepare(kCaller, lengths);
        cache.step(kCaller, lengths);
        const std::vector<Token> tokens(12, 7);
        cache.publish(kCaller, slot, tokens, "");
        cache.alloc(kCaller, tokens, "", 20, true);
        cache.truncate(kCaller, slot, 3);
        cache.free(kCaller, slot);
        cache.evict(3);
      };
    });
    each_allocation<T>("swap", [&](Bench& bench) {
      open(bench);
      return [&cache = *bench.cache] {
        std::vector<std::int64_t> lengths(4);
        const std::size_t slot = cache.alloc(kCaller, 10);
        lengths[slot] = 12;
        cache.step(kCaller, lengths);
        const std::array slots{slot, cache.fork(kCaller, slot, 1).front()};
        cache.swap_out(kCaller, slots, [](std::size_t bytes) {
          return HostMemory(new std::byte[bytes], std::default_delete<std::byte[]>());
        });
        cache.swap_in(kCaller, slots);
        const SlotCache::Write write{slots[1], {2, 4}};
        cache.begin_write(kCaller, 0, 0, {&write, 1});
        const std::array sources{slots[1], slots[1]};
        try {
          cache.reorder(kCaller, slots, sources);
        } catch (const std::bad_alloc&) {
          CHECK(cache.lengths().count(SlotState::used) == 2);
          throw;
        }
      };
    });
  }
}

// A CUDA driver with two pages mapped, and two others.
struct DriverBench {
  DriverBench() {
    old = {driver->create(1), driver->create(1)};
    other = {driver->create(1), driver->create(1)};
    range = driver->reserve(2);
    const PageRun run{range, old};
    std::size_t mapped = 0;
    driver->map({&run, 1}, Access::writable, mapped);
  }
  ~DriverBench() { driver->unmap(range, 2); }
  DriverBench(const DriverBench&) = delete;
  DriverBench& operator=(const DriverBench&) = delete;

  const FreshDevice device{kPage};
  const std::unique_ptr<Driver> driver = make_cuda_driver(simulated(kPage, true));
  std::array<Handle, 2> old{}, other{};
  Address range = 0;
};

// Each leaves what was there, and no memory of the device that nothing knows of (I8, I14).
void refuse_each_allocation(const std::function<void(DriverBench&)>& operate) {
  bool refused = true;
  for (long n = 0; refused; ++n) {
    REQUIRE(n < 50);
    CAPTURE(n);
    {
      DriverBench bench;
      refused = refuses(n, [&] { operate(bench); });
    }
    const SimcudaLeaks left = SimcudaControl().leaks();
    CHECK(left.handles == 0);
    CHECK(left.mappings == 0);
    CHECK(left.ranges == 0);
  }
}

// In a tree as deep as the prompt is long.
TEST_CASE("a prompt of many units that the index has no memory for leaves none") {
  constexpr std::size_t kUnits = 50'000;
  const auto pool = slots::Bench<OnHost>::open(8, {});
  const auto nothing = std::make_shared<PageSet>(pool, Interval{}, std::vector<Page*>{});
  const std::vector<Token> tokens(kUnits);
  PrefixIndex index(1);
  const std::vector<Prefix> pages(kUnits, Prefix{nothing});
  std::vector<Prefix> given = pages;
  allowed = 3 * kUnits;
  CHECK_THROWS_AS(index.add(tokens, "salt", 0, std::move(given)), std::bad_alloc);
  allowed = -1;
  CHECK(index.size() == 0);
  CHECK(index.known(tokens, "salt") == 0);
  index.add(tokens, "salt", 0, pages);
  CHECK(index.known(tokens, "salt") == kUnits);
  CHECK(index.known(tokens, "") == 0);
}

TEST_CASE("the end of a fence needs no memory, whichever allocation was refused before") {
  const std::shared_ptr<PagePool> pool =
      PagePool::create(OnSimulation::open(), {.budget = kPages * kPage});
  Driver& driver = pool->driver();
  std::vector<FencePtr> fences;
  bool refused = true;
  for (long n = 0; refused; ++n) {
    fences.clear();
    // More than before, so that there has to be room for more.
    do {
      refused = refuses(n, [&] { fences.push_back(driver.fence(driver.side_stream())); });
    } while (!refused && fences.size() < 64);
    while (fences.size() < 80) fences.push_back(driver.fence(driver.side_stream()));
    allowed = 0;
    for (FencePtr& fence : fences) fence.reset();
    allowed = -1;
  }
}

TEST_CASE("the end of a driver and of a heap, and the mark of a broken pool, need no memory") {
  std::unique_ptr<Driver> driver = make_cuda_driver(simulated(kPage));
  const FencePtr fence = driver->fence(driver->side_stream());
  const auto pool = PagePool::create(OnHost::open(), {.budget = kPages * kPage});
  std::unique_ptr<Heap> heap = std::make_unique<Heap>(pool);
  const Address at = heap->allocate(kCaller, kPage);
  heap->free(kCaller, at);
  const std::exception_ptr cause = std::make_exception_ptr(Error("no undo"));
  allowed = 0;
  driver.reset();
  heap.reset();
  {
    const PoolLock lock(pool);
    pool->store().break_down(cause);
  }
  allowed = -1;
  CHECK(pool->store().broken() == cause);
}

TEST_CASE("a page that was imported is given back") {
  refuse_each_allocation([](DriverBench& bench) {
    const ExportedPage page = bench.driver->export_page(bench.old[0]);
    bench.driver->import_page(page, bench.driver->traits().exports);
  });
}

TEST_CASE("addresses with a page of zeros behind some are given back at once") {
  refuse_each_allocation([](DriverBench& bench) {
    const Backed backed{.first = 1, .every = 3};
    const long n = std::exchange(allowed, -1);
    bench.driver->free_range(bench.driver->reserve(3, backed), 3);  // the first one makes that page
    const std::size_t before = bench.device.leaks().ranges;
    allowed = n;
    try {
      bench.driver->reserve(3, backed);
    } catch (const std::bad_alloc&) {
      CHECK(bench.device.leaks().ranges == before);
      throw;
    }
  });
}

TEST_CASE("pages that were to be replaced stay mapped") {
  refuse_each_allocation([](DriverBench& bench) {
    bench.driver->remap(bench.range, bench.old, Access::writable, bench.other, Access::writable);
  });
}

TEST_CASE("copies that were launched keep their pages until they are done") {
  refuse_each_allocation([](DriverBench& bench) {
    bench.device.configure("eager", 0);
    const std::array<PageCopy, 2> copies{PageCopy{bench.other[0], bench.range},
                                         PageCopy{bench.other[1], bench.range + kPage}};
    try {
      bench.driver->copy_pages(copies);
    } catch (const std::bad_alloc&) {
      const long none_left = std::exchange(allowed, -1);
      bench.driver->copy_pages(copies);
      allowed = none_left;
    }
    CHECK(bench.device.illegal_accesses() == 0);
  });
}

}  // namespace
}  // namespace vtensor
