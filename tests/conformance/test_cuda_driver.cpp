// What only the CUDA driver promises, over the simulated libcuda: its calls, its contexts, its
// refusals.
#include <doctest/doctest.h>

#include <string>
#include <thread>

#include "base/errors.h"
#include "conformance/streams.h"
#include "conformance/subject.h"
#include "driver/cuda_calls.h"

using namespace vtensor;
using namespace vtensor::conformance;

namespace {

constexpr std::size_t kPageSize = SimulatedCuda::kPageSize;

// The error that opening a driver raises; its text is checked for `part`.
template <class Raised>
void check_refused(const CudaOptions& asked, const std::string& call, const std::string& part) {
  try {
    make_cuda_driver(asked);
  } catch (const Raised& error) {
    if constexpr (std::is_base_of_v<DriverError, Raised>) CHECK(error.call == call);
    CHECK(std::string(error.what()).find(part) != std::string::npos);
    CHECK(SimulatedCuda::leaks() == "");
    return;
  }
  FAIL("nothing was raised");
}

}  // namespace

TEST_CASE("a run of pages is mapped with one set-access and unmapped with one call") {
  Bench<SimulatedCuda> bench;
  const auto from = bench.make_handles(5, 1), to = bench.make_handles(5, 11);
  const Address range = bench.driver->reserve(5);
  const auto calls = [&](auto operation) {
    const auto count = [&](Call call) { return bench.calls(call); };
    const std::uint64_t before[] = {count(Call::cuMemMap), count(Call::cuMemSetAccess),
                                    count(Call::cuMemUnmap), bench.calls()};
    operation();
    const std::uint64_t maps = count(Call::cuMemMap) - before[0];
    const std::uint64_t sets = count(Call::cuMemSetAccess) - before[1];
    const std::uint64_t unmaps = count(Call::cuMemUnmap) - before[2];
    const std::uint64_t all = bench.calls() - before[3];
    // And the thread's capture mode, there and back.
    CHECK(all == (maps + sets + unmaps == 0 ? 0 : maps + sets + unmaps + 2));
    return std::vector<std::uint64_t>{maps, sets, unmaps};
  };
  using Calls = std::vector<std::uint64_t>;
  Driver& driver = *bench.driver;
  CHECK(calls([&] { map_run(driver, range, from, Access::writable); }) == Calls{5, 1, 0});
  CHECK(calls([&] { driver.remap(range, from, Access::writable, from, Access::copy_on_write); }) ==
        Calls{0, 1, 0});
  CHECK(calls([&] {
          driver.remap(range, from, Access::copy_on_write, to, Access::copy_on_write);
        }) == Calls{5, 1, 1});
  CHECK(calls([&] { driver.remap(range, to, Access::copy_on_write, to, Access::copy_on_write); }) ==
        Calls{0, 0, 0});
  CHECK(calls([&] { driver.unmap(range, to.size()); }) == Calls{0, 0, 1});
  driver.free_range(range, 5);
}

TEST_CASE("what the meter counts is what libcuda was called for") {
  Bench<SimulatedCuda> bench;
  bench.make_handles(2, 1);
  for (std::size_t i = 0; i < kCallCount; ++i) {
    const auto call = static_cast<Call>(i);
    const std::string name(name_of(call));
    CAPTURE(name);
    CHECK(bench.calls(call) == SimulatedCuda::control().calls(name.c_str()));
  }
}

TEST_CASE("a device without read-only mappings keeps shared pages writable, and is asked once") {
  SimulatedCuda::prepare();
  SimulatedCuda::control().configure("read_only", 0);
  const auto driver = SimulatedCuda::open();
  const Handle handle = driver->create(1);
  const Address range = driver->reserve(1);
  const auto sets = [] { return SimulatedCuda::control().calls("cuMemSetAccess"); };
  map_run(*driver, range, {&handle, 1}, Access::copy_on_write);
  CHECK(sets() == 2);
  CHECK(SimulatedCuda::stores(range));
  driver->remap(range, {&handle, 1}, Access::copy_on_write, {&handle, 1}, Access::writable);
  driver->remap(range, {&handle, 1}, Access::writable, {&handle, 1}, Access::copy_on_write);
  CHECK(sets() == 4);
  driver->unmap(range, 1);
}

