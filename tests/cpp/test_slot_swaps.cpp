// Slots of a KV cache that leave for host memory and come back: whole or not at all, in the order
// of the layers, and behind copies that take as long as they like.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>

#include "cpp/slot_cache_bench.h"

namespace vtensor::slots {
namespace {

// K and V of three layers, in two row groups.
SlotCacheShape layered(std::size_t slots) {
  return {slots, 64, 1, 0, {{3, 1000, 0, {{{0}}, {{1}}, {{2}}}}, {2, 2048, 0, {{{0}}, {{2}}}}}};
}

// Bytes of the slots' positions, where they share nothing.
std::size_t bytes_of(const SlotCacheShape& shape, std::size_t positions) {
  std::size_t bytes = 0;
  for (const RowGroup& row_group : shape.row_groups)
    bytes += row_group.rows * row_group.item_bytes * positions;
  return bytes;
}

// A simulated device whose copying stream does nothing until it is let.
class HeldCopies : public Bench<OnSimulation> {
 public:
  using Bench::Bench;
  ~HeldCopies() { release(); }

  void hold() { control.hold(pool->driver().copy_stream()); }
  void release() {
    if (pool) control.release(pool->driver().copy_stream());
  }
  // Executes one item of the stream. False where there is none.
  bool step_copies() {
    const Stream stream = pool->driver().copy_stream();
    if (control.pending(stream) == 0) return false;
    control.step(stream);
    return true;
  }
  bool passed(std::size_t slot, std::optional<std::size_t> layer = {}) {
    const FencePtr fence = cache->swaps().copies(slot, layer);
    return fence == nullptr || pool->driver().passed(*fence);
  }

