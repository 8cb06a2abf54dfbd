// A KV cache's slots: steps that happen whole or not at all, sharing, prefixes, windows.
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

TEST_CASE_TEMPLATE("many slots are mapped by one batch, and room steps make no call", T, OnHost,
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
      CHECK(std::string(error.what()).find("lower max_batch or max_len") != std::string::npos);
    }
  }
  CHECK(pool->counts().reserved_pages == 0);
}

TEST_CASE_TEMPLATE("a step happens whole or not at all, whatever is refused (I8)", T, OnHost,
                   OnSimulation) {
  refuse_each_call<T>([](Scene<T>&) {}, [](Scene<T>& scene) { scene.step(scene.wanted()); },
                      [](Scene<T>& scene, bool done) {
                        if (!done) CHECK(scene.step(scene.wanted()));
                        CHECK(scene.cache->lengths().length(scene.slots[0]) == 9);
                      });
}

TEST_CASE_TEMPLATE("so does a fork", T, OnHost, OnSimulation) {
  refuse_each_call<T>([](Scene<T>&) {}, [](Scene<T>& scene) { scene.fork(scene.slots[3], 1); },
                      [](Scene<T>& scene, bool done) {
                        scene.check_writes();  // fork or no fork
                        CHECK(scene.model.size() == (done ? 6 : 5));
                      });
}

TEST_CASE_TEMPLATE("so does the publishing of a prefix", T, OnHost, OnSimulation) {
  const auto grow = [](Scene<T>& scene) { scene.grow(scene.slots[3], 11); };
  refuse_each_call<T>(
      grow, [](Scene<T>& scene) { scene.publish(scene.slots[3]); },
      [](Scene<T>& scene, bool done) {
        CHECK(scene.cache->counts().prefix_units == (done ? 2 : 0));
        CHECK((scene.pool->counts().in_page_sets != 0) == done);
        CHECK(scene.publish(scene.slots[3]) == 10);
        scene.check_writes();
      });
}

TEST_CASE_TEMPLATE("so does the beginning of a request with a prefix", T, OnHost, OnSimulation) {
  refuse_each_call<T>(
      [](Scene<T>& scene) {
        scene.grow(scene.slots[3], 11);
        scene.publish(scene.slots[3]);
      },
      [](Scene<T>& scene) { scene.alloc(scene.tokens(scene.slots[3])); },
      [](Scene<T>& scene, bool done) {
        CHECK(scene.model.size() == (done ? 6 : 5));
        CHECK((scene.cache->counts().prefix_hits != 0) == done);
        if (!done) scene.alloc(scene.tokens(scene.slots[3]));
        CHECK(scene.model.size() == 6);
        scene.check_writes();
      },
      1);
}

TEST_CASE_TEMPLATE("a slot with pages that came and cannot go is given out once they have", T,
                   OnHost, OnSimulation) {
  std::size_t left = 0;  // runs in which pages stayed
  for (std::uint64_t skip = 0; skip < 40; ++skip) {
    CAPTURE(skip);
    Bench<T> bench({2, 16, 1, 0, {{2, kPage, 0}}}, 64);
    const std::size_t slot = bench.alloc();
    bench.alloc();
    bench.pool->driver().meter().fail_after(skip, 1'000'000);
    bool grown = true;
    try {
      bench.grow(slot, 2);
    } catch (const DriverError&) {
      grown = false;
    }
    const PoolCounts counts = bench.pool->counts();
    CHECK_NOTHROW(bench.pool->check_invariants());
    if (!grown && counts.pinned != 0) {
      ++left;
      bench.free(slot);
      CHECK_THROWS_AS(bench.alloc(), DriverError);
      bench.pool->driver().meter().disarm();
      CHECK(bench.alloc() == slot);
      CHECK(bench.grow(slot, 3));
    }
    bench.pool->driver().meter().disarm();
    CHECK(bench.grow(1 - slot, 3));
    bench.check();
    bench.finish();
  }
  CHECK(left != 0);
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
  CHECK(bench.cache->buffers().unit() == 4);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 22));
  const std::vector<Token> tokens = bench.tokens(first);
  CHECK(bench.publish(first) == 20);
  CHECK(bench.publish(first) == 20);  // once
  CHECK(bench.cache->counts().prefix_units == 5);
  CHECK(bench.pool->counts().in_page_sets == 2 * 5 + 10);
  bench.check();
  CHECK(bench.grow(first, 1));
  bench.free(first);
  const std::size_t before = bench.used();
  CHECK(before >= 2 * 5 + 10);
  const std::size_t second = bench.alloc(tokens);
  CHECK(bench.cache->lengths().length(second) == 20);
  CHECK(bench.used() <= before);
  bench.check();
  // Never all of a request's tokens: the last one is computed.
  const std::size_t third = bench.alloc({tokens.begin(), tokens.begin() + 12});
  CHECK(bench.cache->lengths().length(third) == 8);
  CHECK(bench.grow(second, 5));
  CHECK(bench.grow(third, 9));
  bench.rewrite(third, 2);
  bench.check();
  CHECK_THROWS_AS(bench.publish(third), InvalidArgument);  // these are other tokens now
  CHECK_FALSE(bench.cache->evict(0));                      // all are in use
  bench.free(second);
  bench.check();
  bench.free(third);
  for (unsigned tries = 0; bench.cache->evict(tries);) ++tries;
  const SlotCacheCounts counts = bench.cache->counts();
  CHECK(counts.prefix_units == 0);
  CHECK(counts.prefix_evictions == 5);
  CHECK(counts.prefix_queries == 22 + 12);
  CHECK(counts.prefix_hits == 20 + 8);
  bench.pool->trim();
  CHECK(bench.used() == 0);
  bench.finish();
}

