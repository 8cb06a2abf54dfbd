// Calls of the CUDA driver of which the n-th allocation is refused, for every n: each leaves what
// was there, and no memory of the device that nothing knows of (I8, I14).
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "base/descriptor.h"
#include "cpp/refused_allocations.h"
#include "driver/driver.h"
#include "simcuda/client.h"

namespace vtensor {
namespace {

constexpr std::size_t kPage = std::size_t{64} << 10;

struct Bench {
  Bench() {
    old = {driver->create(1), driver->create(1)};
    other = {driver->create(1), driver->create(1)};
    range = driver->reserve(2);
    const PageRun run{range, old};
    std::size_t mapped = 0;
    driver->map({&run, 1}, Access::writable, mapped);
  }
  ~Bench() { driver->unmap(range, 2); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const FreshDevice device{kPage};
  const std::unique_ptr<Driver> driver = make_cuda_driver({.shareable = true,
                                                           .page_size = kPage,
                                                           .library = simcuda_library(),
                                                           .memory_is_host_memory = true});
  std::array<Handle, 2> old{}, other{};
  Address range = 0;
};

void refuse_each_allocation(const std::function<void(Bench&)>& operate) {
  for (long n = 0, done = 0; done == 0; ++n) {
    REQUIRE(n < 50);
    CAPTURE(n);
    {
      Bench bench;
      allowed = n;
      try {
        operate(bench);
      } catch (const std::bad_alloc&) {
      }
      done = allowed >= 0;
      allowed = -1;
    }
    const SimcudaLeaks left = SimcudaControl().leaks();
    CHECK(left.handles == 0);
    CHECK(left.mappings == 0);
    CHECK(left.ranges == 0);
  }
}

TEST_CASE("a page that was made is given back") {
  refuse_each_allocation([](Bench& bench) { bench.driver->create(1); });
}

TEST_CASE("a page that was imported is given back") {
  refuse_each_allocation([](Bench& bench) {
    const ExportedPage page = bench.driver->export_page(bench.old[0]);
    const Descriptor descriptor(page.descriptor);
    bench.driver->import_page(page, bench.driver->traits().exports);
  });
}

TEST_CASE("addresses that were reserved are given back") {
  refuse_each_allocation([](Bench& bench) { bench.driver->reserve(3); });
}

TEST_CASE("addresses with a page of zeros behind some are given back at once") {
  refuse_each_allocation([](Bench& bench) {
    const Backed backed{.first = 1, .every = 3};
    const long n = std::exchange(allowed, -1);
    bench.driver->free_range(bench.driver->reserve(3, backed), 3);  // the first one makes that page
    const std::size_t before = bench.device.leaks().ranges;
    allowed = n;
    try {
      bench.driver->reserve(3, backed);
    } catch (const std::bad_alloc&) {
      CHECK(bench.device.leaks().ranges == before);
      throw;
    }
  });
}

TEST_CASE("pages that were to be replaced stay mapped") {
  refuse_each_allocation([](Bench& bench) {
    bench.driver->remap(bench.range, bench.old, Access::writable, bench.other, Access::writable);
  });
}

TEST_CASE("copies that were launched keep their pages until they are done") {
  refuse_each_allocation([](Bench& bench) {
    bench.device.configure("eager", 0);
    const std::array<PageCopy, 2> copies{PageCopy{bench.other[0], bench.range},
                                         PageCopy{bench.other[1], bench.range + kPage}};
    try {
      bench.driver->copy_pages(copies, {});
    } catch (const std::bad_alloc&) {
      const long none_left = std::exchange(allowed, -1);
      bench.driver->copy_pages(copies, {});
      allowed = none_left;
    }
    CHECK(bench.device.illegal_accesses() == 0);
  });
}

}  // namespace
}  // namespace vtensor
