// A KV cache's slots: steps that happen whole or not at all, sharing, parking, windows, swapping.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <functional>
#include <limits>
#include <set>

#include "cpp/slot_cache_bench.h"

namespace vtensor::slots {

TEST_CASE_TEMPLATE("a step takes what lengths need, and no more", T, OnHost, OnSimulation) {
  Bench<T> bench(mixed(4), 512);
  const std::size_t a = bench.alloc(), b = bench.alloc();
  CHECK(bench.grow(a, 5));
  CHECK(bench.grow(b, 17));
  CHECK(bench.used() == bench.pages_of(5) + bench.pages_of(17));  // I4
  bench.check();
  bench.truncate(b, 4);
  CHECK(bench.used() == bench.pages_of(5) + bench.pages_of(4));
  bench.check();
  bench.truncate(a, 0);
  CHECK(bench.used() == bench.pages_of(4));
  CHECK(bench.grow(a, 64));
  CHECK(bench.grow(b, 60));
  bench.check();
  bench.free(a);
  bench.finish();
}

TEST_CASE_TEMPLATE("many slots are mapped by one batch, and calm steps make no call", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({8, 64, 1, 0, {{4, 1024, 0}}}, 512);
  std::vector<std::int64_t> lengths(8, 1);
  for (int i = 0; i < 8; ++i) bench.alloc();
  CHECK(bench.step(lengths));
  const std::uint64_t before = bench.calls();
  for (std::int64_t length = 2; length <= 4; ++length) {
    CHECK(bench.cache->step_within(kCaller, std::vector<std::int64_t>(8, length)));
  }
  CHECK(bench.calls() == before);
  CHECK_FALSE(bench.cache->step_within(kCaller, std::vector<std::int64_t>(8, 5)));
  CHECK(bench.calls() == before);
}

TEST_CASE_TEMPLATE("lengths that cannot be change nothing", T, OnHost, OnSimulation) {
  Bench<T> bench(mixed(3), 64);
  const std::size_t a = bench.alloc(), b = bench.alloc();
  CHECK(bench.grow(a, 3));
  const auto refused = [&](std::vector<std::int64_t> lengths) {
    CHECK_THROWS_AS(bench.step(lengths), InvalidArgument);
    bench.check();
  };
  std::vector<std::int64_t> lengths = bench.lengths();
  lengths[a] = 2;
  refused(lengths);
  lengths[a] = -1;
  refused(lengths);
  lengths = bench.lengths();
  lengths[b] = 4;  // and nothing of this
  lengths[3 - a - b] = 1;
  refused(lengths);
  refused({1, 2});
  lengths = bench.lengths();
  lengths[b] = std::numeric_limits<std::int64_t>::max();
  CHECK_THROWS_AS(bench.step(lengths), CapacityExceeded);
  CHECK_THROWS_AS(bench.cache->free(kCaller, 7), InvalidArgument);
  CHECK_THROWS_AS(bench.cache->truncate(kCaller, a, 4), InvalidArgument);
  CHECK_THROWS_AS(bench.cache->fork(kCaller, 3 - a - b, 1), InvalidArgument);
  CHECK_THROWS_AS(bench.cache->fork(kCaller, a, 2), NoFreeSlot);
  lengths = bench.lengths();
  lengths[b] = 64;
  CHECK_FALSE(bench.step(lengths));  // 64 pages are too few
  CHECK(bench.used() == bench.pages_of(3));
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a cache that passes the address space says so", T, OnHost, OnSimulation) {
  const auto pool = Bench<T>::open(8, {});
  for (const std::size_t length : {std::size_t{1} << 46, std::size_t{1} << 62}) {
    try {
      SlotCache cache(pool, {8, length, 1, 0, {{1, 64, 0}, {4, 4096, 0}}}, kCaller);
      FAIL("made");
    } catch (const CapacityExceeded& error) {
      CHECK(std::string(error.what()).starts_with("[KVCache]"));
      CHECK(std::string(error.what()).find("max_len=") != std::string::npos);
    }
  }
  CHECK(pool->counts().reserved_pages == 0);
}

// What every refusal is tried on: some slots grow by pages, others part shared ones, all in one
// step.
template <class T>
struct Scene : Bench<T> {
  Scene() : Bench<T>({6, 64, 1, 0, {{2, 1000, 0}, {1, 6144, 0}}}, 400) {
    const std::size_t first = this->alloc();
    this->grow(first, 5);
    forks = this->fork(first, 2);
    const std::size_t other = this->alloc();
    this->grow(other, 2);
    slots = {first, forks[0], forks[1], other, this->alloc()};
  }
  std::vector<std::int64_t> wanted() const {
    std::vector<std::int64_t> lengths = this->lengths();
    for (const std::size_t slot : slots) lengths[slot] += 4;
    return lengths;
  }
  std::vector<std::size_t> forks, slots;
};

template <class T>
void refuse_each_call(const std::function<void(Scene<T>&)>& operate,
                      const std::function<void(Scene<T>&, bool done)>& verify) {
  constexpr std::uint64_t kForEver = std::numeric_limits<std::uint64_t>::max() / 2;
  for (const std::uint64_t refuse : {std::uint64_t{1}, std::uint64_t{2}, kForEver}) {
    std::size_t failures = 0;
    bool reached = true;
    for (std::uint64_t skip = 0; reached; ++skip) {
      CAPTURE(skip);
      CAPTURE(refuse);
      REQUIRE(skip < 1000);
      Scene<T> scene;
      const std::uint64_t before = scene.calls();
      bool done = false, lost = false;
      scene.pool->driver().meter().fail_after(skip, refuse);
      try {
        operate(scene);
        done = true;
      } catch (const UndoFailed&) {
        lost = true;
      } catch (const OutOfPages&) {
      } catch (const DriverError&) {
      } catch (const InvalidArgument&) {
        throw;
      } catch (const Error&) {
        lost = true;  // says that pages were
      }
      scene.pool->driver().meter().disarm();
      reached = scene.calls() - before > skip;
      failures += !done;
      CHECK_NOTHROW(scene.pool->check_invariants());
      const PoolCounts counts = scene.pool->counts();
      CHECK(counts.mapped == counts.needed + counts.ahead + counts.parked + counts.held);
      if (!lost && scene.cache->counts().lost == 0 && counts.quarantined == 0) {
        scene.check();
        verify(scene, done);
        scene.check();
      }
      scene.finish(true);
    }
    CHECK(failures >= 3);
  }
}

TEST_CASE_TEMPLATE("a step happens whole or not at all, whatever is refused (I8)", T, OnHost,
                   OnSimulation) {
  refuse_each_call<T>([](Scene<T>& scene) { scene.step(scene.wanted()); },
                      [](Scene<T>& scene, bool done) {
                        if (!done) CHECK(scene.step(scene.wanted()));
                        CHECK(scene.cache->length(scene.slots[0]) == 9);
                      });
}

TEST_CASE_TEMPLATE("so does a fork", T, OnHost, OnSimulation) {
  refuse_each_call<T>([](Scene<T>& scene) { scene.fork(scene.slots[3], 1); },
                      [](Scene<T>& scene, bool done) {
                        // Writes behind the length must reach a page of the slot's own, fork or no
                        // fork.
                        for (int i = 0; i < 3; ++i) {
                          std::vector<std::int64_t> lengths = scene.lengths();
                          for (const auto& [slot, cells] : scene.model) ++lengths[slot];
                          CHECK(scene.step(lengths));
                          CHECK(scene.pool->counts().parted == 0);
                        }
                        CHECK(scene.model.size() == (done ? 6 : 5));
                      });
}

TEST_CASE_TEMPLATE("so does a restoring", T, OnHost, OnSimulation) {
  refuse_each_call<T>(
      [](Scene<T>& scene) {
        const std::size_t slot = scene.forks[0], source = scene.slots[0];
        const Prefix shared = shared_prefix(*scene.cache, slot, source);
        scene.cache->set_aside(kCaller, slot);
        const std::vector<std::uint32_t> cells = scene.model.at(slot);
        scene.model.erase(slot);
        scene.cache->vacate(kCaller, slot);
        scene.cache->restore(kCaller, slot, shared);
        scene.model[slot] = cells;
        scene.truncate(slot, tokens_of(shared, *scene.cache));
      },
      [](Scene<T>& scene, bool) {
        for (int i = 0; i < 3; ++i) {
          std::vector<std::int64_t> lengths = scene.lengths();
          for (const auto& [slot, cells] : scene.model) ++lengths[slot];
          CHECK(scene.step(lengths));
          CHECK(scene.pool->counts().parted == 0);
        }
      });
}

TEST_CASE_TEMPLATE("a slot lost in a driver call is never given out again", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({2, 16, 1, 0, {{1, kPage, 0}}}, 64);
  const std::size_t lost = bench.alloc();
  bench.alloc();
  bool quarantined = false;
  for (std::uint64_t skip = 0; skip < 40 && !quarantined; ++skip) {
    bench.pool->driver().meter().fail_after(skip, 1000);
    try {
      bench.grow(lost, 2);
      bench.truncate(lost, 0);
    } catch (const DriverError&) {
    }
    bench.pool->driver().meter().disarm();
    quarantined = bench.cache->counts().lost != 0;
  }
  if (T::is_cuda) REQUIRE(quarantined);
  if (!quarantined) return bench.finish();  // the host undoes these
  bench.free(lost);
  CHECK_THROWS_AS(bench.alloc(), NoFreeSlot);
  CHECK_THROWS_AS(bench.fork(1 - lost, 1), NoFreeSlot);
  CHECK(bench.grow(1 - lost, 3));
  bench.check();
  bench.finish(true);
}

TEST_CASE_TEMPLATE("a fork takes no page until it writes, then one a row", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({6, 64, 1, 0, {{3, 1024, 0}, {2, 512, 0}}}, 512);
  const std::size_t parent = bench.alloc();
  CHECK(bench.grow(parent, 10));
  const std::size_t before = bench.used();
  const auto forks = bench.fork(parent, 4);
  CHECK(bench.used() == before);
  bench.check();
  CHECK(bench.grow(forks[0], 1));
  CHECK(bench.used() == before + bench.rows());
  CHECK(bench.grow(forks[0], 1));
  CHECK(bench.used() == before + bench.rows());
  CHECK(bench.grow(parent, 1));
  CHECK(bench.used() == before + 2 * bench.rows());
  bench.check();
  bench.rewrite(forks[1], 0);
  bench.check();
  bench.free(parent);
  for (std::size_t i = 1; i < 4; ++i) CHECK(bench.grow(forks[i], 1));
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("the last of those that share a page keeps it", T, OnHost, OnSimulation) {
  Bench<T> bench({2, 64, 1, 0, {{2, 1024, 0}}}, 6);
  const std::size_t parent = bench.alloc();
  CHECK(bench.grow(parent, 6));  // 4 of 6 pages
  bench.fork(parent, 1);
  CHECK(bench.step({7, 7}));  // one of the two takes two pages, the other none
  CHECK(bench.used() == 6);
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a beam step keeps, forks and drops", T, OnHost, OnSimulation) {
  Bench<T> bench(mixed(4), 400);
  std::vector<std::size_t> beams{bench.alloc()};
  CHECK(bench.grow(beams[0], 7));
  for (const std::size_t fork : bench.fork(beams[0], 3)) beams.push_back(fork);
  for (int round = 0; round < 6; ++round) {
    CHECK(bench.step(std::vector<std::int64_t>(4, 8 + round)));
    bench.check();
    const std::vector<std::size_t> sources{beams[1], beams[1], beams[3], beams[1]};
    const auto before = bench.model;
    const auto result = bench.cache->reorder(kCaller, beams, sources);
    bench.model.clear();
    for (std::size_t i = 0; i < 4; ++i) bench.model[result[i]] = before.at(sources[i]);
    CHECK(std::set<std::size_t>(result.begin(), result.end()).size() == 4);
    bench.check();
    beams = result;
  }
  CHECK_THROWS_AS(bench.cache->reorder(kCaller, beams, std::vector<std::size_t>{9, 9, 9, 9}),
                  InvalidArgument);
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("published pages outlive their request and are mapped again", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({3, 64, 1, 0, {{2, 1024, 0}, {1, 2048, 0}}}, 200);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 22));
  auto kept = bench.cache->offer(kCaller, first, std::vector<std::size_t>{0, 4, 8, 20});
  REQUIRE(kept.size() == 3);
  const auto cells = bench.model.at(first);
  bench.check();
  CHECK(bench.grow(first, 1));
  bench.free(first);
  CHECK(bench.used() >= 2 * 5 + 10);
  const std::size_t before = bench.used();
  const std::size_t second = bench.cache->alloc(kCaller, kept, 20);
  bench.model[second] = {cells.begin(), cells.begin() + 20};
  CHECK(bench.used() <= before);
  bench.check();
  kept.pop_back();
  const std::size_t third = bench.cache->alloc(kCaller, kept, 8);
  bench.model[third] = {cells.begin(), cells.begin() + 8};
  CHECK(bench.grow(second, 5));
  CHECK(bench.grow(third, 9));
  bench.rewrite(third, 2);
  bench.check();
  kept.clear();
  bench.check();
  bench.free(second);
  bench.free(third);
  bench.pool->trim();
  CHECK(bench.used() == 0);
  bench.finish();
}

TEST_CASE_TEMPLATE("a prefix cut before its first step stays mapped with its tile", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({3, 128, 32, 0, {{2, 1024, 0}}}, 200);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 20));
  CHECK(bench.used() == 2 * 13);  // and a tile behind them
  auto kept = bench.cache->offer(kCaller, first, std::vector<std::size_t>{0, 8});
  const std::size_t second = bench.cache->alloc(kCaller, kept, 8);
  kept.clear();
  bench.model[second] = {bench.model[first].begin(), bench.model[first].begin() + 8};
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

