// What every driver promises in driver/driver.h, for the host, for the CUDA driver over the
// simulated libcuda, and for real CUDA where there is a GPU.
#include <doctest/doctest.h>

#include <limits>

#include "base/align.h"
#include "base/errors.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

TYPE_TO_STRING(Host);
TYPE_TO_STRING(SimulatedCuda);
TYPE_TO_STRING(RealCuda);

DRIVER_TEST("traits say what the driver does") {
  Bench<T> bench;
  const DriverTraits& traits = bench.driver->traits();
  CHECK(traits.page_size % traits.granularity == 0);
  CHECK(bench.driver->free_memory() > traits.page_size);
  CHECK(traits.adjacent_handles == !T::is_cuda);
  CHECK(traits.kernel_copies_on_write == !T::is_cuda);
  CHECK(traits.name == (T::is_cuda ? "cuda" : "host"));
}

DRIVER_TEST("reserved ranges are aligned, apart and reusable") {
  Bench<T> bench;
  const Address a = bench.driver->reserve(3, {}), b = bench.driver->reserve(1000);
  CHECK(a % bench.page_size == 0);
  CHECK(b % bench.page_size == 0);
  CHECK((a + 3 * bench.page_size <= b || b + 1000 * bench.page_size <= a));
  CHECK_THROWS_AS(bench.driver->reserve(std::numeric_limits<std::size_t>::max()), Error);
  CHECK_THROWS_AS(bench.driver->reserve(std::numeric_limits<std::size_t>::max() / bench.page_size),
                  Error);
  bench.driver->free_range(a, 3);
  bench.driver->free_range(b, 1000);
}

DRIVER_TEST("bytes written through a mapping are its handles' bytes") {
  Bench<T> bench;
  auto handles = bench.make_handles(3, 1);
  std::swap(handles[0], handles[2]);  // any order
  const Address range = bench.driver->reserve(4);
  const Address at = range + bench.page_size;
  bench.map(at, handles, Access::writable);
  CHECK(bench.holds(at, 0, 3));
  CHECK(bench.holds(at, 1, 2));
  CHECK(bench.holds(at, 2, 1));
  bench.fill(at, 1, 9);
  bench.unmap(at, handles.size());
  CHECK(bench.is_marked(handles[1], 9));
  // I2: the memory stays with the handle, and the range takes new mappings.
  bench.map(range, handles, Access::writable);
  CHECK(bench.holds(range, 0, 3));
  CHECK(bench.holds(range, 1, 9));
  bench.unmap(range, handles.size());
  bench.driver->free_range(range, 4);
}

DRIVER_TEST("part of what was mapped in one call is unmapped alone") {
  Bench<T> bench;
  const auto handles = bench.make_handles(4, 1);
  const Address range = bench.mapped(handles, Access::writable);
  const std::span<const Handle> middle = std::span(handles).subspan(1, 2);
  bench.unmap(range + bench.page_size, middle.size());
  CHECK(bench.holds(range, 0, 1));
  CHECK(bench.holds(range, 3, 4));
  bench.map(range + bench.page_size, middle, Access::copy_on_write);
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(bench.holds(range, i, static_cast<std::uint8_t>(i + 1)));
  // One unmap over mappings that were made apart.
  bench.unmap(range + bench.page_size, middle.size());
  bench.map(range + bench.page_size, middle, Access::writable);
}

DRIVER_TEST("a store to a copy_on_write page never reaches the handle") {  // I6
  Bench<T> bench;
  const auto handles = bench.make_handles(2, 1);
  const Address a = bench.mapped(handles, Access::copy_on_write);
  const Address b = bench.mapped(handles, Access::copy_on_write);
  std::vector<std::uint8_t> private_copies(2, 0xFF);
  if (bench.driver->traits().kernel_copies_on_write) {
    bench.fill(a, 1, 9);
    CHECK(bench.holds(a, 1, 9));
    bench.driver->find_private_copies(a, private_copies);
    CHECK(private_copies == std::vector<std::uint8_t>{0, 1});
    bench.driver->find_private_copies(b, private_copies);
    CHECK(private_copies == std::vector<std::uint8_t>{0, 0});
  } else {
    CHECK_FALSE(T::stores(a));
    CHECK_FALSE(T::stores(b + bench.page_size));
  }
  CHECK(bench.holds(a, 0, 1));
  CHECK(bench.holds(b, 0, 1));
  CHECK(bench.holds(b, 1, 2));
  CHECK(bench.is_marked(handles[0], 1));
  CHECK(bench.is_marked(handles[1], 2));
}

DRIVER_TEST("remap changes access, handles, or both") {
  Bench<T> bench;
  const auto from = bench.make_handles(3, 1), to = bench.make_handles(3, 11);
  const Address range = bench.mapped(from, Access::writable);
  CHECK(T::stores(range));

  bench.driver->remap(range, from, Access::writable, from, Access::copy_on_write);
  CHECK(bench.holds(range, 2, 3));
  if (!bench.driver->traits().kernel_copies_on_write)
    CHECK_FALSE(T::stores(range + 2 * bench.page_size));

  bench.driver->remap(range, from, Access::copy_on_write, to, Access::copy_on_write);
  CHECK(bench.holds(range, 0, 11));
  CHECK(bench.holds(range, 2, 13));

  bench.driver->remap(range, to, Access::copy_on_write, to, Access::writable);
  bench.fill(range, 1, 77);
  CHECK(bench.is_marked(to[1], 77));

  const std::vector<Handle> mixed = {to[2], from[1], to[0]};
  bench.driver->remap(range, to, Access::writable, mixed, Access::writable);
  CHECK(bench.holds(range, 0, 13));
  CHECK(bench.holds(range, 1, 2));
  CHECK(bench.holds(range, 2, 11));
  for (std::size_t i = 0; i < 3; ++i)
    CHECK(bench.is_marked(from[i], static_cast<std::uint8_t>(i + 1)));
}

