// The simulated libcuda keeps the rules that the CUDA driver relies on: a test double that forgives
// would hide its mistakes.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "driver/cuda_calls.h"
#include "qemu.h"
#include "simcuda/client.h"

using namespace vtensor::cuda;

namespace {

constexpr std::size_t kPage = std::size_t{64} << 10;

struct Simulation {
  SimcudaControl control;
  vtensor::CudaApi api{simcuda_library()};
  CUmemAllocationProp properties{};
  CUcontext context = nullptr;

  explicit Simulation(bool init = true) {
    control.reset();
    control.configure("granularity", kPage);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (!init) return;
    CHECK(api.cuInit.function(0) == CUDA_SUCCESS);
    CHECK(api.cuDevicePrimaryCtxRetain.function(&context, 0) == CUDA_SUCCESS);
    CHECK(api.cuCtxSetCurrent.function(context) == CUDA_SUCCESS);
  }
  ~Simulation() { control.reset(); }

  CUdeviceptr reserve(std::size_t pages) {
    CUdeviceptr range = 0;
    CHECK(api.cuMemAddressReserve.function(&range, pages * kPage, 0, 0, 0) == CUDA_SUCCESS);
    return range;
  }
  CUmemGenericAllocationHandle create(std::size_t pages = 1) {
    CUmemGenericAllocationHandle handle = 0;
    CHECK(api.cuMemCreate.function(&handle, pages * kPage, &properties, 0) == CUDA_SUCCESS);
    return handle;
  }
  CUresult map(CUdeviceptr at, CUmemGenericAllocationHandle handle, std::size_t pages = 1) {
    return api.cuMemMap.function(at, pages * kPage, 0, handle, 0);
  }
  CUresult set_access(CUdeviceptr at, std::size_t pages, CUmemAccess_flags flags) {
    CUmemAccessDesc wanted{};
    wanted.location = properties.location;
    wanted.flags = flags;
    return api.cuMemSetAccess.function(at, pages * kPage, &wanted, 1);
  }
  CUdeviceptr mapped(std::size_t pages) {
    const CUdeviceptr range = reserve(pages);
    for (std::size_t i = 0; i < pages; ++i) CHECK(map(range + i * kPage, create()) == CUDA_SUCCESS);
    CHECK(set_access(range, pages, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
    return range;
  }
};

unsigned char byte(CUdeviceptr at) { return *reinterpret_cast<volatile unsigned char*>(at); }

// How a child process ended that ran `work`; no other way to see a fault.
template <class Work>
int signal_of(Work work) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    // doctest and the sanitizers would report the fault; here it is what is asked for.
    for (const int number : {SIGSEGV, SIGBUS, SIGABRT}) std::signal(number, SIG_DFL);
    std::freopen("/dev/null", "w", stderr);
    work();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_CASE("nothing works before cuInit") {
  Simulation sim(false);
  int count = 0;
  CUdeviceptr range = 0;
  CHECK(sim.api.cuDeviceGetCount.function(&count) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(sim.api.cuMemAddressReserve.function(&range, kPage, 0, 0, 0) == CUDA_ERROR_NOT_INITIALIZED);
}

TEST_CASE("memory is accessible only as far as cuMemSetAccess says") {
  Simulation sim;
  const CUdeviceptr range = sim.reserve(2);
  CHECK(sim.map(range, sim.create()) == CUDA_SUCCESS);
  const auto load = [&] { byte(range); };
  const auto store = [&] { *reinterpret_cast<volatile unsigned char*>(range) = 1; };
  CHECK(signal_of(load) != 0);  // mapped, and not accessible
  CHECK(sim.set_access(range, 2, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.set_access(range, 1, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_SUCCESS);
  CHECK(signal_of(load) == 0);
  CHECK(signal_of(store) != 0);
  CHECK(sim.api.cuMemsetD8Async.function(range, 0, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.set_access(range, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
  CHECK(signal_of(store) == 0);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);
  CHECK(signal_of(load) != 0);
  // A fresh mapping at the same address starts without access.
  CHECK(sim.map(range, sim.create()) == CUDA_SUCCESS);
  CHECK(signal_of(load) != 0);
}

TEST_CASE("memory goes when the handle is released and no mapping is left") {
  Simulation sim;
  const std::uint64_t all = sim.control.free_memory(0);
  const CUdeviceptr range = sim.reserve(2);
  const auto handle = sim.create();
  CHECK(sim.map(range, handle) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemRelease.function(handle) == CUDA_SUCCESS);
  CHECK(sim.control.free_memory(0) == all - kPage);
  CHECK(sim.map(range + kPage, handle) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);
  CHECK(sim.control.free_memory(0) == all);
}

TEST_CASE("fresh memory is not zero, and runs out") {
  Simulation sim;
  sim.control.configure("memory", 3 * kPage);
  const CUdeviceptr range = sim.mapped(3);
  CHECK(byte(range) != 0);
  CUmemGenericAllocationHandle handle = 0;
  CHECK(sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0) ==
        CUDA_ERROR_OUT_OF_MEMORY);
  std::size_t free = 1, total = 0;
  CHECK(sim.api.cuMemGetInfo.function(&free, &total) == CUDA_SUCCESS);
  CHECK(free == 0);
  CHECK(total == 3 * kPage);
}

TEST_CASE("memory work, streams and events need a context, virtual memory management none") {
  Simulation sim;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CHECK(sim.api.cuStreamCreate.function(&stream, 0) == CUDA_SUCCESS);
  CHECK(sim.api.cuEventCreate.function(&event, 0) == CUDA_SUCCESS);
  sim.api.cuCtxSetCurrent.function(nullptr);
  const CUdeviceptr range = sim.mapped(1);
  std::size_t free = 0, total = 0;
  CHECK(sim.api.cuMemsetD8Async.function(range, 0, kPage, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuMemcpyDtoDAsync.function(range, range, 1, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuMemGetInfo.function(&free, &total) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuEventQuery.function(event) == CUDA_SUCCESS);
  CHECK(sim.api.cuEventDestroy.function(event) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuStreamDestroy.function(stream) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(sim.api.cuCtxSetCurrent.function(sim.context) == CUDA_SUCCESS);
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_SUCCESS);
  CHECK(sim.api.cuEventDestroy.function(event) == CUDA_SUCCESS);
  CHECK(sim.api.cuStreamDestroy.function(stream) == CUDA_SUCCESS);
  CHECK(sim.api.cuDevicePrimaryCtxRelease.function(0) == CUDA_SUCCESS);
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(sim.api.cuDevicePrimaryCtxRelease.function(0) == CUDA_ERROR_INVALID_CONTEXT);
}

TEST_CASE("memory work appears when it is waited for, and must still be mapped then") {
  Simulation sim;
  sim.control.configure("eager", 0);
  const CUdeviceptr range = sim.mapped(2);
  CHECK(sim.api.cuMemsetD8Async.function(range, 3, kPage, nullptr) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemcpyDtoDAsync.function(range + kPage, range, kPage, nullptr) == CUDA_SUCCESS);
  CHECK(byte(range) != 3);
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_SUCCESS);
  CHECK(byte(range) == 3);
  CHECK(byte(range + 2 * kPage - 1) == 3);

  CHECK(sim.api.cuMemsetD8Async.function(range, 4, kPage, nullptr) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);  // too early
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuMemUnmap.function(range + kPage, kPage) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_CASE("after an illegal access calls without a context go on, and others as they are set to") {
  Simulation sim;
  sim.control.configure("eager", 0);
  const CUdeviceptr range = sim.mapped(2);
  const CUdeviceptr empty = sim.reserve(1);
  CUevent event = nullptr;
  CHECK(sim.api.cuEventCreate.function(&event, 0) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemsetD8Async.function(range, 4, kPage, nullptr) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);  // too early
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_ERROR_ILLEGAL_ADDRESS);
  int count = 0;
  CUcontext current = nullptr;
  CUmemGenericAllocationHandle handle = 0;
  const auto answers = [&](CUresult of_memory) {
    CHECK(sim.api.cuInit.function(0) == CUDA_SUCCESS);
    CHECK(sim.api.cuDeviceGetCount.function(&count) == CUDA_SUCCESS);
    CHECK(sim.api.cuCtxGetCurrent.function(&current) == CUDA_SUCCESS);
    CHECK(sim.api.cuCtxSetCurrent.function(current) == CUDA_SUCCESS);
    CHECK(sim.api.cuEventQuery.function(event) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(sim.api.cuEventRecord.function(event, nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0) == of_memory);
    CHECK(sim.api.cuMemUnmap.function(range + kPage, kPage) == of_memory);
  };
  answers(CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuMemAddressFree.function(empty, kPage) == CUDA_SUCCESS);
  sim.control.configure("sticky_vmm", 0);
  answers(CUDA_SUCCESS);
}

TEST_CASE("an error is that of one context") {
  Simulation sim;
  sim.control.configure("late_faults", 1);
  const CUdeviceptr nothing = sim.reserve(1);
  CHECK(sim.api.cuMemsetD8Async.function(nothing, 4, kPage, nullptr) == CUDA_SUCCESS);
  CHECK(sim.api.cuStreamQuery.function(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
  const auto other = reinterpret_cast<CUcontext>(sim.control.make_context(0));
  CHECK(sim.api.cuCtxSetCurrent.function(other) == CUDA_SUCCESS);
  CHECK(sim.api.cuStreamQuery.function(nullptr) == CUDA_SUCCESS);
}

TEST_CASE("memory work over what is not accessible is refused at once, or faults when it runs") {
  Simulation sim;
  const CUdeviceptr range = sim.mapped(1), hidden = sim.reserve(1);
  CHECK(sim.map(hidden, sim.create()) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemsetD8Async.function(hidden, 1, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.api.cuMemcpyDtoDAsync.function(range, hidden, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.control.illegal_accesses() == 0);
  sim.control.configure("late_faults", 1);
  CHECK(sim.api.cuMemcpyDtoDAsync.function(range, hidden, 1, nullptr) == CUDA_SUCCESS);
  CHECK(sim.control.illegal_accesses() == 1);
  CHECK(sim.api.cuCtxSynchronize.function() == CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_CASE("others take memory of the device, and give it back") {
  Simulation sim;
  sim.control.configure("memory", 3 * kPage);
  CHECK(sim.control.take_memory(0, 2 * kPage) == CUDA_SUCCESS);
  CHECK(sim.control.free_memory(0) == kPage);
  sim.create();
  CHECK(sim.control.take_memory(0, 1) == CUDA_ERROR_OUT_OF_MEMORY);
  CUmemGenericAllocationHandle handle = 0;
  CHECK(sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0) ==
        CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(sim.control.take_memory(0, -static_cast<std::int64_t>(kPage)) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0) == CUDA_SUCCESS);
  CHECK(sim.control.take_memory(1, 0) == CUDA_ERROR_INVALID_DEVICE);
}

// Run by the next one, in a process of its own.
TEST_CASE("ends the process" * doctest::skip()) {
  Simulation sim;
  const auto handle = sim.create();
  CHECK(sim.api.cuMemRelease.function(handle) == CUDA_SUCCESS);
  sim.api.cuMemRelease.function(handle);
}

TEST_CASE("a handle that is none ends the process that releases it") {
  if (vtensor::under_qemu("cannot start this program again")) return;
  std::string file = std::filesystem::temp_directory_path() / "simcuda-test-XXXXXX";
  close(mkstemp(file.data()));
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const int status = std::system(
      (program + " --no-skip --test-case='ends the process' >'" + file + "' 2>&1").c_str());
  std::ifstream stream(file);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  std::filesystem::remove(file);
  CHECK(status != 0);
  CHECK(text.find("cuMemRelease of handle 1, which is none") != std::string::npos);
}

TEST_CASE("failures, counts, latencies and the log") {
  Simulation sim;
  CHECK(sim.control.fail("cuMemUnheard", 0, 1, 1) == -1);
  CHECK(sim.control.configure("colour", 1) == -1);
  CHECK(sim.control.fail("cuMemAddressFree", 1, 2, CUDA_ERROR_NOT_PERMITTED) == 0);
  sim.control.log(1);
  const auto handle = sim.create();
  const CUdeviceptr none = 0;
  for (const CUresult answer : {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED,
                                CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_INVALID_VALUE}) {
    CHECK(sim.api.cuMemAddressFree.function(none, handle) == answer);
  }
  CHECK(sim.control.calls("cuMemAddressFree") == 4);
  REQUIRE(sim.control.log_lines() == 5);
  CHECK(sim.control.line(0) == "cuMemCreate(size=65536, rdma=0, flags=0) = CUDA_SUCCESS -> 1");
  CHECK(sim.control.line(2) == "cuMemAddressFree(ptr=0x0, size=1) = CUDA_ERROR_NOT_PERMITTED");
  sim.control.log(0);
  sim.create();
  CHECK(sim.control.log_lines() == 5);

  using Clock = std::chrono::steady_clock;
  for (const int busy : {0, 1}) {
    CHECK(sim.control.set_latency("cuMemCreate", 20'000, busy) == 0);
    const Clock::time_point start = Clock::now();
    sim.create();
    CHECK(Clock::now() - start >= std::chrono::milliseconds(20));
  }
}

TEST_CASE("what is not given back is told") {
  Simulation sim;
  sim.mapped(2);
  const SimcudaLeaks leaks = sim.control.leaks();
  CHECK(leaks.handles == 2);
  CHECK(leaks.mappings == 2);
  CHECK(leaks.ranges == 1);
  CHECK(leaks.contexts == 1);
  CHECK(leaks.streams + leaks.events + leaks.objects == 0);
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUuserObject object = nullptr;
  CHECK(sim.api.cuStreamCreate.function(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
  CHECK(sim.api.cuEventCreate.function(&event, 0) == CUDA_SUCCESS);
  CHECK(sim.api.cuUserObjectCreate.function(
            &object, nullptr, [](void*) {}, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) == CUDA_SUCCESS);
  CHECK(sim.control.leaks().streams == 1);
  CHECK(sim.control.leaks().events == 1);
  CHECK(sim.control.leaks().objects == 1);
  CHECK(sim.api.cuStreamDestroy.function(stream) == CUDA_SUCCESS);
  CHECK(sim.api.cuStreamDestroy.function(stream) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(sim.api.cuEventDestroy.function(event) == CUDA_SUCCESS);
  CHECK(sim.api.cuEventQuery.function(event) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(sim.api.cuUserObjectRelease.function(object, 2) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.api.cuUserObjectRelease.function(object, 1) == CUDA_SUCCESS);
  CHECK(sim.control.leaks().streams + sim.control.leaks().events == 0);
}

TEST_CASE("a forked child that calls it ends at once") {
  Simulation sim;
  CHECK(signal_of([&] { sim.api.cuCtxSynchronize.function(); }) == SIGABRT);
}
