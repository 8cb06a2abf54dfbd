// The simulated libcuda keeps the rules that the CUDA driver relies on: a test double that forgives
// would hide its mistakes.
#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include "qemu.h"
#include "simulation.h"
#include "support.h"

using namespace vtensor::cuda;

namespace {

#define ENTRY(symbol) simcuda_symbol<vtensor::cuda::symbol>(#symbol)

// How a child process ended that ran `work`: 0, or -signal; no other way to see a fault.
template <class Work>
int ends(Work work) {
  return vtensor::in_child([&] {
    work();
    return 0;
  });
}

}  // namespace

TEST_CASE("nothing works before cuInit") {
  const FreshDevice device(kPage);
  const vtensor::CudaApi api(simcuda_library());
  int count = 0;
  CUdeviceptr range = 0;
  CHECK(api.cuDeviceGetCount.function(&count) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(api.cuMemAddressReserve.function(&range, kPage, 0, 0, 0) == CUDA_ERROR_NOT_INITIALIZED);
}

// By which cuda-bindings and cuda.core find all else.
TEST_CASE("entry points are found by name and version, before cuInit too") {
  const FreshDevice device(kPage);
  const auto find = [](const char* symbol, int version) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    const CUresult code = ENTRY(cuGetProcAddress_v2)(symbol, &found, version, 0, &status);
    CHECK((code == CUDA_SUCCESS) == (found != nullptr));
    CHECK((code == CUDA_ERROR_NOT_FOUND) == (status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
    return found;
  };
  const auto exported = [](auto* function) { return reinterpret_cast<void*>(function); };
  CHECK(find("cuInit", 2000) == exported(ENTRY(cuInit)));
  CHECK(find("cuMemGetInfo", 3020) == exported(ENTRY(cuMemGetInfo_v2)));
  CHECK(find("cuStreamGetCaptureInfo", 11030) == exported(ENTRY(cuStreamGetCaptureInfo_v2)));
  CHECK(find("cuStreamGetCaptureInfo", 12030) == nullptr);  // which takes edges too
  CHECK(find("cuCtxSynchronize", 2000) == exported(ENTRY(cuCtxSynchronize)));
  CHECK(find("cuCtxSynchronize", 13000) == nullptr);  // which takes a context
  CHECK(find("cuLaunchKernel", 4000) == nullptr);
}

TEST_CASE("memory is accessible only as far as cuMemSetAccess says") {
  Simulation sim;
  const CUdeviceptr range = sim.reserve(2), other = sim.mapped(1);
  CHECK(sim.map(range, sim.create()) == CUDA_SUCCESS);
  const auto load = [&] { byte(range); };
  const auto store = [&] { *reinterpret_cast<volatile unsigned char*>(range) = 1; };
  CHECK(ends(load) < 0);  // mapped, and not accessible
  CHECK(sim.api.cuMemsetD8Async.function(range, 1, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.api.cuMemcpyDtoDAsync.function(other, range, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.set_access(range, 2, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.set_access(range, 1, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_SUCCESS);
  CHECK(ends(load) == 0);
  CHECK(ends(store) < 0);
  CHECK(sim.api.cuMemsetD8Async.function(range, 0, 1, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sim.set_access(range, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
  CHECK(ends(store) == 0);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);
  CHECK(ends(load) < 0);
  // A fresh mapping at the same address starts without access.
  CHECK(sim.map(range, sim.create()) == CUDA_SUCCESS);
  CHECK(ends(load) < 0);
  CHECK(sim.control.illegal_accesses() == 0);
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
  CUcontext context = nullptr;
  CHECK(sim.api.cuCtxGetCurrent.function(&context) == CUDA_SUCCESS);
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
  CHECK(sim.api.cuCtxSetCurrent.function(context) == CUDA_SUCCESS);
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

TEST_CASE("after an illegal access calls without a context go on, and no others") {
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
  CHECK(sim.api.cuInit.function(0) == CUDA_SUCCESS);
  CHECK(sim.api.cuDeviceGetCount.function(&count) == CUDA_SUCCESS);
  CHECK(sim.api.cuCtxGetCurrent.function(&current) == CUDA_SUCCESS);
  CHECK(sim.api.cuCtxSetCurrent.function(current) == CUDA_SUCCESS);
  CHECK(sim.api.cuEventQuery.function(event) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuEventRecord.function(event, nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0) ==
        CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuMemUnmap.function(range + kPage, kPage) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(sim.api.cuMemAddressFree.function(empty, kPage) == CUDA_SUCCESS);
  const auto other = reinterpret_cast<CUcontext>(sim.control.make_context(0));
  CHECK(sim.api.cuCtxSetCurrent.function(other) == CUDA_SUCCESS);
  CHECK(sim.api.cuStreamQuery.function(nullptr) == CUDA_SUCCESS);
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
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = program + " --no-skip --test-case='ends the process' 2>&1";
  std::FILE* const said = popen(command.c_str(), "r");
  REQUIRE(said != nullptr);
  std::string text;
  for (int got; (got = std::getc(said)) != EOF;) text += static_cast<char>(got);
  CHECK(pclose(said) != 0);
  CHECK(text.find("cuMemRelease of handle 1, which is none") != std::string::npos);
}

TEST_CASE("a forked child that calls it ends at once") {
  Simulation sim;
  CHECK(ends([&] { sim.api.cuCtxSynchronize.function(); }) == -SIGABRT);
}
