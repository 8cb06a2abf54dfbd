// Random operations on a slot cache that is short of memory, against the plain model, with driver
// calls refused now and then. VTENSOR_OPERATIONS says how many; scripts/soak_slots.sh runs
// millions.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <random>
#include <thread>

#include "cpp/hammered.h"
#include "cpp/slot_cache_bench.h"

namespace vtensor::slots {
namespace {

constexpr std::size_t kSlots = 6, kLength = 24, kPages = 80;

// Bytes of the process that are in memory.
std::size_t resident() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

template <class T>
class Machine {
 public:
  Machine(unsigned seed, PoolOptions options, bool refuse)
      : bench_(shape(options.prefetch != 0), kPages, options), random_(seed), refuse_(refuse) {}
  // In a pool that others use too.
  Machine(unsigned seed, const std::shared_ptr<PagePool>& shared)
      : bench_(shared, shape(shared->looks_ahead())), random_(seed), refuse_(false) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      if (refuse_ && pick(50) == 0)
        bench_.pool->driver().meter().fail_after(pick(12), 1 + pick(2) * 100);
      try {
        operate();
      } catch (const OutOfPages&) {
        ++refused_;
        ++short_of_memory_;
      } catch (const NoFreeSlot&) {
        ++refused_;
      } catch (const DriverError&) {
        ++refused_;
      } catch (const InvalidArgument&) {
        ++refused_;  // what windows do not allow
      }
      bench_.pool->driver().meter().disarm();
      if (refuse_) {
        CHECK_NOTHROW(bench_.pool->check_invariants());
        if (bench_.pool->store().broken()) break;  // the next machine goes on
      }
      if (i % 64 == 0 || refuse_) bench_.check();
      if (i % 100'000 == 99'999 && operations > 1'000'000) {
        std::printf("%zu of %zu operations, %zu MiB\n", i + 1, operations, resident() >> 20);
        std::fflush(stdout);
        if (settled_ == 0) settled_ = resident();
      }
      ++done_;
    }
  }
  std::size_t finish() {
    // Handles are used again, and not made anew for ever: the most is a thousand.
    if (!T::is_cuda && bench_.alone) CHECK(bench_.pool->driver().create(1) < 4'000);
    if (settled_ != 0) CHECK(resident() < settled_ + (std::size_t{16} << 20));
    bench_.finish();
    return done_;
  }
  std::size_t refused() const { return refused_; }
  std::size_t short_of_memory() const { return short_of_memory_; }
  std::size_t stepped() const { return stepped_; }
  std::size_t found() const { return found_; }        // requests that began with a known prefix
  std::size_t returned() const { return returned_; }  // slots swapped in

 private:
  static SlotCacheShape shape(bool ahead) {
    return {
        kSlots, kLength, 1, ahead ? std::size_t{2} : 0, {{2, 1000, 0}, {1, 6144, 0}, {1, 2048, 9}}};
  }
  std::size_t pick(std::size_t n) { return random_() % n; }
  // A slot in use, or none.
  std::optional<std::size_t> any() {
    if (bench_.model.empty()) return std::nullopt;
    auto at = bench_.model.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(pick(bench_.model.size())));
    return at->first;
  }

  void operate() {
    const std::size_t what = pick(24);
    if (what == 0) return static_cast<void>(bench_.alloc(pick(kLength)));
    if (what == 1) return alloc_known();
    const auto slot = any();
    if (!slot) return bench_.away.empty() ? static_cast<void>(bench_.alloc()) : swap_in();
    std::vector<std::uint32_t>& cells = bench_.model.at(*slot);
    switch (what) {
      case 2:
      case 3:
        return bench_.free(*slot);
      case 4:
        return bench_.truncate(*slot, pick(cells.size() + 1));
      case 5:
        return static_cast<void>(bench_.fork(*slot, 1 + pick(2)));
      case 6:
        return publish(*slot);
      case 7:
        if (!cells.empty()) bench_.rewrite(*slot, pick(cells.size()));
        return;
      case 8:
        return swap_out(*slot);
      case 9:
        return swap_in();
      case 10:
        return reorder();
      case 11:
        return evict();
      default:
        return step();
    }
  }

