// Which slots intervals cover, against counting them slot by slot.
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
