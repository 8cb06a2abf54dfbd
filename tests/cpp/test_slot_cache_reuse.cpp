// A KV cache's slots where Python cannot ask: prefixes beside tiles, windows, what free slots keep,
// and what the pool's mapper does for slots, alone and beside other threads.
#include <doctest/doctest.h>
#include <unistd.h>

#include <limits>
#include <optional>
#include <thread>

#include "cpp/slot_cache_bench.h"

namespace vtensor::slots {
namespace {

using std::chrono::steady_clock;

SlotCacheShape plain(std::size_t slots, std::size_t lookahead = 0) {
  return {slots, 64, 1, lookahead, {{2, 1024, 0}}};
}

void break_and_retire(PagePool& pool) {
  {
    const PoolLock lock(pool.shared_from_this());
    pool.store().break_down(std::make_exception_ptr(Error("refused")));
  }
  pool.retire();
}

}  // namespace

TEST_CASE_TEMPLATE("a prefix cut before its first step stays mapped with its tile", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({3, 128, 32, 0, {{2, 1024, 0}}}, 200);
  const std::size_t first = bench.begin(20);
  CHECK(bench.used() == 2 * 13);  // and a tile behind them
  const std::vector<Token> tokens = bench.tokens(first);
  CHECK(bench.cache->publish(kCaller, first, std::span(tokens).first(8), "") == 8);
  const std::size_t second = bench.alloc(tokens);
  CHECK(bench.cache->lengths().length(second) == 8);
  CHECK_FALSE(bench.cache->evict(0));
  bench.truncate(second, 6);
  bench.check();  // I3
  CHECK(bench.grow(second, 1));
  bench.check();
  const std::size_t fork = bench.fork(first, 1).front();
  // What a kernel may touch past the fork's length is mapped too.
  CHECK(*bench.item(fork, 0, 1, 50) == 0);
  CHECK(bench.cache->pages(fork, 0).size() == 26);
  bench.truncate(fork, 18);
  bench.check();
  for (int i = 0; i < 40; ++i) CHECK(bench.grow(fork, 1));
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a window as large as can be is no window", T, OnHost, OnSimulation) {
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  Bench<T> bench({1, 64, 1, 0, {{1, 512, most}, {1, 512, most - 1}}}, 64);
  const std::size_t slot = bench.begin(1);
  std::vector<std::int64_t> lengths{8};
  CHECK(bench.cache->step_within(kCaller, lengths));
  CHECK(bench.grow(slot, 63 - 7 - 1));
  bench.check();
}

TEST_CASE_TEMPLATE("windowed slots keep the pages that they end with", T, OnHost, OnSimulation) {
  Bench<T> bench({1, 64, 1, 0, {{1, 1024, 0}, {1, 1024, 8}}}, 100);
  const std::size_t slot = bench.begin(30);
  for (int i = 0; i < 10; ++i) CHECK(bench.grow(slot, 1));
  const std::size_t used = bench.used();
  bench.free(slot);
  CHECK(bench.pool->counts().cached == used);
  CHECK(bench.alloc() == slot);
  for (int i = 0; i < 40; ++i) {
    CHECK(bench.grow(slot, 1));
    bench.check();
  }
  bench.finish();
}

TEST_CASE_TEMPLATE("a cache closed while the mapper is at it caches nothing", T, OnHost,
                   OnSimulation) {
  for (int round = 0; round < 200; ++round) {
    Bench<T> bench(plain(4, 40), 400, {.prefetch = 8 * kPage});
    for (int i = 0; i < 4; ++i) bench.alloc();
    CHECK(bench.step({5, 5, 5, 5}));
    std::this_thread::sleep_for(std::chrono::microseconds(10 * (round % 20)));
    bench.finish();
  }
}

TEST_CASE_TEMPLATE("slots that outlive a broken pool's owner leave nothing (I14)", T, OnHost,
                   OnSimulation) {
  Bench<T> bench(plain(2), 100, {.prefetch = 8 * kPage});
  bench.begin(20);
  break_and_retire(*bench.pool);
  bench.cache.reset();
  let_go<T>(bench.pool);
}

TEST_CASE("nor do slots whose pages were to be zeroed (I14)") {
  const auto& control = OnSimulation::control();
  Bench<OnSimulation> bench(plain(1), 100, {.prefetch = 8 * kPage});
  const Stream stream = control.make_stream(0);
  const std::size_t slot = bench.begin(20);
  control.hold(stream);
  const auto at = reinterpret_cast<std::uintptr_t>(bench.item(slot, 0, 0, 0));
  CHECK(control.launch(stream, at, kPage, 7) == 0);
  bench.cache->use({"test", stream});
  bench.free(slot);
  CHECK(bench.alloc() == slot);
  CHECK_FALSE(bench.cache->prepare(kCaller, std::vector<std::int64_t>{20}));
  break_and_retire(*bench.pool);
  bench.cache.reset();
  control.release(stream);
  control.run();
  control.destroy_stream(stream);
  let_go<OnSimulation>(bench.pool);
}

TEST_CASE_TEMPLATE("the mapper sleeps until half of a look-ahead is used up", T, OnHost,
                   OnSimulation) {
  PoolOptions options;
  options.zero = ZeroPolicy::never;  // nothing else calls the mapper
  Bench<T> bench({2, 64, 1, 8, {{2, 1024, 0}}}, 100, options);
  const auto fall_asleep = [&] {
    bench.pool->wait_idle(kPatience);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  };
  const std::size_t slot = bench.alloc(), other = bench.alloc();
  CHECK(bench.grow(slot, 4));
  fall_asleep();
  CHECK(bench.used() == 2 * 3);
  for (const std::size_t length : {5, 6, 7, 8}) {
    CHECK(bench.grow(slot, 1));
    CHECK(bench.cache->lengths().length(slot) == length);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(bench.used() == 2 * 3);
  }
  CHECK(bench.grow(slot, 1));  // three of eight are left
  comes_true([&] { return bench.used() >= 2 * 5; });
  CHECK(bench.used() == 2 * 5);
  CHECK(bench.grow(other, 4));
  fall_asleep();
  CHECK(bench.grow(other, 1));  // wants pages, and does not wake the mapper
  bench.cache.reset();
  let_go<T>(bench.pool);
}

TEST_CASE_TEMPLATE("no slot waits for one whose pages the driver keeps", T, OnHost, OnSimulation) {
  Bench<T> bench(plain(2), 100);
  const std::size_t parent = bench.begin(9);
  const std::size_t fork = bench.fork(parent, 1).front();
  const auto begin = steady_clock::now();
  bench.pool->driver().meter().fail_after(0, 1'000'000);
  bench.free(fork);  // shared pages are not cached
  CHECK_THROWS_AS(bench.cache->alloc(kCaller, 0), DriverError);
  bench.pool->driver().meter().disarm();
  CHECK(steady_clock::now() - begin < kPatience / 2);
  CHECK(bench.alloc() == fork);
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("an empty slot is found behind any number whose pages the driver keeps", T,
                   OnHost, OnSimulation) {
  constexpr std::size_t kKept = 20;
  Bench<T> bench(plain(kKept + 2), 400);
  const std::size_t parent = bench.begin(9);
  const std::vector<std::size_t> forks = bench.fork(parent, kKept);
  const std::size_t empty = bench.alloc();
  bench.pool->driver().meter().fail_after(0, 1'000'000);
  for (const std::size_t fork : forks) bench.free(fork);  // shared pages are not cached
  bench.free(empty);
  CHECK(bench.alloc() == empty);
  bench.pool->driver().meter().disarm();
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a slot whose rows cannot all be had stays as it was (I8)", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({2, 64, 1, 0, {{2, 1024, 0}, {1, 2048, 0}}}, 100,
                 {.patience = std::chrono::milliseconds(50)});
  const std::size_t slot = bench.begin(12);
  bench.free(slot);
  bench.pool->wait_idle(kPatience);
  const std::size_t cached = bench.pool->counts().cached;
  REQUIRE(cached != 0);
  Buffer& second = bench.cache->buffers().at(slot, 1);
  std::optional<Client::Busy> busy;
  std::thread other([&] {  // as one that makes driver calls for it
    PoolLock lock(bench.pool);
    busy.emplace(second, lock, kCaller);
  });
  other.join();
  CHECK_THROWS_AS(bench.alloc(12), TimedOut);
  {
    const PoolLock lock(bench.pool);
    busy.reset();
  }
  CHECK(bench.pool->counts().cached == cached);
  CHECK(bench.alloc(12) == slot);
  bench.check();
  bench.finish();
}

TEST_CASE("work of a stream that was current at a room step is waited for") {
  Bench<OnSimulation> bench(plain(1), 100);
  const SimcudaControl& control = OnSimulation::control();
  const std::uint64_t stream = control.make_stream(0);
  const std::size_t slot = bench.begin(1);
  CHECK(bench.cache->step_within({"test", stream}, std::vector<std::int64_t>{2}));
  bench.model.clear();
  control.hold(stream);
  const auto at = reinterpret_cast<std::uintptr_t>(bench.item(slot, 0, 0, 0));
  CHECK(control.launch(stream, at, kPage, 7) == 0);
  bench.cache->free(kCaller, slot);
  bench.pool->trim();
  CHECK(bench.pool->counts().mapped == 2);
  control.release(stream);
  control.run();
  bench.pool->wait_idle(kPatience);
  CHECK(bench.pool->counts().mapped == 0);
  CHECK(control.illegal_accesses() == 0);
  bench.cache.reset();
  control.destroy_stream(stream);
}

TEST_CASE("a step's stream is noted for a slot that began in another (I7)") {
  Bench<OnSimulation> bench(plain(2), 100);
  const SimcudaControl& control = OnSimulation::control();
  const std::uint64_t stream = control.make_stream(0);
  const std::size_t slot = bench.begin(4);
  const std::size_t fork = bench.cache->fork({"test", stream}, slot, 1).front();
  const auto at = reinterpret_cast<std::uintptr_t>(bench.item(fork, 0, 0, 0));
  bench.free(slot);
  CHECK(bench.step(bench.lengths()));  // whose kernels read the fork
  control.hold(kCaller.stream);
  CHECK(control.launch(kCaller.stream, at, kPage, 0) == 0);
  bench.cache->free({"test", stream, true}, fork);
  bench.pool->trim();
  CHECK(bench.pool->counts().mapped == 2);
  control.release(kCaller.stream);
  bench.pool->wait_idle(kPatience);
  CHECK(control.illegal_accesses() == 0);
  bench.cache.reset();
  control.destroy_stream(stream);
}

TEST_CASE("zeroing that no fence follows wipes out nothing that a step wrote") {
  const auto& control = OnSimulation::control();
  Bench<OnSimulation> bench(plain(1), 100, {.prefetch = 8 * kPage});
  const Stream stream = control.make_stream(0), side = bench.pool->driver().side_stream();
  const Caller caller{"test", stream};
  const std::size_t slot = bench.cache->alloc(kCaller, 0);
  const std::vector<std::int64_t> lengths{20};
  bench.cache->step(kCaller, lengths);
  control.hold(stream);
  const auto at = reinterpret_cast<std::uintptr_t>(bench.item(slot, 0, 0, 0));
  CHECK(control.launch(stream, at, kPage, 7) == 0);
  bench.cache->use(caller);
  bench.cache->free(kCaller, slot);
  CHECK(bench.cache->alloc(kCaller, 0) == slot);
  CHECK_FALSE(bench.cache->prepare(kCaller, lengths));
  control.hold(side);
  control.fail("cuEventRecord", 0, 1, 999);
  control.release(stream);
  CHECK(comes_true([&] {
    return bench.pool->driver().meter().count(ThreadRole::mapper, Call::cuMemsetD8Async) != 0;
  }));
  CHECK_THROWS_AS(bench.pool->wait_idle(kPatience), DriverError);
  bench.cache->step(caller, lengths);
  CHECK(control.launch(stream, at, kPage, 9) == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  control.release(side);
  control.run();
  bench.pool->wait_idle(kPatience);
  CHECK(*bench.item(slot, 0, 0, 0) == 9);
  bench.cache.reset();
  bench.pool->wait_idle(kPatience);
  control.destroy_stream(stream);
}

TEST_CASE("a forked child may drop a cache whose lock the parent held") {
  Bench<OnSimulation> bench(plain(1), 100);
  bench.begin(5);
  {
    const PoolLock lock(bench.pool);
    CHECK(in_child([&] {
            alarm(10);
            bench.cache.reset();
            return 0;
          }) == 0);
  }
  bench.check();
  bench.finish();
}

}  // namespace vtensor::slots
