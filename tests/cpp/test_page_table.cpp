// Why pages are mapped, by index, against a plain list.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "base/interval.h"
#include "base/sparse_array.h"
#include "vmm/page_table.h"

namespace vtensor {
namespace {

struct Table : PageTable {
  using PageTable::PageTable;
};

// Where nothing is mapped, an index has one of these reasons.
constexpr std::array kReasons{Why::nothing, Why::needed, Why::prefetched};

std::vector<Interval> runs_in(const std::vector<Why>& model, Why why) {
  std::vector<Interval> runs;
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (model[i] != why) continue;
    if (runs.empty() || runs.back().end != i) runs.push_back({i, i});
    runs.back().end = i + 1;
  }
  return runs;
}

}  // namespace

TEST_CASE("the present elements of a sparse array") {
  SparseArray<int, 64> all;
  CHECK(all.next(0) == SIZE_MAX);
  all.reserve(70, 71);
  all.reserve(300, 301);
  CHECK(all.next(0) == 64);
  CHECK(all.next(70) == 70);
  CHECK(all.next(128) == 256);
  CHECK(all.next(320) == SIZE_MAX);
}

TEST_CASE("reasons against a list of them") {
  constexpr std::size_t kIndices = 300, kRows = 3;
  for (unsigned seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Table table(kRows);
    table.reserve({0, kIndices});
    std::vector<Why> model(kIndices, Why::nothing);
    for (int step = 0; step < 200; ++step) {
      const std::size_t begin = random() % kIndices, n = 1 + random() % 60;
      const Interval indices{begin, std::min(kIndices, begin + n)};
      const Why why = kReasons.at(random() % kReasons.size());
      table.set_why(indices, why);
      for (std::size_t i = indices.begin; i < indices.end; ++i) model[i] = why;
      for (const Why one : {Why::needed, Why::prefetched}) {
        const std::vector<Interval> runs = runs_in(model, one);
        REQUIRE(table.runs_of(one) == runs);
        std::size_t missing = 0;
        for (const Interval run : runs) missing += run.size() * kRows;
        CHECK(table.missing(one) == missing);
        CHECK(table.hull_of(one).empty() == runs.empty());
      }
    }
  }
}

TEST_CASE("what is looked through for a reason shrinks from both ends") {
  Table table(1);
  table.reserve({0, 20});
  table.set_why({1, 19}, Why::needed);
  table.set_why({1, 8}, Why::nothing);
  table.set_why({12, 19}, Why::prefetched);
  CHECK(table.hull_of(Why::needed) == Interval{8, 12});
  CHECK(table.hull_of(Why::prefetched) == Interval{12, 19});
}

}  // namespace vtensor