  void step() {
    std::vector<std::int64_t> wanted = bench_.lengths();
    for (const auto& [slot, cells] : bench_.model) {
      if (pick(3) != 0)
        wanted[slot] = std::min<std::int64_t>(
            kLength, wanted[slot] + (pick(8) ? 1 : static_cast<std::int64_t>(pick(9))));
    }
    const std::vector<std::int64_t> before = bench_.lengths();
    if (bench_.step(wanted)) {
      ++stepped_;
      return;
    }
    ++refused_;
    ++short_of_memory_;
    CHECK(bench_.lengths() == before);
    if (bench_.cache->evict(0)) return;
    if (const auto slot = any()) bench_.free(*slot);
  }

  void evict() {
    const std::size_t used = bench_.used();
    PrefixIndex& prefixes = bench_.cache->prefixes();
    const auto evictable = [&] {
      const PoolLock lock(bench_.pool);
      return prefixes.evictable(SIZE_MAX);
    };
    const std::size_t pages = prefixes.pages(), most = evictable();
    const std::size_t freed = prefixes.evict(pick(20));
    if (!bench_.alone) return;  // others that need memory evict too
    CHECK(prefixes.pages() == pages - freed);
    CHECK(freed + evictable() >= most);  // more where copies or freed slots leave some meanwhile
    // Copies that end meanwhile free some too. With a mapper others are mapped.
    if (!bench_.pool->looks_ahead()) CHECK(bench_.used() <= used - freed);
  }

  void publish(std::size_t slot) {
    if (pick(4) == 0)
      static_cast<void>(bench_.cache->publish(kCaller, slot, bench_.tokens(slot), "salt"));
    if (bench_.publish(slot) == 0) return;
    prompts_.push_back(bench_.tokens(slot));
    if (prompts_.size() > 8) prompts_.pop_front();
    if (pick(4) != 0) begin_like(prompts_.back());  // before memory is short, and it is given up
  }

  void alloc_known() {
    if (!prompts_.empty()) begin_like(prompts_[pick(prompts_.size())]);
  }

  // A request that begins as one before it, and goes on with tokens of its own.
  void begin_like(std::vector<Token> tokens) {
    tokens.resize(tokens.size() - pick(4));
    const std::size_t same = tokens.size();
    tokens.resize(same + pick(8), -1);
    const std::size_t slot = bench_.alloc(tokens);
    CHECK(bench_.cache->lengths().length(slot) <= same);
    found_ += bench_.cache->lengths().length(slot) != 0;
  }

  // One, or some that may share pages.
  void swap_out(std::size_t slot) {
    std::vector<std::size_t> slots{slot};
    for (std::size_t more = pick(3); more != 0; --more) {
      const std::size_t other = *any();
      if (std::find(slots.begin(), slots.end(), other) == slots.end()) slots.push_back(other);
    }
    bench_.swap_out(slots);
  }

