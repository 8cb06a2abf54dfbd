// The mapper beside callers whose work runs in streams, over the simulated libcuda. Random
// operations of many threads are in test_sleep.cpp. Under ThreadSanitizer and AddressSanitizer.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/errors.h"
#include "driver/driver.h"
#include "owner.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"
#include "simcuda/client.h"
#include "simcuda/cuda_abi.h"
#include "support.h"
#include "tensor/buffer.h"
#include "vmm/pending_work.h"

namespace vtensor {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 10;  // of a page
constexpr std::size_t kCapacity = 64;                  // positions of half a page

// A pool of a fresh device, and a caller with a stream. In the end nothing of the pool is left.
struct Scene {
  explicit Scene(std::size_t pages, PoolOptions options = {}) {
    options.budget = pages * kBytes;
    options.patience = kPatience;
    pool = PagePool::create(make_cuda_driver(simulated(kBytes)), options);
  }
  ~Scene() {
    pool->retire();
    pool->wait_idle(kPatience);
    CHECK(pool->counts().used == 0);
    pool.reset();
    CHECK(comes_true([&] { return control.leaks().contexts == 0; }));
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  const FreshDevice control{kBytes};
  const Caller caller{"test", static_cast<Stream>(control.make_stream(0)), false};
  std::shared_ptr<PagePool> pool;
};

void await_busy(const std::shared_ptr<PagePool>& pool, const Client& client) {
  CHECK(comes_true([&] {
    const PoolLock lock(pool);
    return client.busy();
  }));
}

}  // namespace

// A driver call of each kind takes so long that others come meanwhile, if the lock lets them.
TEST_CASE("the lock is free while driver calls wait for the device") {
  constexpr double kBusy = 300;  // ms
  const Scene scene(256, {.prefetch = 8 * kBytes});
  const auto& [control, unnamed, pool] = scene;
  const Caller caller{"test", unnamed.stream, true};
  const std::uint64_t elsewhere = control.make_stream(0);
  const RowShape shape{2, kBytes / 2, kCapacity, 0, false};
  const std::size_t rows[] = {0, 1};

  struct Sharer : Owner {
    using Owner::buffer_;
    using Owner::Owner;
  };
  auto owner = std::make_unique<Sharer>(pool, caller, shape);
  owner->grow(16, false);
  std::vector<std::shared_ptr<Buffer>> forks;
  const auto fork = [&] {
    forks.push_back(owner->buffer_->share_rows(caller, shape, rows, false));
  };
  const auto keep = [&] {  // free pages whose memory is kept
    auto freed = std::make_unique<Sharer>(pool, caller, shape);
    freed->grow(16, false);
    freed.reset();
    pool->wait_idle(kPatience);
  };
  const auto shrink = [&] {
    owner->shrink(8, false);
    pool->wait_idle(kPatience);
  };
  struct Step {
    const char* name;
    std::function<void()> before, take;
  };
  const Step steps[] = {
      {"fork", [] {}, fork},
      {"unshare", [] {}, [&] { owner->buffer_->unshare(caller, {0, 16}); }},
      {"give back", [] {}, shrink},
      {"trim", keep, [&] { pool->trim(); }},
      {"budget", keep, [&] { pool->set_budget(pool->counts().used * kBytes); }},
  };
  for (const Step& step : steps) {
    CAPTURE(std::string(step.name));
    step.before();
    control.configure("blocking", 1);
    control.set_latency("cuMemRelease", kBusy * 250);  // there are four and more of them
    control.occupy(elsewhere, kBusy);
    std::atomic<bool> done{false};
    std::thread works([&] {
      CHECK_NOTHROW(step.take());
      done = true;
    });
    std::size_t taken = 0;
    for (; !done; ++taken) {
      {
        const PoolLock lock(pool);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    works.join();
    control.configure("blocking", 0);
    control.set_latency("cuMemRelease", 0);
    CHECK(taken > 10);
    pool->check_invariants();
  }
  for (const std::shared_ptr<Buffer>& forked : forks) forked->abandon();
  owner.reset();
  pool->wait_idle(kPatience);
  CHECK(pool->counts().used == 0);
}

// What a growth is to unshare is promised memory, which it takes once the new pages are mapped.
TEST_CASE("memory that a growth was promised is no other growth's (I5)") {
  const Scene scene(8);
  const auto& [control, caller, pool] = scene;
  PoolLock lock(pool);
  CHECK(MakeRoom(*pool).ready(lock, "test", 2));
  const std::uint64_t made = control.calls("cuMemCreate");
  pool->store().promise(2);
  CHECK(MakeRoom(*pool).ready(lock, "test", 1));
  pool->store().promise(-2);
  CHECK(control.calls("cuMemCreate") == made + 1);
}

// Two of four pages are wanted ahead while the other tensor has them all.
TEST_CASE("pages are wanted as long as some are on their way out, and no longer") {
  constexpr double kBusy = 100;  // ms
  const Scene scene(4, {.prefetch = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const RowShape shape{1, kBytes / 2, kCapacity, 0, false};
  Owner holder(pool, caller, shape), wants(pool, caller, shape);
  holder.grow(8, false);
  for (const bool leaving : {false, true}) {
    CAPTURE(leaving);
    if (leaving) {
      control.occupy(caller.stream, kBusy);
      holder.shrink(6, false);  // its pages wait for what runs in the stream
    }
    wants.prepare(4);
    pool->wait_idle(kPatience);
    CHECK(pool->counts().prefetched == (leaving ? 2 : 0));
  }
  wants.grow(4, false);
  CHECK(pool->events().growths_mapped == 1);  // the holder's
  CHECK(pool->events().growths_ready == 1);
  pool->check_invariants();
}

// The mapper is unmapping when the owner leaves.
TEST_CASE("what is freed while a part of it is unmapped is kept for the next owner") {
  const Scene scene(64, {.prefetch = 8 * kBytes, .cache = 64 * kBytes});
  const auto& [control, caller, pool] = scene;
  std::shared_ptr<Buffer> buffer = Buffer::create(pool, {1, kBytes, kCapacity, 0, false}, caller);
  buffer->grow(caller, {0, kCapacity}, false);
  REQUIRE(control.hold_calls("cuMemUnmap", 1) == 0);
  buffer->shrink_to({0, 2});
  await_busy(pool, *buffer);
  buffer->abandon();
  buffer.reset();
  REQUIRE(control.hold_calls("cuMemUnmap", 0) == 0);
  pool->wait_idle(kPatience);
  CHECK(pool->counts().cached >= 2);
  CHECK(pool->counts().mapped == pool->counts().cached);
}

// A preparation that finds memory evicts as much as it needs, and what it finds comes.
TEST_CASE("pages on their way out count once as memory to come, and shared ones never") {
  const Scene scene(16, {.cache = 16 * kBytes});
  const auto& [control, caller, pool] = scene;
  const auto owner = [&](std::size_t capacity) {
    const RowShape shape{1, kBytes, capacity, 0, false};
    std::shared_ptr<Buffer> buffer = Buffer::create(pool, shape, caller);
    buffer->grow(caller, {0, 4}, false);
    return buffer;
  };
  const auto find = [&](std::size_t more) {
    const PoolLock lock(pool);
    return MakeRoom(*pool).begin(pool->store().unused() + more) == 0;
  };
  SUBCASE("some of a client that is cached") {
    const std::shared_ptr<Arena> pieces = Arena::make(pool, 8 * kBytes, false, caller);
    const Interval all{0, 8 * kBytes}, some{0, 6 * kBytes};
    pieces->map(caller, {&all, 1});
    control.hold(caller.stream);
    pieces->unmap(caller, {&all, 1});
    CHECK(pieces->trim(caller, {&some, 1}) == 6);
    owner(6)->abandon();
    CHECK(pool->counts().cached == 2 + 4);
    CHECK(find(6 + 2 + 1));
    CHECK(pool->counts().cached == 0);
    pieces->abandon();
  }
  SUBCASE("some of a fork") {
    const std::shared_ptr<Buffer> parent = owner(8);
    const std::vector<std::size_t> rows{0};
    const std::shared_ptr<Buffer> fork = parent->share_rows(caller, parent->shape(), rows, false);
    owner(6)->abandon();
    control.hold(caller.stream);
    fork->use(caller);
    fork->abandon();
    CHECK(pool->counts().cached == 4);
    CHECK(find(1));
    CHECK(pool->counts().cached == 0);
    parent->abandon();
  }
  control.release(caller.stream);
}

// The work of the last owner keeps the mapper from zeroing the pages.
TEST_CASE("the lock is free while a growth zeroes what the last owner left") {
  const Scene scene(8, {.cache = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const Caller last{"test", static_cast<Stream>(control.make_stream(0)), false};
  const RowShape shape{1, kBytes, 4, 0, false};
  auto owner = std::make_unique<Owner>(pool, last, shape);
  owner->grow(2, false);
  control.hold(last.stream);
  owner.reset();
  owner = std::make_unique<Owner>(pool, caller, shape);
  CHECK(pool->events().tensors_reused == 1);
  const std::uint64_t before = control.calls("cuMemsetD8Async");
  REQUIRE(control.hold_calls("cuMemsetD8Async", 1) == 0);
  std::thread works([&] { owner->grow(2, false); });
  CHECK(comes_true([&] { return control.calls("cuMemsetD8Async") > before; }));
  CHECK(comes_true([&] { return bool(PoolLock(pool, std::try_to_lock)); }));
  REQUIRE(control.hold_calls("cuMemsetD8Async", 0) == 0);
  works.join();
  control.release(last.stream);
}

// The second tensor's zeroing is refused, so the first one has not grown either. Until then the
// mapper is kept from looking at them. It has mapped before it unmaps, so that it maps next.
TEST_CASE("what a refused growth has zeroed is used after the zeroing, in any stream (I8)") {
  const Scene scene(8, {.prefetch = 8 * kBytes, .cache = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const Caller other{"test", static_cast<Stream>(control.make_stream(0)), false};
  const RowShape shape{1, kBytes, 4, 0, false}, of_second{1, kBytes, 3, 0, false};
  const std::shared_ptr<Buffer> slow = Buffer::create(pool, shape, caller);
  const std::shared_ptr<Buffer> wants = Buffer::create(pool, shape, caller);
  slow->grow(caller, {0, 2}, false);
  REQUIRE(control.hold_calls("cuMemMap", 1) == 0);
  wants->prepare(1);
  await_busy(pool, *wants);
  REQUIRE(control.hold_calls("cuMemUnmap", 1) == 0);
  slow->shrink_to({0, 1});
  REQUIRE(control.hold_calls("cuMemMap", 0) == 0);
  await_busy(pool, *slow);
  std::shared_ptr<Buffer> second = Buffer::create(pool, of_second, other);
  second->grow(other, {0, 2}, false);
  second->abandon();
  second = Buffer::create(pool, of_second, other);
  CHECK(pool->events().tensors_reused == 1);
  const std::shared_ptr<Buffer> first = Buffer::create(pool, shape, other);

  control.hold(caller.stream);
  REQUIRE(control.fail("cuMemsetD8Async", 1, 1, cuda::CUDA_ERROR_UNKNOWN) == 0);
  std::vector<Growth> growths;
  for (const auto& one : {first, second}) growths.push_back({one.get(), {0, 2}, {0, 2}});
  CHECK_THROWS_AS(Buffer::grow_all(caller, growths, false), DriverError);
  SUBCASE("as a growth finds it") {}
  SUBCASE("as it is ready") {
    first->prepare(2);
    REQUIRE(control.hold_calls("cuMemMap", 1) == 0);
    wants->prepare(2);
  }
  REQUIRE(control.hold_calls("cuMemUnmap", 0) == 0);
  CHECK(comes_true([&] {
    const PoolLock lock(pool);
    return !first->hooks.wanting.linked();
  }));
  if (!first->grow_within(other, {0, 2})) first->grow(other, {0, 2}, false);
  REQUIRE(control.hold_calls("cuMemMap", 0) == 0);
  CHECK(control.launch(other.stream, first->address_of(0, 0), 2 * kBytes, 7) == 0);
  control.run();
  control.release(caller.stream);
  control.run();
  const char* const bytes = reinterpret_cast<char*>(first->address_of(0, 0));
  CHECK(std::all_of(bytes, bytes + 2 * kBytes, [](char byte) { return byte == 7; }));
  for (const auto& one : {first, second, slow, wants}) one->abandon();
}

TEST_CASE("free pages that a refused look-ahead has taken are free again") {
  const Scene scene(8, {.prefetch = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const RowShape shape{1, kBytes, kCapacity, 0, false};
  Owner(pool, caller, shape).grow(2, false);
  pool->wait_idle(kPatience);
  CHECK(pool->counts().spare == 2);
  Owner wants(pool, caller, shape);
  CHECK(control.fail("cuMemCreate", 0, 1000, cuda::CUDA_ERROR_OUT_OF_MEMORY) == 0);
  wants.prepare(4);
  pool->wait_idle(kPatience);
  CHECK(control.fail("cuMemCreate", 0, 0, 0) == 0);
  CHECK(pool->counts().prefetched == 0);
  CHECK(pool->counts().spare == 2);
}

// It has no other work than to zero what was freed.
TEST_CASE("a refusal of the mapper's first call is raised once, and the mapper asked again") {
  const Scene scene(8, {.cache = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const std::uint64_t before = control.calls("cuMemGetInfo");
  // Twice: what woke the mapper may have it try again at once.
  CHECK(control.fail("cuMemGetInfo", 0, 2, cuda::CUDA_ERROR_UNKNOWN) == 0);
  Owner(pool, caller, {1, kBytes, kCapacity, 0, false}).grow(2, false);
  while (control.calls("cuMemGetInfo") < before + 2) std::this_thread::yield();
  try {
    pool->wait_idle(kPatience);
  } catch (const DriverError&) {
    // Where the mapper had not said so before.
  }
  CHECK_NOTHROW(pool->wait_idle(kPatience));
  CHECK(pool->counts().cached == 2);
}

TEST_CASE("the worker of a retired pool goes on after a refusal (I14)") {
  const Scene scene(8);
  const auto& [control, caller, pool] = scene;
  control.hold(caller.stream);
  auto memory = std::make_shared<int>();
  const std::weak_ptr<int> kept = memory;
  pool->keep_until(pool->driver().fence(caller.stream), std::move(memory));
  pool->retire();
  const std::uint64_t before = control.calls("cuEventQuery");
  // Several, because the worker that has just been woken looks once more before it sleeps.
  CHECK(control.fail("cuEventQuery", 0, 3, cuda::CUDA_ERROR_UNKNOWN) == 0);
  CHECK(comes_true([&] { return control.calls("cuEventQuery") >= before + 3; }));
  control.release(caller.stream);
  CHECK(comes_true([&] { return kept.expired(); }));
}

TEST_CASE("pages of the last owner are not ready with those that come behind them (I7)") {
  const Scene scene(8, {.prefetch = 8 * kBytes, .cache = 8 * kBytes});
  const auto& [control, caller, pool] = scene;
  const RowShape shape{1, kBytes, 8, 0, false};
  std::shared_ptr<Buffer> buffer = Buffer::create(pool, shape, caller);
  buffer->grow(caller, {0, 4}, false);
  control.hold(caller.stream);
  CHECK(control.launch(caller.stream, buffer->address_of(0, 0), 4 * kBytes, 7) == 0);
  buffer->abandon();
  buffer = Buffer::create(pool, shape, caller);
  CHECK(pool->events().tensors_reused == 1);
  buffer->prepare(8);
  control.release(caller.stream);
  pool->wait_idle(kPatience);
  CHECK(pool->counts().mapped == 8);
  if (!buffer->grow_within(caller, {0, 2})) buffer->grow(caller, {0, 2}, false);
  control.run();
  const char* const bytes = reinterpret_cast<char*>(buffer->address_of(0, 0));
  CHECK(std::all_of(bytes, bytes + 2 * kBytes, [](char byte) { return byte == 0; }));
  buffer->abandon();
}

TEST_CASE(
    "a named stream has its fence at once though the driver refuses to ask after an older one") {
  const Scene scene(4);
  const auto& [control, caller, pool] = scene;
  PendingWork work(pool->driver());
  const Stream first = caller.stream, second = control.make_stream(0);
  control.hold(first);
  work.note(Caller{"test", first, true});
  REQUIRE(control.fail("cuEventQuery", 0, 1, cuda::CUDA_ERROR_UNKNOWN) == 0);
  work.note(Caller{"test", second, true});
  control.destroy_stream(second);  // its owner may do so from now on
  CHECK(work.fences().size() == 2);
  control.release(first);
}

}  // namespace vtensor
