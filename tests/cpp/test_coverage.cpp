// Which slots intervals cover, against counting them slot by slot.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <vector>

#include "policy/coverage.h"

namespace vtensor {
namespace {

std::vector<Interval> gaps(const Coverage& coverage, Interval slots) {
  std::vector<Interval> found;
  coverage.gaps(slots, [&found](Interval gap) { found.push_back(gap); });
  return found;
}

}  // namespace

TEST_CASE("nothing is covered at first, and what is empty covers nothing") {
  Coverage coverage;
  CHECK(gaps(coverage, {}).empty());
  CHECK(gaps(coverage, {3, 9}) == std::vector<Interval>{{3, 9}});
  coverage.add({});
  coverage.add({5, 5});
  coverage.remove({5, 5});
  CHECK(gaps(coverage, {3, 9}) == std::vector<Interval>{{3, 9}});
}

TEST_CASE("gaps are what lies between intervals, and behind the last") {
  Coverage coverage;
  coverage.add({2, 4});
  coverage.add({6, 7});
  coverage.add({3, 4});
  CHECK(gaps(coverage, {0, 100}) == std::vector<Interval>{{0, 2}, {4, 6}, {7, 100}});
  CHECK(gaps(coverage, {3, 6}) == std::vector<Interval>{{4, 6}});
  coverage.remove({2, 4});
  CHECK(gaps(coverage, {0, 6}) == std::vector<Interval>{{0, 3}, {4, 6}});
  coverage.add({0, 1000});  // in a tree that has to grow for it
  CHECK(gaps(coverage, {0, 1001}) == std::vector<Interval>{{1000, 1001}});
  coverage.remove({0, 1000});
  CHECK(gaps(coverage, {0, 8}) == std::vector<Interval>{{0, 3}, {4, 6}, {7, 8}});
}

TEST_CASE("intervals that come and go") {
  std::mt19937 random(7);
  const auto upto = [&random](std::size_t n) { return random() % (n + 1); };
  for (int round = 0; round < 40; ++round) {
    constexpr std::size_t kSlots = 70;
    Coverage coverage;
    std::vector<Interval> live;
    for (int step = 0; step < 120; ++step) {
      if (!live.empty() && upto(2) == 0) {
        std::swap(live[upto(live.size() - 1)], live.back());
        coverage.remove(live.back());
        live.pop_back();
      } else {
        const std::size_t begin = upto(kSlots);
        live.push_back({begin, begin + upto(kSlots - begin)});
        coverage.add(live.back());
      }
      const std::size_t from = upto(kSlots);
      const Interval asked{from, from + upto(2 * kSlots)};
      std::vector<Interval> wanted;
      for (std::size_t slot = asked.begin; slot < asked.end; ++slot) {
        bool covered = false;
        for (const Interval interval : live) covered |= interval.contains(slot);
        if (covered) continue;
        if (wanted.empty() || wanted.back().end != slot) wanted.push_back({slot, slot});
        ++wanted.back().end;
      }
      CHECK(gaps(coverage, asked) == wanted);
    }
  }
}

}  // namespace vtensor