  const SimcudaControl& control = OnSimulation::control();
};

const PoolOptions kHasty{.patience = std::chrono::milliseconds(50)};

}  // namespace

TEST_CASE_TEMPLATE("one that has nothing, and one that a window has passed, swap too", T, OnHost,
                   OnSimulation) {
  Bench<T> bench({3, 64, 1, 0, {{1, 1024, 0}, {2, 1500, 7}}}, 200);
  const std::size_t slot = bench.alloc(), empty = bench.alloc();
  CHECK(bench.grow(slot, 30));
  CHECK(bench.grow(slot, 1));
  const std::size_t fork = bench.fork(slot, 1).front();  // which no group can have
  CHECK(bench.cache->buffers().begin(slot, 1) == 24);
  bench.swap_out({slot, empty, fork});
  CHECK(bench.host.live() == 2 * (31 * 1024 + 2 * 1500 * (31 - 24)));
  bench.swap_in(fork);
  bench.swap_in(empty);
  bench.swap_in(slot);
  CHECK(bench.cache->buffers().begin(slot, 1) == 24);
  bench.check();
  for (int i = 0; i < 20; ++i) {
    for (const std::size_t each : {slot, empty, fork}) CHECK(bench.grow(each, 1));
  }
  bench.check();
  bench.finish();
}

// I3, I12: by fences alone; no thread waits.
TEST_CASE("layers arrive in their order, each behind a fence of its own") {
  HeldCopies bench(layered(2), 200);
  const std::size_t slot = bench.begin(13);
  bench.swap_out({slot});
  bench.cache->swaps().await_departure(kCaller, slot);
  bench.hold();
  bench.swap_in(slot);
  CHECK(bench.cache->lengths().length(slot) == 13);
  const auto& shape = bench.cache->buffers().shape();
  const auto arrived = [&](std::size_t layer) {  // all rows that the layer reads
    for (std::size_t row_group = 0; row_group < shape.row_groups.size(); ++row_group) {
      const RowGroup& rows = shape.row_groups[row_group];
      for (std::size_t row = 0; row < rows.rows; ++row) {
        if (rows.contents.at(row).layers.front() != layer) continue;
        const char* const at = bench.item(slot, row_group, row, 0);
        if (std::all_of(at, at + 13 * rows.item_bytes, [](char byte) { return byte == 0; }))
          return false;
      }
    }
    return true;
  };
  for (std::size_t layer = 0; layer < 3; ++layer) {
    CAPTURE(layer);
    CHECK_FALSE(bench.passed(slot, layer));
    while (!bench.passed(slot, layer) && bench.step_copies()) {
    }
    CHECK(bench.passed(slot, layer));
    CHECK(arrived(layer));
    for (std::size_t later = layer + 1; later < 3; ++later) {
      CHECK_FALSE(bench.passed(slot, later));
      CHECK_FALSE(arrived(later));
    }
    CHECK(bench.passed(slot) == (layer == 2));
  }
  bench.check();
  bench.release();
  bench.finish();
}

TEST_CASE("a layer before the first that has rows waits for nothing") {
  HeldCopies bench({1, 64, 1, 0, {{2, 1024, 0, {{{1}}, {{3}}}}}}, 100);
  const std::size_t slot = bench.begin(9);
  bench.swap_out({slot});
  bench.hold();
  bench.swap_in(slot);
  CHECK(bench.cache->swaps().copies(slot, 0) == nullptr);
  CHECK_FALSE(bench.passed(slot, 1));
  CHECK(bench.cache->swaps().copies(slot, 2) == bench.cache->swaps().copies(slot, 1));
  CHECK(bench.cache->swaps().copies(slot, 7) == bench.cache->swaps().copies(slot, {}));
  CHECK(bench.cache->swaps().copies(slot, 3) != bench.cache->swaps().copies(slot, 2));
  bench.release();
  bench.check();
  bench.finish();
}

TEST_CASE("pages stay mapped until they are copied, and no other slot gets them (I3)") {
  for (const std::size_t ahead : {std::size_t{0}, 8 * kPage}) {
    PoolOptions options = kHasty;
    options.prefetch = ahead;
    HeldCopies bench({3, 64, 1, 0, {{2, 1024, 0}}}, 24, options);
    const std::size_t slot = bench.begin(36), other = bench.begin(4);  // 18 of 24 pages
    bench.hold();
    bench.swap_out({slot});
    CHECK_FALSE(bench.passed(slot));
    CHECK(bench.pool->counts().pinned == 18);
    CHECK_THROWS_AS(bench.cache->swaps().await_departure(kCaller, slot), TimedOut);  // I12
    CHECK_FALSE(bench.grow(other, 32));
    bench.pool->trim();
    CHECK(bench.pool->counts().pinned == 18);
    while (bench.step_copies()) {
      bench.pool->trim();
      if (!bench.passed(slot)) CHECK(bench.pool->counts().pinned == 18);
    }
    CHECK(bench.passed(slot));
    bench.release();
    bench.cache->swaps().await_departure(kCaller, slot);
    CHECK(bench.pool->counts().pinned == 0);
    CHECK(bench.grow(other, 32));
    bench.check();
    bench.free(other);
    bench.swap_in(slot);
    bench.check();
    bench.finish();
  }
}

TEST_CASE("copies wait for what was launched before, and what is written waits for copies") {
  HeldCopies bench({1, 64, 1, 0, {{1, kPage, 0}}}, 24);
  const std::uint64_t stream = bench.control.make_stream(0);
  const std::size_t slot = bench.begin(2);
  bench.control.hold(stream);
  const auto at = reinterpret_cast<std::uintptr_t>(bench.item(slot, 0, 0, 0));
  CHECK(bench.control.launch(stream, at, 2 * kPage, 7) == 0);
  bench.cache->swap_out({"test", stream}, {&slot, 1}, bench.host);
  bench.control.run();
  CHECK_FALSE(bench.passed(slot));
  CHECK(bench.pool->counts().pinned == 2);
  bench.control.release(stream);
  CHECK(wait_for(bench.pool->driver(), bench.cache->swaps().copies(slot, {}), kPatience));
  bench.cache->swaps().await_departure(kCaller, slot);
  bench.hold();
  bench.cache->swap_in(kCaller, std::array{slot});
  const SlotCache::Write write{slot, {1, 2}};
  bench.cache->begin_write({"test", stream}, 0, 0, {&write, 1});
  CHECK(bench.control.launch(stream, at + kPage, kPage, 8) == 0);
  bench.control.run();
  bench.release();
  bench.control.run();
  const char* const bytes = bench.item(slot, 0, 0, 0);
  CHECK(std::all_of(bytes, bytes + kPage, [](char byte) { return byte == 7; }));
  CHECK(std::all_of(bytes + kPage, bytes + 2 * kPage, [](char byte) { return byte == 8; }));
  CHECK(bench.control.illegal_accesses() == 0);
  bench.model.clear();
  bench.cache.reset();
  bench.pool->wait_idle(kPatience);  // what waits for a stream asks it when the mapper gets to it
  bench.control.destroy_stream(stream);
}

TEST_CASE("a slot is freed only once it has arrived") {
  HeldCopies bench({3, 64, 1, 0, {{2, 1024, 0}}}, 100, kHasty);
  const std::size_t slot = bench.begin(13), other = bench.begin(13);
  bench.swap_out({slot});
  bench.cache->swaps().await_departure(kCaller, slot);
  bench.hold();
  bench.swap_in(slot);
  const auto unchanged = [&] {
    CHECK(bench.cache->lengths().state(slot) == SlotState::used);
    CHECK(bench.cache->lengths().state(other) == SlotState::used);
    CHECK(bench.cache->lengths().length(slot) == 13);
    CHECK(bench.cache->counts().pages.active == 16);
    CHECK_FALSE(bench.passed(slot));
  };
  CHECK_THROWS_AS(bench.cache->free(kCaller, slot), TimedOut);
  unchanged();
  // A beam that goes on, and one that is dropped while it is on its way.
  CHECK_THROWS_AS(bench.cache->reorder(kCaller, std::array{slot, other}, std::array{other, other}),
                  TimedOut);
  unchanged();
  CHECK(bench.alloc() == 3 - slot - other);  // no fork is left behind
  bench.release();
  bench.check();
  bench.free(slot);
  CHECK(bench.alloc() == slot);
  bench.finish();
}

TEST_CASE("a slot that leaves again before it has arrived comes back whole") {
  HeldCopies bench(layered(3), 200);
  const std::size_t slot = bench.begin(13);
  bench.swap_out({slot});
  bench.hold();
  bench.swap_in(slot);
  bench.swap_out({slot});
  bench.swap_in(slot);
  CHECK_FALSE(bench.passed(slot));
  CHECK(bench.host.live() == 2 * bytes_of(bench.cache->buffers().shape(), 13));
  bench.release();
  bench.check();
  CHECK(bench.host.live() == 0);
  bench.finish();
}

TEST_CASE("host memory lasts as long as copies may use it, and no longer") {
  HeldCopies bench(layered(3), 200);
  const std::size_t slot = bench.begin(13), gone = bench.begin(5);
  const std::size_t bytes = bytes_of(bench.cache->buffers().shape(), 13);
  bench.hold();
  bench.swap_out({slot, gone});
  bench.free(gone);
  // Once what copies used no more has gone.
  const auto live = [&] {
    static_cast<void>(bench.cache->swaps().copies(slot, {}));
    return bench.host.live();
  };
  CHECK(live() == bytes_of(bench.cache->buffers().shape(), 13 + 5));  // still written to
  bench.release();
  CHECK(live() == bytes);
  bench.hold();
  bench.swap_in(slot);
  CHECK(live() == bytes);  // still read
  while (!bench.passed(slot) && bench.step_copies()) CHECK(bench.host.live() == bytes);
  bench.release();
  CHECK(live() == 0);
  bench.check();

  // What a refused operation has launched uses it too.
  bench.hold();
  CHECK(bench.control.fail("cuMemcpyDtoHAsync", 2, 1, 700) == 0);
  CHECK_THROWS_AS(bench.cache->swap_out(kCaller, {&slot, 1}, bench.host), DriverError);
  CHECK(live() == bytes);
  bench.release();
  CHECK(live() == 0);
  bench.check();
  bench.swap_out({slot});
  bench.hold();
  CHECK(bench.control.fail("cuMemcpyHtoDAsync", 2, 1, 700) == 0);
  CHECK_THROWS_AS(bench.cache->swap_in(kCaller, std::array{slot}), DriverError);
  bench.free(slot);
  CHECK(live() == bytes);
  bench.release();
  CHECK(live() == 0);
  bench.finish();
}

TEST_CASE("pages that a refused operation has begun to copy stay mapped until it has ended (I3)") {
  HeldCopies bench(layered(1), 200);
  const std::size_t slot = bench.begin(13);
  const std::size_t pages = bench.used();
  for (const char* const call : {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}) {
    const bool out = std::string(call) == "cuMemcpyDtoHAsync";
    if (!out) bench.swap_out({slot});
    bench.hold();
    CHECK(bench.control.fail(call, 2, 1, 700) == 0);
    if (out) {
      CHECK_THROWS_AS(bench.cache->swap_out(kCaller, {&slot, 1}, bench.host), DriverError);
      bench.truncate(slot, 0);
    } else {
      CHECK_THROWS_AS(bench.cache->swap_in(kCaller, std::array{slot}), DriverError);
    }
    bench.pool->trim();
    CHECK(bench.pool->counts().pinned == pages);
    bench.release();
    bench.pool->wait_idle(kPatience);
    CHECK(bench.pool->counts().mapped == 0);
    CHECK(bench.control.illegal_accesses() == 0);
    if (out) CHECK(bench.grow(slot, 13));
  }
  bench.swap_in(slot);
  bench.check();
  bench.finish();
}

TEST_CASE("a cache that closes over copies leaves their host memory to the pool (I12, I14)") {
  HeldCopies bench(layered(4), 200, kHasty);
  std::vector<std::size_t> slots;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(bench.alloc());
    CHECK(bench.grow(slots.back(), 13));
  }
  bench.swap_out({slots[0], slots[1]});
  bench.cache->swaps().await_departure(kCaller, slots[0]);
  bench.hold();
  bench.swap_in(slots[0]);     // on its way in
  bench.swap_out({slots[2]});  // and out
  const std::size_t bytes = bench.host.live();
  CHECK(bytes == bytes_of(bench.cache->buffers().shape(), 3 * 13));
  bench.model.clear();
  bench.away.clear();
  bench.cache.reset();
  CHECK(bench.host.live() == bytes);
  CHECK(bench.pool->counts().mapped != 0);
  CHECK(bench.pool->counts().active == 0);
  while (bench.step_copies()) {
  }
  bench.release();
  CHECK(bench.control.illegal_accesses() == 0);
  bench.pool->wait_idle(kPatience);
  CHECK(bench.pool->counts().mapped == 0);
  CHECK(bench.pool->counts().used == 0);
  CHECK(bench.pool->counts().reserved_pages == 0);
  CHECK(bench.host.live() == 0);
  let_go<OnSimulation>(bench.pool);
}

TEST_CASE_TEMPLATE("a cache closes while copies run", T, OnHost, OnSimulation) {
  for (int round = 0; round < 4; ++round) {
    Bench<T> bench({2, 512, 1, 0, {{2, 16 * kPage, 0}}}, 40'000);
    const std::size_t slot = bench.alloc();
    std::vector<std::int64_t> lengths(2);
    lengths[slot] = 64;
    bench.cache->step(kCaller, lengths);
    bench.cache->swap_out(kCaller, {&slot, 1}, bench.host);
    if (round % 2 != 0) bench.cache->swap_in(kCaller, std::array{slot});
    bench.finish();
  }
}

}  // namespace vtensor::slots
