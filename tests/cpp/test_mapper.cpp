// The mapper beside callers, in the order that each case needs: it maps ahead, gives back and
// zeroes. Random operations of many threads are in test_sleep.cpp. Under ThreadSanitizer and
// AddressSanitizer.
#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "cpp/hammered.h"
#include "cpp/slot_cache_bench.h"
#include "owner.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"
#include "tensor/buffer.h"
#include "vmm/ledger.h"

namespace vtensor {
namespace {

using slots::kCaller;
using std::chrono::steady_clock;

constexpr std::size_t kBytes = slots::kPage;
constexpr auto open_pool = slots::Bench<slots::OnHost>::open;

// A row of so many pages, of which the first are mapped.
std::shared_ptr<Buffer> row_of(const std::shared_ptr<PagePool>& pool, std::size_t capacity,
                               std::size_t pages = 0) {
  const auto buffer = Buffer::create(pool, {1, kBytes, capacity, 0, false}, kCaller);
  if (pages != 0) buffer->grow(kCaller, {0, pages}, false);
  return buffer;
}
// The same, and their bytes are an owner's.
std::shared_ptr<Buffer> written_row_of(const std::shared_ptr<PagePool>& pool, std::size_t capacity,
                                       std::size_t pages) {
  const auto buffer = row_of(pool, capacity, pages);
  std::memset(reinterpret_cast<void*>(buffer->address_of(0, 0)), 7, pages * kBytes);
  return buffer;
}
void check_zeros(const Buffer& buffer, std::size_t pages) {
  for (std::size_t page = 0; page < pages; ++page)
    CHECK(*reinterpret_cast<char*>(buffer.address_of(0, page)) == 0);
}

}  // namespace

TEST_CASE("a caller that overtakes the mapper waits for no more than a step of its") {
  bool overtaken = false;
  // Tried a few times, as the machine may keep this thread waiting.
  for (int tries = 0; tries < 5 && !overtaken; ++tries) {
    const auto pool = open_pool(1 << 16, {.prefetch = 64 * kBytes});
    const auto buffer = row_of(pool, 1 << 15);
    buffer->prepare(1 << 15);
    CHECK(comes_true([&] { return pool->counts().prefetched > 0; }));
    pool->trim();  // waits for the calls of all threads
    overtaken = pool->counts().prefetched < 1 << 15;
    buffer->grow(kCaller, {0, 2048}, false);  // ready or not
    overtaken = overtaken && pool->counts().prefetched < (1 << 15) - 2048;
    buffer->abandon();
  }
  CHECK(overtaken);  // the mapper had not come to the end
}

TEST_CASE("what a driver's callback has ended is over for the next thread that takes the lock") {
  const auto pool = open_pool(8, {.prefetch = 0});
  const auto buffer = row_of(pool, 8, 2);
  Generation* const lease = buffer->lease(kCaller);
  CHECK(buffer->published());
  pool->end_later(lease);  // no mapper runs
  CHECK(!buffer->published());
  buffer->abandon();
}

TEST_CASE("pages that are announced are not for what only looks ahead") {
  constexpr std::size_t kWhole = 600;  // more than the mapper does in two steps
  const auto pool = open_pool(kWhole, {.prefetch = 64 * kBytes});
  const auto looks_ahead = row_of(pool, kWhole), announced = row_of(pool, kWhole);
  std::optional<Client::Busy> busy;
  {
    PoolLock lock(pool);                      // the mapper finds both
    busy.emplace(*announced, lock, kCaller);  // and cannot map for this one yet
    looks_ahead->want_until(kWhole, true);
    announced->announce(500);
  }
  CHECK_THROWS_AS(pool->wait_idle(std::chrono::milliseconds(50)), TimedOut);
  {
    const PoolLock lock(pool);
    CHECK(looks_ahead->ready_until() == 0);
    busy.reset();
  }
  pool->wait_idle(kPatience);
  {
    const PoolLock lock(pool);
    CHECK(announced->ready_until() == 500);
    CHECK(looks_ahead->ready_until() == 100);
  }
  looks_ahead->abandon();
  announced->abandon();
}

TEST_CASE("what is announced for two is no more than there is") {  // I5
  const auto pool = open_pool(8, {.prefetch = 64 * kBytes});
  const auto first = row_of(pool, 8), second = row_of(pool, 8);
  {
    const PoolLock lock(pool);  // the mapper finds both
    first->announce(6);
    second->announce(6);
  }
  pool->wait_idle(kPatience);
  CHECK(pool->counts().used == 8);
  CHECK_NOTHROW(pool->check_invariants());
  first->abandon();
  second->abandon();
}

TEST_CASE("what ended while the lock was held is looked for before a refusal") {
  const auto pool = open_pool(8, {});
  const auto buffer = row_of(pool, 8, 8);
  Generation* const view = publish(*buffer);
  buffer->abandon();
  PoolLock lock(pool);
  pool->end_locked(view);  // as a deleter leaves it that finds the lock taken
  CHECK_NOTHROW(MakeRoom(*pool).ready(lock, "test", 8));
}

TEST_CASE("an owner whose own pages are on their way out gets them back as others") {
  const auto pool = open_pool(64, {.prefetch = 64 * kBytes});
  Owner owner(pool, kCaller, {1, kBytes / 2, 64, 0, false});
  owner.grow(64, false);
  owner.shrink(64, false);
  const auto buffer = row_of(pool, 128, 60);
  buffer->shrink_to({50, 60});
  const auto begin = steady_clock::now();
  CHECK_NOTHROW(buffer->grow(kCaller, {50, 110}, false));
  CHECK(steady_clock::now() - begin < kPatience / 2);
  buffer->abandon();
}

TEST_CASE("a cached buffer that goes while an owner waits for it is not reused") {
  const auto pool = open_pool(64, {.cache = 32 * kBytes});
  const auto cached = row_of(pool, 16, 8);
  cached->abandon();
  std::optional<Client::Busy> busy;
  {
    PoolLock lock(pool);
    REQUIRE(cached->reusable());
    busy.emplace(*cached, lock, kCaller);  // as the mapper does to zero it
  }
  std::shared_ptr<Buffer> made;
  std::thread owner([&] { made = row_of(pool, 16); });
  CHECK(comes_true([&] {
    PoolLock lock(pool);
    busy.reset();
    if (cached->busy()) {  // the owner waits
      cached->evict();
      return true;
    }
    busy.emplace(*cached, lock, kCaller);
    return false;
  }));
  owner.join();
  CHECK(made != cached);
  made->grow(kCaller, {0, 8}, false);
  made->abandon();
}

TEST_CASE("a new owner never finds what is on its way out of an reused buffer (I7)") {
  const auto pool = open_pool(512, {.prefetch = 64 * kBytes, .cache = 256 * kBytes});
  const std::size_t rows[] = {0};
  for (int i = 0; i < 300; ++i) {
    const auto first = written_row_of(pool, 16, 8);
    const auto fork = first->share_rows(kCaller, first->shape(), rows, false);
    first->unshare(kCaller, {0, 2});
    first->abandon();
    const auto second = row_of(pool, 16, 8);
    check_zeros(*second, 8);
    second->abandon();
    fork->abandon();
  }
}

TEST_CASE("foreign pages whose unmapping is refused are zeroed all the same (I7)") {
  const auto pool = open_pool(32, {.prefetch = 64 * kBytes, .cache = 32 * kBytes});
  std::uint64_t refused = 0;
  for (int i = 0; i < 100; ++i) {
    const auto first = written_row_of(pool, 64, 24);
    first->abandon();
    const auto second = row_of(pool, 64), other = row_of(pool, 64);
    pool->driver().meter().fail_after(0, 1000);
    try {
      other->grow(kCaller, {0, 20}, false);  // which `second` is to give way to
    } catch (const Error&) {
    }
    pool->driver().meter().disarm();
    refused += pool->driver().meter().refused(Call::munmap);
    other->abandon();
    second->grow(kCaller, {0, 8}, false);
    check_zeros(*second, 8);
    second->abandon();
    pool->trim();
  }
  CHECK(refused > 0);
}

TEST_CASE("rows that were prepared half way and then refused are given back") {
  const RowShape shape{2, kBytes, 512, 0, false};
  std::uint64_t refused = 0;
  for (std::uint64_t skip = 0; skip < 6; ++skip) {
    // The second of the mapper's steps finds 38 pages left for the second row.
    const auto pool = open_pool(550, {});
    const std::shared_ptr<Buffer> buffer = Buffer::create(pool, shape, kCaller);
    pool->driver().meter().fail_after(skip, 1);
    buffer->prepare(512);
    try {
      pool->wait_idle(kPatience);
    } catch (const DriverError&) {
    }
    pool->driver().meter().disarm();
    refused += pool->driver().meter().refused(Call::mmap);
    buffer->abandon();
    CHECK_NOTHROW(pool->wait_idle(kPatience));
    CHECK(pool->counts().mapped == 0);
    CHECK(pool->counts().reserved_pages == 0);
  }
  CHECK(refused > 0);
}

TEST_CASE("a prefix whose mapping is refused shows its bytes to no later owner (I7)") {
  const auto pool = open_pool(64, {});
  const Interval whole{0, 4};
  const auto first = written_row_of(pool, 16, 4);
  PageSets offered = first->offer(kCaller, {&whole, 1});
  const auto second = row_of(pool, 16);
  second->accept(kCaller, whole, offered, true);
  Reservation::Arrival arrival;
  {
    const PoolLock lock(pool);
    CHECK(second->claim_ahead(arrival, 4));
  }
  // While the mapper is at it, all others let the pages go.
  offered.clear();
  first->abandon();
  second->abandon();
  Reservation::Arrival* const one = &arrival;
  pool->driver().meter().fail_after(0);
  Reservation::carry_out({&one, 1}, 0, true);
  pool->driver().meter().disarm();
  {
    const PoolLock lock(pool);
    pool->want(second);
    second->enter_ahead(arrival);
    CHECK_FALSE(second->hooks.wanting.linked());
  }
  CHECK(pool->counts().used == 0);
  const auto third = row_of(pool, 16, 4);
  check_zeros(*third, 4);
  third->abandon();
}

// Each mapper sleeps on its place's word, which the other pool wakes, and its own.
TEST_CASE("pools of one budget give each other what they keep") {
  constexpr std::size_t kWhole = 64;
  const PoolOptions options{
      .shared_budget = text("mapper-", getpid()), .prefetch = 8 * kBytes, .cache = kWhole * kBytes};
  std::vector<std::shared_ptr<PagePool>> pools{open_pool(kWhole, options),
                                               open_pool(kWhole, options)};
  const auto take = [&](const std::shared_ptr<PagePool>& pool, std::size_t pages) {
    const auto buffer = row_of(pool, kWhole);
    bool taken = true;
    try {
      buffer->grow(kCaller, {0, pages}, false);
      pool->end_later(publish(*buffer));
    } catch (const OutOfPages&) {
      taken = false;  // the other thread has them just now
    }
    buffer->abandon();
    return taken;
  };
  in_threads(pools.size(), [&](std::size_t which) {
    for (std::size_t i = 0; i < 150; ++i) take(pools[which], 1 + 7 * i % kWhole);
  });
  for (const std::shared_ptr<PagePool>& pool : pools) {
    CHECK(take(pool, kWhole));
    hammered::check_counts(*pool);
    pool->wait_idle(kPatience);
    pool->retire();  // cached pages would keep it, and the file of the budget
  }
}

// Another pool of a budget, that asks this one's for memory.
struct Asking {
  CallMeter meter;
  const std::string name = text("asked-", getpid());
  const std::shared_ptr<PagePool> pool = open_pool(64, {.shared_budget = name});
  const std::unique_ptr<Ledger> ledger =
      Ledger::join(meter, name, 64 * kBytes, pool->traits().device);
  const std::shared_ptr<Buffer> buffer = row_of(pool, 64, 64);  // has all pages