TEST_CASE_TEMPLATE("steps inside a tile whose pages are shared are calm up to the page", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({2, 128, 32, 0, {{2, 1024, 0}}}, 200);
  const std::size_t parent = bench.alloc();
  CHECK(bench.grow(parent, 17));
  const std::size_t fork = bench.fork(parent, 1).front();
  CHECK(bench.grow(fork, 1));  // parts its page, of tokens 16 to 19
  std::vector<std::int64_t> lengths = bench.lengths();
  lengths[fork] = 20;
  CHECK(bench.cache->step_within(kCaller, lengths));
  lengths[fork] = 21;
  CHECK_FALSE(bench.cache->step_within(kCaller, lengths));
}

TEST_CASE_TEMPLATE("windowed layers give their first pages back", T, OnHost, OnSimulation) {
  Bench<T> bench({2, 200, 1, 0, {{1, 1024, 0}, {1, 1024, 10}, {2, 1500, 7}}}, 400);
  const std::size_t slot = bench.alloc();
  CHECK(bench.grow(slot, 30));  // a prompt sees itself
  CHECK(bench.used() == bench.pages_of(30));
  std::size_t calm = 0;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t before = bench.calls();
    CHECK(bench.grow(slot, 1));
    calm += bench.calls() == before;
    bench.check();
    const std::size_t first = bench.cache->begins(slot)[1];
    CHECK(first <= bench.cache->length(slot) - 10);  // what the last token saw is there
    CHECK(bench.used() <= 23 + 4 + 2 * 5);
  }
  CHECK(calm >= 8);
  CHECK_THROWS_AS(bench.truncate(slot, 40), InvalidArgument);
  bench.truncate(slot, 90 - 1);
  bench.check();
  const std::size_t fork = bench.fork(slot, 1).front();
  for (int i = 0; i < 20; ++i) CHECK(bench.grow(fork, 1));
  bench.check();
  CHECK_THROWS_AS(bench.cache->offer(kCaller, slot, std::vector<std::size_t>{0, 8}),
                  InvalidArgument);
  bench.truncate(slot, 0);
  CHECK(bench.grow(slot, 12));
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a window as large as can be is no window", T, OnHost, OnSimulation) {
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  Bench<T> bench({1, 64, 1, 0, {{1, 512, most}, {1, 512, most - 1}}}, 64);
  const std::size_t slot = bench.alloc();
  CHECK(bench.grow(slot, 1));
  std::vector<std::int64_t> lengths{8};
  CHECK(bench.cache->step_within(kCaller, lengths));
  CHECK(bench.grow(slot, 63 - 7 - 1));
  bench.check();
}