DRIVER_TEST("zero clears what it is given") {  // I7
  Bench<T> bench;
  const auto handles = bench.make_handles(3, 1);
  const Address range = bench.mapped(handles, Access::writable);
  zero_now(*bench.driver, range + bench.page_size, bench.page_size);
  CHECK(bench.holds(range, 0, 1));
  CHECK(bench.holds(range, 1, 0));
  CHECK(bench.holds(range, 2, 3));
  zero_now(*bench.driver, range + bench.page_size / 2, bench.page_size + 3);
  CHECK(T::holds(range, bench.page_size / 2, 1));
  CHECK(T::holds(range + bench.page_size / 2, bench.page_size + 3, 0));
  CHECK(bench.holds(range, 2, 3));
}

DRIVER_TEST("copy_pages copies what the mapping shows") {
  Bench<T> bench;
  const auto from = bench.make_handles(2, 1), to = bench.make_handles(2, 11);
  const Address range = bench.mapped(from, Access::copy_on_write);
  copy_page(*bench.driver, to[0], range + bench.page_size);
  CHECK(bench.is_marked(to[0], 2));
  CHECK(bench.holds(range, 1, 2));
  if (bench.driver->traits().kernel_copies_on_write) {
    bench.fill(range, 0, 9);
    copy_page(*bench.driver, to[1], range);
    CHECK(bench.is_marked(to[1], 9));
    CHECK(bench.is_marked(from[0], 1));
  }
  bench.unmap(range, from.size());
  bench.map(range, from, Access::writable);
  bench.fill(range, 0, 33);
  copy_page(*bench.driver, to[1], range);
  CHECK(bench.is_marked(to[1], 33));
}

DRIVER_TEST("handles are fresh, and zero where the driver says so") {
  Bench<T> bench;
  const bool adjacent = bench.driver->traits().adjacent_handles;
  const Handle a = bench.driver->create(1), b = bench.driver->create(1);
  CHECK(a != b);
  if (adjacent) CHECK(bench.is_marked(a, 0));
  bench.mark(a, 5);
  bench.mark(b, 6);
  bench.driver->destroy(a, 1);
  if (adjacent) CHECK(bench.is_marked(a, 0));  // the number stays good
  CHECK(bench.is_marked(b, 6));
  bench.driver->destroy(b, 1);
}

DRIVER_TEST("threads work on ranges of their own") {
  Bench<T> bench;
  const auto handles = bench.make_handles(8, 1);
  in_threads(4, [&](std::size_t t) {
    const std::span<const Handle> mine = std::span(handles).subspan(2 * t, 2);
    for (int i = 0; i < 25; ++i) {
      const Address range = bench.driver->reserve(2);
      bench.map(range, mine, Access::writable);
      copy_page(*bench.driver, mine[1], range);
      bench.driver->remap(range, mine, Access::writable, mine, Access::copy_on_write);
      bench.unmap(range, mine.size());
      bench.driver->free_range(range, 2);
    }
  });
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(bench.is_marked(handles[i], static_cast<std::uint8_t>(i / 2 * 2 + 1)));
  }
}

DRIVER_TEST("addresses that one thread frees are another's at once") {  // I14
  T::prepare();
  const std::string before = T::leaks();
  for (int round = 0; round < 200; ++round) {
    const std::unique_ptr<Driver> driver = T::open();
    in_threads(4, [&driver](std::size_t t) {
      for (std::size_t i = 0; i < 20 * (t + 1); ++i) driver->free_range(driver->reserve(2), 2);
      driver->reserve(2);
    });
  }
  CHECK(T::leaks() == before);  // each driver's end knew every range
}

DRIVER_TEST("a forked child is refused, and makes no driver call") {  // I13
  Bench<T> bench;
  const auto handles = bench.make_handles(1, 1);
  const Address range = bench.mapped(handles, Access::writable);

  const int failed = in_child([&] {
    const auto refused = [](auto operation) {
      try {
        operation();
      } catch (const Error& error) {
        return std::string(error.what()).find("forked") != std::string::npos ? 0 : 1;
      }
      return 1;
    };
    int failures = 0;
    const std::uint64_t before = bench.calls();
    Driver& driver = *bench.driver;
    failures += refused([&] { driver.reserve(1); });
    failures += refused([&] { driver.create(1); });
    failures += refused([&] { map_run(driver, range, handles, Access::writable); });
    failures += refused(
        [&] { driver.remap(range, handles, Access::writable, handles, Access::copy_on_write); });
    failures += refused([&] { driver.zero(range, 1, 0); });
    failures += refused([&] { copy_page(driver, handles[0], range); });
    failures += refused([&] { T::open(); });
    if (!T::is_cuda) {
      std::uint8_t copied = 0;
      failures += refused([&] { driver.populate(range, 1); });
      failures += refused([&] { driver.find_private_copies(range, {&copied, 1}); });
    }
    // Giving back is silent: it is the parent's.
    driver.unmap(range, handles.size());
    driver.destroy(handles[0], 1);
    driver.free_range(range, 1);
    failures += bench.calls() != before;
    bench.driver.reset();
    return failures;
  });
  CHECK(failed == 0);
  CHECK(bench.holds(range, 0, 1));
  CHECK(bench.is_marked(handles[0], 1));
}
