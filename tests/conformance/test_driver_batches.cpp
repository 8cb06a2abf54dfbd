// map of many runs at once: in several ranges, side by side, one after the other.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/errors.h"
#include "conformance/refusals.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

namespace {

// Five pages in two ranges: two runs that touch, one run of two apart from them, one elsewhere; and
// two neighbours of that run, which must never change.
template <class T>
struct Batch : Bench<T> {
  static constexpr std::size_t kPages = 5;
  std::vector<Handle> handles = this->make_handles(kPages, 1);
  std::vector<Handle> neighbours = this->make_handles(2, 100);
  Address first = this->driver->reserve(6, {}), second = this->driver->reserve(3);
  std::vector<Address> places = {this->page(first, 0), this->page(first, 1), this->page(first, 3),
                                 this->page(first, 4), this->page(second, 1)};
  std::size_t mapped = 0;

  Batch() {
    this->map(page(first, 2), {&neighbours[0], 1}, Access::writable);
    this->map(page(first, 5), {&neighbours[1], 1}, Access::writable);
  }

  Address page(Address range, std::size_t i) const { return range + i * this->page_size; }

  std::vector<PageRun> runs() const {
    const std::span<const Handle> all(handles);
    return {{places[0], all.subspan(0, 1)},
            {places[1], all.subspan(1, 1)},
            {places[2], {}},
            {places[2], all.subspan(2, 2)},
            {places[4], all.subspan(4, 1)}};
  }
  void map_all(Access access) { this->driver->map(runs(), access, mapped = 0); }
  void unmap_all() {
    for (std::size_t i = 0; i < mapped; ++i) this->unmap(places[i], 1);
  }

  // What was counted is mapped.
  void check_mapped(Access access) {
    for (std::size_t i = 0; i < mapped; ++i) {
      CAPTURE(i);
      CHECK(this->holds(places[i], 0, static_cast<std::uint8_t>(1 + i)));
      if (access == Access::writable) CHECK(T::stores(places[i]));
      if (access == Access::copy_on_write && T::is_cuda) CHECK_FALSE(T::stores(places[i]));
    }
    check_neighbours();
  }
  void check_unmapped() {
    for (std::size_t i = 0; i < kPages; ++i) {
      CAPTURE(i);
      this->map(places[i], {&handles[i], 1}, Access::writable);
      CHECK(this->holds(places[i], 0, static_cast<std::uint8_t>(1 + i)));
      this->unmap(places[i], 1);
    }
    check_neighbours();
  }
  void check_neighbours() {
    CHECK(this->holds(first, 2, 100));
    CHECK(this->holds(first, 5, 101));
  }
};

}  // namespace

DRIVER_TEST("a batch maps runs in several ranges") {
  Batch<T> batch;
  for (const Access access : {Access::writable, Access::copy_on_write}) {
    batch.map_all(access);
    CHECK(batch.mapped == Batch<T>::kPages);
    batch.check_mapped(access);
    batch.unmap_all();
    batch.check_unmapped();
  }
  // Unmapped and divided otherwise, and in another order.
  batch.map_all(Access::writable);
  batch.unmap(batch.places[4], 1);
  batch.unmap(batch.places[3], 1);
  batch.unmap(batch.places[0], 2);
  batch.unmap(batch.places[2], 1);
  batch.check_unmapped();
  const std::span<const Handle> handles(batch.handles);
  const std::vector<PageRun> runs = {{batch.places[4], handles.subspan(4, 1)},
                                     {batch.places[3], handles.subspan(3, 1)},
                                     {batch.places[0], handles.subspan(0, 2)},
                                     {batch.places[2], handles.subspan(2, 1)}};
  batch.driver->map(runs, Access::writable, batch.mapped = 0);
  batch.check_mapped(Access::writable);
  batch.unmap_all();
  batch.driver->map({}, Access::writable, batch.mapped = 0);
  CHECK(batch.mapped == 0);
  batch.unmap(batch.page(batch.first, 2), 1);
  batch.unmap(batch.page(batch.first, 5), 1);
  batch.driver->free_range(batch.first, 6);
  batch.driver->free_range(batch.second, 3);
}

DRIVER_TEST("a batch counts the pages that it has mapped, in the order of its runs") {
  for (const Access access : {Access::writable, Access::copy_on_write}) {
    refuse_each_call<T, Batch<T>>([](Batch<T>&) {}, [&](Batch<T>& b) { b.map_all(access); },
                                  [&](Batch<T>& b, Outcome outcome) {
                                    REQUIRE(outcome != Outcome::broken);
                                    const bool done = outcome == Outcome::done;
                                    if (done) CHECK(b.mapped == Batch<T>::kPages);
                                    // Pages of a device are perhaps mapped without access.
                                    if (done || !T::is_cuda) b.check_mapped(access);
                                    b.unmap_all();
                                    b.check_unmapped();
                                  });
  }
}

TEST_CASE("runs that touch share a set-access, ranges that touch do not") {
  Batch<SimulatedCuda> batch;
  const auto count = [&](Call call, auto operation) {
    const std::uint64_t before = batch.calls(call);
    operation();
    return batch.calls(call) - before;
  };
  CHECK(count(Call::cuMemSetAccess, [&] { batch.map_all(Access::writable); }) == 3);
  batch.unmap_all();

  // The simulation puts ranges next to each other where it can.
  std::vector<Address> ranges;
  for (int i = 0; i < 8; ++i) ranges.push_back(batch.driver->reserve(1));
  std::ranges::sort(ranges);
  const auto next = std::ranges::adjacent_find(
      ranges, [&](Address a, Address b) { return a + batch.page_size == b; });
  REQUIRE(next != ranges.end());
  const std::span<const Handle> handles(batch.handles);
  const std::vector<PageRun> runs = {{*next, handles.subspan(0, 1)},
                                     {*(next + 1), handles.subspan(1, 1)}};
  const auto map = [&] { batch.driver->map(runs, Access::writable, batch.mapped); };
  CHECK(count(Call::cuMemSetAccess, map) == 2);
}