TEST_CASE("a refused set-access of another kind is no sign that read-only is not known") {
  Bench<SimulatedCuda> bench;
  const auto handles = bench.make_handles(1, 1);
  const Address range = bench.driver->reserve(1);
  SimulatedCuda::control().fail("cuMemSetAccess", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS_AS(bench.map(range, handles, Access::copy_on_write), DriverError);
  bench.map(range, handles, Access::copy_on_write);
  CHECK_FALSE(SimulatedCuda::stores(range));
  bench.unmap(range, handles.size());
}

TEST_CASE("the thread keeps the context that it had") {
  Bench<SimulatedCuda> bench;
  const CudaApi api(simcuda_library());
  const auto current = [&] {
    CUcontext context = nullptr;
    CHECK(api.cuCtxGetCurrent.function(&context) == CUDA_SUCCESS);
    return context;
  };
  const auto handles = bench.make_handles(2, 1);
  const Address range = bench.driver->reserve(1);
  bench.map(range, {&handles[0], 1}, Access::writable);
  const auto work = [&] {
    zero_now(*bench.driver, range, 1);
    copy_page(*bench.driver, handles[1], range);
  };
  work();
  CHECK(current() == nullptr);

  SimulatedCuda::control().configure("devices", 2);
  CUcontext other = nullptr;
  REQUIRE(api.cuDevicePrimaryCtxRetain.function(&other, 1) == CUDA_SUCCESS);
  REQUIRE(api.cuCtxSetCurrent.function(other) == CUDA_SUCCESS);
  work();
  CHECK(current() == other);
  SimulatedCuda::control().fail("cuMemsetD8Async", 0, 1, CUDA_ERROR_UNKNOWN);
  CHECK_THROWS_AS(zero_now(*bench.driver, range, 1), DriverError);
  CHECK(current() == other);
  api.cuCtxSetCurrent.function(nullptr);
  api.cuDevicePrimaryCtxRelease.function(1);

  // Already there: not set again.
  CUcontext own = nullptr;
  REQUIRE(api.cuDevicePrimaryCtxRetain.function(&own, 0) == CUDA_SUCCESS);
  REQUIRE(api.cuCtxSetCurrent.function(own) == CUDA_SUCCESS);
  const std::uint64_t sets = bench.calls(Call::cuCtxSetCurrent);
  work();
  CHECK(bench.calls(Call::cuCtxSetCurrent) == sets);
  CHECK(current() == own);
  api.cuCtxSetCurrent.function(nullptr);
  api.cuDevicePrimaryCtxRelease.function(0);
}

TEST_CASE("the page size is a multiple of the granularity, 2 MiB or more by default") {
  SimulatedCuda::prepare();
  CudaOptions asked = simulated(kPageSize);
  asked.page_size = 3 * kPageSize;  // no power of two
  {
    const auto driver = make_cuda_driver(asked);
    const Handle handle = driver->create(1);
    const Address range = driver->reserve(2);
    map_run(*driver, range, {&handle, 1}, Access::writable);
    zero_now(*driver, range, 3 * kPageSize);
    CHECK(HostPages::holds(range, 3 * kPageSize, 0));
    driver->unmap(range, 1);
  }
  asked.page_size = kPageSize / 2;
  check_refused<InvalidArgument>(asked, "", "a page size of 32768 bytes");
  asked.page_size = 0;
  CHECK(make_cuda_driver(asked)->traits().page_size == 2 << 20);
  SimulatedCuda::control().configure("granularity", 3 << 20);
  CHECK(make_cuda_driver(asked)->traits().page_size == 3 << 20);
}

TEST_CASE("what cannot be opened says why") {
  SimulatedCuda::prepare();
  CudaOptions asked = simulated(kPageSize);
  asked.library = "libno_such_cuda.so";
  check_refused<DriverError>(asked, "dlopen", "install the NVIDIA driver");
  asked.library = "libm.so.6";
  check_refused<DriverError>(asked, "dlsym", "cuInit");
  asked = simulated(kPageSize);
  asked.device = 1;
  check_refused<InvalidArgument>(asked, "", "cuda:1");
  asked.device = -1;
  check_refused<InvalidArgument>(asked, "", "cuda:-1");
  SimulatedCuda::control().configure("vmm", 0);
  check_refused<DriverError>(simulated(kPageSize), "cuDeviceGetAttribute",
                             "virtual memory management (some vGPU profiles turn it off): use "
                             "another device, or use the CPU");
  SimulatedCuda::control().reset();
  SimulatedCuda::control().configure("devices", 0);
  check_refused<DriverError>(simulated(kPageSize), "cuInit",
                             "CUDA_ERROR_NO_DEVICE (100): check nvidia-smi and "
                             "CUDA_VISIBLE_DEVICES, or use the CPU");
  SimulatedCuda::control().reset();
  SimulatedCuda::control().fail("cuInit", 0, 1, CUDA_ERROR_STUB_LIBRARY);
  check_refused<DriverError>(simulated(kPageSize), "cuInit", "stubs folder off LD_LIBRARY_PATH");
}

TEST_CASE("opening that is refused at any call leaves nothing") {  // I8, I14
  for (std::uint64_t skip = 0;; ++skip) {
    REQUIRE(skip < 50);
    CAPTURE(skip);
    SimulatedCuda::prepare();
    SimulatedCuda::control().fail("*", skip, 1, CUDA_ERROR_UNKNOWN);
    std::unique_ptr<Driver> driver;
    try {
      driver = SimulatedCuda::open();
    } catch (const DriverError& error) {
      CHECK(error.name == "CUDA_ERROR_UNKNOWN");
    }
    if (driver && SimulatedCuda::control().calls("*") <= skip) break;
    CHECK((driver == nullptr || SimulatedCuda::control().calls("*") > skip));
    driver.reset();
    CHECK(SimulatedCuda::leaks() == "");
  }
}

TEST_CASE("the driver's end frees a range, or a page, that was refused to go") {  // I14
  for (const char* const call : {"cuMemAddressFree", "cuMemRelease"}) {
    CAPTURE(call);
    {
      Bench<SimulatedCuda> bench;
      const Address range = bench.driver->reserve(3);
      const Handle page = bench.driver->create(1);
      SimulatedCuda::control().fail(call, 0, 1, 999);
      const auto give_back = [&] {
        bench.driver->destroy(page, 1);
        bench.driver->free_range(range, 3);
      };
      CHECK_THROWS_AS(give_back(), DriverError);
      CHECK(SimulatedCuda::leaks() != "");
    }
    CHECK(SimulatedCuda::leaks() == "");
  }
}

TEST_CASE("the driver's end serves a thread without a context, beside a capture") {  // I14
  Bench<SimulatedCuda> bench;
  const Caller caller(simcuda_library());
  const CallerStream captured(caller);
  bench.driver->create(1);
  bench.driver->fence(bench.driver->side_stream());
  REQUIRE(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  std::thread([&] { bench.driver.reset(); }).join();
  CHECK(caller.destroy_graph(caller.end(captured.handle)) == CUDA_SUCCESS);
  CHECK(SimulatedCuda::leaks() == "1 context references 1 streams ");  // the caller's
}

TEST_CASE("memory is made for GPUDirect RDMA where that is asked for") {
  for (const bool wanted : {false, true}) {
    SimulatedCuda::prepare();
    CudaOptions asked = simulated(kPageSize);
    asked.rdma = wanted;
    const auto driver = make_cuda_driver(asked);
    SimulatedCuda::control().configure("rdma", 0);  // such memory is refused from now on
    if (wanted) CHECK_THROWS_AS(driver->create(1), DriverError);
    if (!wanted) CHECK_NOTHROW(driver->create(1));
  }
  CudaOptions asked = simulated(kPageSize);
  asked.rdma = true;
  CHECK_THROWS_WITH_AS(make_cuda_driver(asked),
                       "[Pool] rdma=True was asked for, cuda:0 makes no memory for GPUDirect RDMA: "
                       "leave it out",
                       InvalidArgument);
}

TEST_CASE("no call is made that the driver must refuse, up to the driver's end") {
  {
    Bench<SimulatedCuda> bench;
    const auto handles = bench.make_handles(3, 1);
    copy_page(*bench.driver, handles[1], bench.mapped({&handles[0], 1}, Access::writable));
    bench.driver->destroy(handles[1], 1);  // a handle must not be released twice
  }
  CHECK(SimulatedCuda::control().calls("*") > 20);
  CHECK(SimulatedCuda::control().refusals() == 0);
}