  void swap_in() {
    if (bench_.away.empty()) return;
    auto at = bench_.away.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(pick(bench_.away.size())));
    if (pick(8) == 0) return bench_.free(at->first);
    bench_.swap_in(at->first);
    ++returned_;
  }

  void reorder() {
    std::vector<std::size_t> beams, sources;
    for (const auto& [slot, cells] : bench_.model) {
      if (beams.size() < 3) beams.push_back(slot);
    }
    for (std::size_t i = 0; i < beams.size(); ++i) sources.push_back(beams[pick(beams.size())]);
    const auto before = bench_.model;
    std::vector<std::size_t> result;
    try {
      result = bench_.cache->reorder(kCaller, beams, sources);
    } catch (const Error&) {
      for (const std::size_t beam : beams) {  // some may have been dropped by then
        if (bench_.cache->lengths().state(beam) == SlotState::free) bench_.model.erase(beam);
      }
      throw;
    }
    for (const std::size_t beam : beams) bench_.model.erase(beam);
    for (std::size_t i = 0; i < beams.size(); ++i) bench_.model[result[i]] = before.at(sources[i]);
  }

  Bench<T> bench_;
  std::mt19937 random_;
  const bool refuse_;
  std::deque<std::vector<Token>> prompts_;  // published not long ago
  std::size_t done_ = 0, refused_ = 0, stepped_ = 0, found_ = 0, returned_ = 0;
  std::size_t short_of_memory_ = 0;
  std::size_t settled_ = 0;  // bytes resident once caches are warm; of long runs
};

// Operations beside which no call is refused.
template <class T>
void run(unsigned seed, PoolOptions options, std::size_t operations) {
  Machine<T> machine(seed, options, false);
  machine.run(operations);
  CHECK(machine.finish() == operations);
}

std::size_t operations() {
  const char* text = std::getenv("VTENSOR_OPERATIONS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 200'000;
}

}  // namespace

TEST_CASE("random operations on the host") {
  Machine<OnHost> machine(1, {}, false);
  machine.run(operations());
  CHECK(machine.refused() > operations() / 100);
  CHECK(machine.stepped() > operations() / 10);
  CHECK(machine.found() > operations() / 1'000);
  CHECK(machine.returned() > operations() / 200);
  CHECK(machine.finish() == operations());
}

TEST_CASE("random operations on the simulation") { run<OnSimulation>(2, {}, operations() / 20); }

TEST_CASE("random operations beside a mapper that looks ahead") {
  run<OnHost>(3, {.prefetch = 16 * kPage, .spare = 4 * kPage}, operations() / 20);
  run<OnSimulation>(4, {.prefetch = 16 * kPage}, operations() / 100);
}

TEST_CASE_TEMPLATE("random operations with driver calls refused now and then", T, OnHost,
                   OnSimulation) {
  std::size_t done = 0;
  for (unsigned seed = 0; done < operations() / 100; ++seed) {
    CAPTURE(seed);
    Machine<T> machine(seed, {}, true);
    machine.run(operations() / 100 - done);
    done += machine.finish() + 1;
  }
}

// Two caches with threads of their own and a thread with tensors, in a pool that has too little for
// all, beside the mapper.
TEST_CASE("caches and tensors that compete for the last pages") {
  for (const std::size_t ahead : {std::size_t{0}, 16 * kPage}) {
    Bench<OnHost> one({4, 32, 1, 4, {{2, 1000, 0}}}, kPages, {.prefetch = ahead});
    std::atomic<bool> done{false};
    std::atomic<std::size_t> stepped{0}, short_of_memory{0};
    const auto serve = [&](unsigned seed) {
      Machine<OnHost> machine(seed, one.pool);
      machine.run(operations() / 60);
      machine.finish();
      stepped += machine.stepped();
      short_of_memory += machine.short_of_memory();
    };
    std::thread first([&] { serve(1); }), second([&] { serve(2); });
    std::thread tensors([&] {
      std::mt19937 random(3);
      while (!done) {
        const auto buffer = Buffer::create(one.pool, {1, kPage, 64}, kCaller);
        try {
          for (std::size_t n = 1; n < 40 && !done; n += 1 + random() % 4)
            buffer->grow(kCaller, {0, n}, false);
        } catch (const OutOfPages&) {
          ++short_of_memory;
        }
        buffer->abandon();
        hammered::check_counts(*one.pool);
      }
    });
    first.join();
    second.join();
    done = true;
    tensors.join();
    CHECK(stepped > operations() / 400);
    CHECK(short_of_memory > 0);
    one.finish();
  }
}

}  // namespace vtensor::slots
