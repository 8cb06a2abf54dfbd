// Arenas of one pool, each driven by a thread of its own, beside a mapper and refused calls. Under
// ThreadSanitizer and AddressSanitizer.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "arena/arena.h"
#include "base/errors.h"
#include "cpp/hammered.h"
#include "cpp/slot_cache_bench.h"
#include "policy/page_pool.h"

namespace vtensor {
namespace {

using slots::kPage;
using slots::OnHost;
using slots::OnSimulation;

constexpr std::size_t kPages = 40;
const Caller kCaller{"test"};
const std::vector<Interval> kWhole{{0, kPages * kPage}};

struct Outcome {
  std::size_t wrong = 0;    // contents that changed, or were another's
  std::size_t refused = 0;  // operations that raised
};

// Intervals of three quarters of a page, in use as often as `uses` says, filled with `number`.
class Engine {
 public:
  Engine(const std::shared_ptr<PagePool>& pool, char number)
      : arena_(Arena::make(pool, kPages * kPage, false, kCaller)), pool_(pool), number_(number) {}
  ~Engine() { arena_->abandon(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void step(std::mt19937& random) {
    arena_->raise_error(kCaller.operation);
    const std::vector<Interval> some = draw(random);
    switch (random() % 8) {
      case 0:
        return arena_->prepare(some);
      case 1:
        arena_->trim(kCaller, kWhole);
        return;
      case 2:
        return pool_->end(arena_->publish());
      case 3:
      case 4:
      case 5:
        return give_back(random);
      default:
        break;
    }
    arena_->map(kCaller, some);
    for (const Interval one : some) {
      ++uses_[one.begin];
      for (char* at = bytes(one.begin); at < bytes(one.end); ++at) {
        wrong += *at != 0 && *at != number_;  // I7
        *at = number_;
      }
    }
  }

  std::size_t wrong = 0;

 private:
  static constexpr std::size_t kSize = kPage / 4 * 3;

  static std::vector<Interval> draw(std::mt19937& random) {
    std::vector<Interval> some(random() % 5);
    for (Interval& one : some) {
      one.begin = random() % (kPages * kPage / kSize) * kSize;
      one.end = one.begin + kSize;
    }
    return some;
  }
  void give_back(std::mt19937& random) {
    std::vector<Interval> some;
    for (auto at = uses_.begin(); at != uses_.end();) {
      const std::size_t begin = at->first;
      if (random() % 2 == 0) {
        ++at;
        continue;
      }
      wrong += *bytes(begin) != number_ || *bytes(begin + kSize - 1) != number_;
      some.push_back({begin, begin + kSize});
      at = --at->second == 0 ? uses_.erase(at) : std::next(at);
    }
    arena_->unmap(kCaller, some);
  }
  char* bytes(std::size_t at) const { return reinterpret_cast<char*>(arena_->base() + at); }

  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<PagePool> pool_;
  const char number_;
  std::map<std::size_t, std::size_t> uses_;
};

Outcome drive(const std::shared_ptr<PagePool>& pool, unsigned seed) {
  std::mt19937 random(seed);
  Outcome outcome;
  std::unique_ptr<Engine> engine;
  for (std::size_t step = 0; step < 800; ++step) {
    try {
      if (!engine || random() % 200 == 0)
        engine = std::make_unique<Engine>(pool, static_cast<char>(1 + random() % 120));
      engine->step(random);
    } catch (const OutOfPages&) {
      ++outcome.refused;
    } catch (const DriverError&) {
      ++outcome.refused;
    }
    if (engine) outcome.wrong += std::exchange(engine->wrong, 0);
  }
  return outcome;
}

template <class T>
void hammer(PoolOptions options, bool refuse) {
  std::weak_ptr<PagePool> last;
  {
    const std::shared_ptr<PagePool> pool = slots::Bench<T>::open(48, options);
    std::atomic<bool> done{false};
    std::vector<Outcome> outcomes(3);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < outcomes.size(); ++i)
      threads.emplace_back([&, i] { outcomes[i] = drive(pool, i); });
    std::thread watcher([&] {
      for (unsigned i = 0; !done; ++i) {
        const PoolCounts counts = hammered::check_counts(*pool);
        CHECK(counts.used <= counts.budget_pages);  // I5
        if (refuse) pool->driver().meter().fail_after(i % 16, 1 + i % 3);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    for (std::thread& thread : threads) thread.join();
    done = true;
    watcher.join();
    pool->driver().meter().disarm();

    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.wrong == 0);
      CHECK(outcome.refused < 800);
    }
    hammered::come_to_rest(*pool);
    hammered::check_end(*pool);
    last = pool;
  }
  hammered::check_let_go<T>(last);
}

}  // namespace

TEST_CASE_TEMPLATE("arenas beside one another, with and without a mapper", T, OnHost,
                   OnSimulation) {
  hammer<T>({}, false);
  hammer<T>({.prefetch = 16 * kPage, .cache = 48 * kPage, .spare = 4 * kPage}, false);
  hammer<T>({.prefetch = 16 * kPage, .cache = 48 * kPage, .spare = 4 * kPage}, false);
}

TEST_CASE_TEMPLATE("arenas while the driver refuses calls (I8)", T, OnHost, OnSimulation) {
  hammer<T>({}, true);
  hammer<T>({.prefetch = 16 * kPage, .cache = 48 * kPage}, true);
}

}  // namespace vtensor