  ~Asking() { buffer->abandon(); }
};

TEST_CASE("a pool answers once it has given up all it can") {
  const Asking asking;
  asking.buffer->shrink_to({});
  PoolLock lock(asking.pool);  // not the mapper gives: no call here lets the lock go
  REQUIRE(asking.pool->store().releasable() == 64);
  asking.ledger->want(64 * kBytes);
  const std::uint32_t request = asking.ledger->request();
  std::size_t steps = 0;
  while (MakeRoom(*asking.pool).give_to_others(lock) == MakeRoom::Given::some) {
    CHECK_FALSE(asking.ledger->answered(request));
    ++steps;
  }
  CHECK(steps > 1);
  CHECK(asking.ledger->answered(request));
}

TEST_CASE("a pool asks again when it has given back pages of its own since it asked") {
  const Asking asking;
  Ledger& other = *asking.ledger;
  const auto give_back = [&](std::size_t pages) {
    PoolLock lock(asking.pool);
    asking.pool->store().release(lock, pages);
  };
  asking.buffer->shrink_to({});
  give_back(44);
  REQUIRE(other.charge(44 * kBytes));
  std::thread grows([&] { CHECK_NOTHROW(asking.buffer->grow(kCaller, {0, 64}, false)); });
  std::uint64_t wanted = 0;
  for (const std::size_t before_the_answer : {8, 0}) {
    std::optional<std::uint32_t> request;
    const auto asks_for_more = [&, before = wanted] {  // a survey asks too, for nothing
      request = other.unanswered();
      wanted = other.balance().wanted_elsewhere;
      return request && wanted > before;
    };
    if (!comes_true(asks_for_more)) break;
    give_back(before_the_answer);
    other.hold(other.held() - (wanted - other.balance().room));
    other.answer(*request, 0, 0);
  }
  grows.join();
  CHECK(other.held() == 0);
}

// Its operation goes on.
struct BusyShrinker : Shrinker {
  std::optional<std::size_t> shrink(std::size_t) noexcept override { return std::nullopt; }
  std::size_t shrinkable() noexcept override { return 4; }
};

TEST_CASE("an operation of a shrinker is waited for, but not by a pool that asks itself") {
  const Asking asking;
  const auto shrinker = std::make_shared<BusyShrinker>();
  asking.pool->add(shrinker);
  for (const bool asks : {false, true}) {
    CAPTURE(asks);
    PoolLock lock(asking.pool);
    asking.pool->store().ledger()->want(asks ? kBytes : 0);
    asking.ledger->want(kBytes);
    const std::uint32_t request = asking.ledger->request();
    const MakeRoom::Given given = MakeRoom(*asking.pool).give_to_others(lock);
    CHECK(given == (asks ? MakeRoom::Given::nothing : MakeRoom::Given::waits));
    CHECK(asking.ledger->answered(request) == asks);
  }
}

// Its operation, which gives all pages back, ends as it is asked.
struct EndingShrinker : Shrinker {
  explicit EndingShrinker(Buffer& buffer) : buffer(buffer) {}
  std::optional<std::size_t> shrink(std::size_t) noexcept override {
    buffer.shrink_to({});
    return 0;
  }
  std::size_t shrinkable() noexcept override { return 0; }

  Buffer& buffer;
};

TEST_CASE("what an operation gives back while shrinkers are asked is given too") {
  const Asking asking;
  const auto shrinker = std::make_shared<EndingShrinker>(*asking.buffer);
  asking.pool->add(shrinker);
  PoolLock lock(asking.pool);
  asking.ledger->want(64 * kBytes);
  const std::uint32_t request = asking.ledger->request();
  while (MakeRoom(*asking.pool).give_to_others(lock) == MakeRoom::Given::some) {
  }
  CHECK(asking.ledger->answered(request));
  CHECK(asking.ledger->balance().room == 64 * kBytes);
}

TEST_CASE("two threads may ask for the mapper at once") {
  for (int i = 0; i < 50; ++i) {
    const auto pool = open_pool(16, {});
    in_threads(3, [&pool](std::size_t) { pool->ensure_mapper(); });
  }
}

}  // namespace vtensor
