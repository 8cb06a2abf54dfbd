// Random operations on a slot cache that is short of memory, against the plain model, with driver
// calls refused now and then. VTENSOR_OPERATIONS says how many; scripts/soak_slots.sh runs
// millions.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <random>

#include "cpp/slot_cache_bench.h"

namespace vtensor::slots {
namespace {

constexpr std::size_t kSlots = 6, kLength = 24, kPages = 80;
constexpr std::size_t kUnit = 5;  // positions that hold a whole page of every kind

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
      : bench_({kSlots,
                kLength,
                1,
                options.ahead ? std::size_t{2} : 0,
                {{2, 1000, 0}, {1, 6144, 0}, {1, 2048, 9}}},
               kPages, options),
        random_(seed),
        refuse_(refuse) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      if (refuse_ && pick(50) == 0)
        bench_.pool->driver().meter().fail_after(pick(12), 1 + pick(2) * 100);
      try {
        operate();
      } catch (const OutOfPages&) {
        ++refused_;
      } catch (const NoFreeSlot&) {
        ++refused_;
      } catch (const DriverError&) {
        ++refused_;
      } catch (const InvalidArgument&) {
        ++refused_;  // what windows do not allow
      } catch (const Error&) {
        lost_ = true;  // what says that pages were
      }
      bench_.pool->driver().meter().disarm();
      if (refuse_) {
        lost_ |= bench_.pool->counts().quarantined != 0;
        REQUIRE((!lost_ || bench_.pool->counts().quarantined != 0));
        CHECK_NOTHROW(bench_.pool->check_invariants());
        if (lost_) break;  // from here on pages may be missing: the next machine goes on
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
    kept_.clear();
    // Handles are used again, and not made anew for ever: the most is a thousand.
    if (!T::is_cuda) CHECK(bench_.pool->driver().create(1) < 4'000);
    if (settled_ != 0) CHECK(resident() < settled_ + (std::size_t{16} << 20));
    bench_.finish(lost_);
    return done_;
  }
  std::size_t refused() const { return refused_; }
  std::size_t stepped() const { return stepped_; }

 private:
  struct Kept {
    std::vector<std::uint32_t> cells;
    std::vector<Prefix> units;
  };
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
    if (!slot) return static_cast<void>(bench_.alloc());
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
      case 9:
        return swap(*slot);
      case 10:
        return reorder();
      case 11:
        if (!kept_.empty()) kept_.pop_front();
        return;
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
    CHECK(bench_.lengths() == before);
    if (!kept_.empty()) {
      kept_.pop_front();
    } else if (const auto slot = any()) {
      bench_.free(*slot);
    }
  }

  void publish(std::size_t slot) {
    const std::size_t units = bench_.model.at(slot).size() / kUnit;
    std::vector<std::size_t> bounds;
    for (std::size_t i = 0; i <= units; ++i) bounds.push_back(i * kUnit);
    auto parts = bench_.cache->offer(kCaller, slot, bounds);
    if (parts.empty()) return;
    const auto& cells = bench_.model.at(slot);
    kept_.push_back({{cells.begin(), cells.begin() + static_cast<std::ptrdiff_t>(units * kUnit)},
                     std::move(parts)});
    if (kept_.size() > 3) kept_.pop_front();
  }

  void alloc_known() {
    if (kept_.empty()) return;
    const Kept& kept = kept_[pick(kept_.size())];
    const std::size_t units = 1 + pick(kept.units.size());
    const std::size_t length = bench_.cache->covered(units * kUnit);
    const std::size_t slot =
        bench_.cache->alloc(kCaller, std::span(kept.units).first(units), length);
    bench_.model[slot] = {kept.cells.begin(),
                          kept.cells.begin() + static_cast<std::ptrdiff_t>(length)};
  }

  // Out and in again, alone or beside a slot that it shares pages with.
  void swap(std::size_t slot) {
    SlotCache& cache = *bench_.cache;
    Prefix shared;
    const auto source = any();
    if (source && *source != slot) shared = shared_prefix(cache, slot, *source);
    const std::vector<std::uint32_t> cells = bench_.model.at(slot);
    struct Copy {
      char* at;
      std::vector<char> bytes;
    };
    std::vector<Copy> copies;
    for (std::size_t kind = 0; kind < cache.shape().kinds.size(); ++kind) {
      const SlotKind& rows = cache.shape().kinds[kind];
      std::size_t begin = cache.begins(slot)[kind] * rows.item_bytes;
      if (!shared.empty()) begin = shared[kind]->slots().end * kPage;
      const std::size_t end = cells.size() * rows.item_bytes;
      for (std::size_t row = 0; begin < end && row < rows.rows; ++row) {
        char* at = bench_.item(slot, kind, row, 0);
        copies.push_back({at + begin, {at + begin, at + end}});
      }
    }
    cache.set_aside(kCaller, slot);
    bench_.model.erase(slot);
    cache.vacate(kCaller, slot);
    for (int tries = 0;; ++tries) {
      try {
        cache.restore(kCaller, slot, shared);
        break;
      } catch (const UndoFailed&) {
        throw;
      } catch (const OutOfPages&) {
        return cache.free(kCaller, slot);
      } catch (const DriverError&) {
        if (tries == 3) return cache.free(kCaller, slot);
      }
    }
    for (const Copy& copy : copies) std::memcpy(copy.at, copy.bytes.data(), copy.bytes.size());
    bench_.model[slot] = cells;
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
        if (bench_.cache->state(beam) == SlotState::free) bench_.model.erase(beam);
      }
      throw;
    }
    for (const std::size_t beam : beams) bench_.model.erase(beam);
    for (std::size_t i = 0; i < beams.size(); ++i) bench_.model[result[i]] = before.at(sources[i]);
  }

  Bench<T> bench_;
  std::mt19937 random_;
  const bool refuse_;
  std::deque<Kept> kept_;
  bool lost_ = false;
  std::size_t done_ = 0, refused_ = 0, stepped_ = 0;
  std::size_t settled_ = 0;  // bytes resident once caches are warm; of long runs
};

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
  CHECK(machine.finish() == operations());
}

TEST_CASE("random operations on the simulation") {
  Machine<OnSimulation> machine(2, {}, false);
  machine.run(operations() / 20);
  CHECK(machine.finish() == operations() / 20);
}

TEST_CASE("random operations beside a mapper that looks ahead") {
  Machine<OnHost> host(3, {.ahead = 16 * kPage, .low = 4 * kPage}, false);
  host.run(operations() / 20);
  CHECK(host.finish() == operations() / 20);
  Machine<OnSimulation> simulation(4, {.ahead = 16 * kPage}, false);
  simulation.run(operations() / 100);
  CHECK(simulation.finish() == operations() / 100);
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

}  // namespace vtensor::slots