TEST_CASE_TEMPLATE("a group that is swapped shares its pages again", T, OnHost, OnSimulation) {
  for (const std::size_t ahead : {std::size_t{0}, 16 * kPage}) {
    Bench<T> bench(mixed(3), 400, {.ahead = ahead});
    const std::size_t first = bench.alloc();
    CHECK(bench.grow(first, 21));
    const std::size_t second = bench.fork(first, 1).front();
    CHECK(bench.grow(second, 3));
    Prefix shared = shared_prefix(*bench.cache, second, first);
    REQUIRE(!shared.empty());
    std::size_t most = bench.used();
    const auto shared_before = bench.cache->shared_pages(second, first);
    for (std::size_t kind = 0; kind < 3; ++kind) {  // pages that no token ends in are not kept
      most += bench.cache->shape().kinds[kind].rows *
              (shared_before[kind] - shared[kind]->slots().size());
    }
    for (int round = 0; round < 20; ++round) {
      bench.cache->set_aside(kCaller, second);
      CHECK(bench.cache->lengths()[second] == 0);
      CHECK_THROWS_AS(bench.cache->fork(kCaller, second, 1), InvalidArgument);
      // What swapping copies.
      std::vector<std::vector<char>> copies;
      const auto each_row = [&](const std::function<void(char*, std::size_t)>& body) {
        for (std::size_t kind = 0; kind < 3; ++kind) {
          const SlotKind& rows = bench.cache->shape().kinds[kind];
          const std::size_t skip = shared[kind]->slots().end * kPage;
          for (std::size_t row = 0; row < rows.rows; ++row)
            body(bench.item(second, kind, row, 0) + skip, 24 * rows.item_bytes - skip);
        }
      };
      each_row([&](char* at, std::size_t n) { copies.emplace_back(at, at + n); });
      bench.cache->vacate(kCaller, second);
      if (round % 2 == 0) {
        bench.pool->wait_idle(std::chrono::seconds(20));
        CHECK(bench.used() == bench.pages_of(21));
      }
      bench.cache->restore(kCaller, second, shared);
      auto copy = copies.begin();
      each_row([&](char* at, std::size_t n) { std::memcpy(at, (copy++)->data(), n); });
      const auto pages = bench.cache->shared_pages(second, first);
      for (std::size_t kind = 0; kind < 3; ++kind)
        CHECK(pages[kind] == shared[kind]->slots().size());
      bench.check();
    }
    bench.pool->wait_idle(std::chrono::seconds(20));
    CHECK(bench.used() <= most);
    shared.clear();
    CHECK_THROWS_AS(bench.cache->vacate(kCaller, first), InvalidArgument);
    CHECK(bench.grow(second, 4));
    bench.check();
    bench.finish();
  }
}

TEST_CASE_TEMPLATE("a group shares what one of it has given back since", T, OnHost, OnSimulation) {
  Bench<T> bench(mixed(3), 400);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 21));
  const std::size_t second = bench.fork(first, 1).front();
  const auto cells = bench.model.at(second);
  Prefix shared = shared_prefix(*bench.cache, second, first);
  bench.cache->set_aside(kCaller, second);
  bench.cache->vacate(kCaller, second);
  bench.model.erase(second);
  bench.truncate(first, 3);
  bench.cache->restore(kCaller, second, shared);
  CHECK(tokens_of(shared, *bench.cache) > 3);
  bench.model[second] = cells;
  bench.truncate(second, tokens_of(shared, *bench.cache));
  bench.check();
  shared.clear();
  bench.finish();
}

}  // namespace vtensor::slots