TEST_CASE_TEMPLATE("positions of several pages are shared as far as whole pages hold them", T,
                   OnHost, OnSimulation) {
  Bench<T> bench({2, 64, 1, 0, {{1, 6144, 0}, {1, 3000, 0}}}, 200);
  const std::size_t unit = bench.cache->buffers().unit();
  CHECK(unit == 2);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 12));
  CHECK(bench.publish(first) == 12);
  for (std::size_t asked = 0; asked <= 12; ++asked) {
    std::vector<Token> tokens = bench.tokens(first);
    tokens.resize(asked);
    const std::size_t slot = bench.alloc(tokens);
    const std::size_t units = (std::max<std::size_t>(asked, 1) - 1) / unit;
    const std::size_t covered = std::min(units * unit * 6144 / kPage * kPage / 6144,
                                         units * unit * 3000 / kPage * kPage / 3000);
    CHECK(bench.cache->lengths().length(slot) == covered);
    bench.check();
    CHECK(bench.grow(slot, 1));
    bench.check();
    bench.free(slot);
  }
  bench.finish();
}

TEST_CASE_TEMPLATE("what cannot be published says so", T, OnHost, OnSimulation) {
  Bench<T> bench({2, 64, 1, 0, {{1, 1024, 0}}}, 200);
  const std::size_t slot = bench.alloc();
  CHECK(bench.grow(slot, 9));
  std::vector<Token> tokens = bench.tokens(slot);
  CHECK_THROWS_AS(bench.cache->publish(kCaller, 1 - slot, tokens, ""), InvalidArgument);
  tokens.push_back(7);
  CHECK_THROWS_AS(bench.cache->publish(kCaller, slot, tokens, ""), InvalidArgument);
  tokens.resize(3);
  CHECK(bench.cache->publish(kCaller, slot, tokens, "") == 0);
  CHECK(bench.publish(slot) == 8);
  tokens = bench.tokens(slot);
  ++tokens[1];
  CHECK_THROWS_AS(bench.cache->publish(kCaller, slot, tokens, ""), InvalidArgument);
  bench.truncate(slot, 1);
  CHECK(bench.grow(slot, 8));
  CHECK(bench.publish(slot) == 8);  // other tokens, after the first
  CHECK(bench.cache->counts().prefix_units == 4);
  // Under another salt nothing is known.
  CHECK(bench.cache->lengths().length(
            bench.cache->alloc(kCaller, bench.tokens(slot), "other", 0)) == 0);
  bench.check();
  bench.finish();
}

TEST_CASE_TEMPLATE("a prefix cut before its first step stays mapped with its tile", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({3, 128, 32, 0, {{2, 1024, 0}}}, 200);
  const std::size_t first = bench.alloc();
  CHECK(bench.grow(first, 20));
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

TEST_CASE_TEMPLATE("steps inside a tile whose pages are shared are room up to the page", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({2, 128, 32, 0, {{2, 1024, 0}}}, 200);
  const std::size_t parent = bench.alloc();
  CHECK(bench.grow(parent, 17));
  const std::size_t fork = bench.fork(parent, 1).front();
  CHECK(bench.grow(fork, 1));  // unshares its page, of tokens 16 to 19
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
  std::size_t room = 0;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t before = bench.calls();
    CHECK(bench.grow(slot, 1));
    room += bench.calls() == before;
    bench.check();
    const std::size_t first = bench.cache->buffers().begins(slot)[1];
    CHECK(first <= bench.cache->lengths().length(slot) - 10);  // what the last token saw is there
    CHECK(bench.used() <= 23 + 4 + 2 * 5);
  }
  CHECK(room >= 8);
  CHECK_THROWS_AS(bench.truncate(slot, 40), InvalidArgument);
  bench.truncate(slot, 90 - 1);
  bench.check();
  const std::size_t fork = bench.fork(slot, 1).front();
  for (int i = 0; i < 20; ++i) CHECK(bench.grow(fork, 1));
  bench.check();
  CHECK_THROWS_AS(bench.publish(slot), InvalidArgument);
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

}  // namespace vtensor::slots
