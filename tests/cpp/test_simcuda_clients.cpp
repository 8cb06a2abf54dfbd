// What clients other than vtensor ask of the simulated libcuda: cuda-bindings and cuda.core, and
// Triton before it launches a kernel.
#include <doctest/doctest.h>

#include "driver/cuda_calls.h"
#include "simcuda/client.h"

using namespace vtensor::cuda;

namespace {

constexpr std::size_t kPage = std::size_t{64} << 10;

#define ENTRY(symbol) simcuda_symbol<vtensor::cuda::symbol>(#symbol)

struct Simulation {
  SimcudaControl control;
  vtensor::CudaApi api{simcuda_library()};
  CUmemAllocationProp properties{};

  Simulation() {
    control.reset();
    control.configure("granularity", kPage);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUcontext context = nullptr;
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
  CUmemGenericAllocationHandle create() {
    CUmemGenericAllocationHandle handle = 0;
    CHECK(api.cuMemCreate.function(&handle, kPage, &properties, 0) == CUDA_SUCCESS);
    return handle;
  }
  void map(CUdeviceptr at, CUmemGenericAllocationHandle handle, CUmemAccess_flags flags) {
    CHECK(api.cuMemMap.function(at, kPage, 0, handle, 0) == CUDA_SUCCESS);
    CUmemAccessDesc wanted{};
    wanted.location = properties.location;
    wanted.flags = flags;
    CHECK(api.cuMemSetAccess.function(at, kPage, &wanted, 1) == CUDA_SUCCESS);
  }
};

}  // namespace

TEST_CASE("entry points are found by name and version, before cuInit too") {
  Simulation sim;
  sim.control.reset();
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

TEST_CASE("kernels are given pointers to what is mapped, and by setting to what is reserved") {
  Simulation sim;
  const CUdeviceptr range = sim.reserve(4);
  sim.map(range, sim.create(), CU_MEM_ACCESS_FLAGS_PROT_READ);
  sim.map(range + kPage, sim.create(), CU_MEM_ACCESS_FLAGS_PROT_NONE);
  const auto ask = [](CUdeviceptr at) {
    CUdeviceptr given = 0;
    const CUresult code =
        ENTRY(cuPointerGetAttribute)(&given, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
    CHECK(given == (code == CUDA_SUCCESS ? at : 0));
    return code;
  };
  const auto is_mapped = [](CUdeviceptr at) {
    int mapped = -1;
    ENTRY(cuPointerGetAttribute)(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, at);
    return mapped;
  };
  for (const std::uint64_t setting : {0, 1, 2, 3}) {
    CAPTURE(setting);
    sim.control.configure("pointers", setting);
    CHECK(ask(range + kPage / 2) == CUDA_SUCCESS);
    CHECK((ask(range + kPage) == CUDA_SUCCESS) == ((setting & 1) != 0));
    CHECK((ask(range + 2 * kPage) == CUDA_SUCCESS) == ((setting & 2) != 0));
    CHECK(ask(range + 4 * kPage) == CUDA_ERROR_INVALID_VALUE);  // past the range
  }
  CHECK(is_mapped(range) == 1);
  CHECK(is_mapped(range + 2 * kPage) == 0);
  CHECK(is_mapped(range + 4 * kPage) == -1);
  CHECK(sim.api.cuCtxSetCurrent.function(nullptr) == CUDA_SUCCESS);
  CHECK(ask(range) == CUDA_ERROR_INVALID_CONTEXT);
}

TEST_CASE("access is told as it was set, per page") {
  Simulation sim;
  const CUdeviceptr range = sim.reserve(2);
  sim.map(range, sim.create(), CU_MEM_ACCESS_FLAGS_PROT_READ);
  unsigned long long access = 9;
  CHECK(ENTRY(cuMemGetAccess)(&access, &sim.properties.location, range + 5) == CUDA_SUCCESS);
  CHECK(access == CU_MEM_ACCESS_FLAGS_PROT_READ);
  CHECK(ENTRY(cuMemGetAccess)(&access, &sim.properties.location, range + kPage) ==
        CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a handle retained from a mapping wants a release of its own") {
  Simulation sim;
  const CUdeviceptr range = sim.reserve(1);
  const auto handle = sim.create();
  const auto retain = [&] {
    CUmemGenericAllocationHandle again = 0;
    return ENTRY(cuMemRetainAllocationHandle)(&again, reinterpret_cast<void*>(range)) ==
                   CUDA_SUCCESS
               ? again
               : 0;
  };
  CHECK(retain() == 0);
  sim.map(range, handle, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CHECK(sim.api.cuMemRelease.function(handle) == CUDA_SUCCESS);
  CHECK(retain() == handle);  // what is mapped is there, released or not
  CHECK(retain() == handle);
  CHECK(sim.api.cuMemUnmap.function(range, kPage) == CUDA_SUCCESS);
  CHECK(sim.control.leaks().handles == 1);
  CHECK(sim.api.cuMemRelease.function(handle) == CUDA_SUCCESS);
  CHECK(sim.api.cuMemRelease.function(handle) == CUDA_SUCCESS);
  CHECK(sim.control.leaks().handles == 0);
}

TEST_CASE("memory is shareable by the types that the setting names") {
  Simulation sim;
  const auto create = [&](CUmemAllocationHandleType type) {
    sim.properties.requestedHandleTypes = type;
    CUmemGenericAllocationHandle handle = 0;
    return sim.api.cuMemCreate.function(&handle, kPage, &sim.properties, 0);
  };
  CHECK(create(CU_MEM_HANDLE_TYPE_NONE) == CUDA_SUCCESS);
  CHECK(create(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS);
  CHECK(create(CU_MEM_HANDLE_TYPE_FABRIC) == CUDA_ERROR_NOT_SUPPORTED);
  sim.control.configure("handle_types", CU_MEM_HANDLE_TYPE_FABRIC);
  CHECK(create(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(create(CU_MEM_HANDLE_TYPE_FABRIC) == CUDA_SUCCESS);
}

TEST_CASE("a stream made with a priority is a stream") {
  Simulation sim;
  int least = 9, greatest = 9;
  CHECK(ENTRY(cuCtxGetStreamPriorityRange)(&least, &greatest) == CUDA_SUCCESS);
  CHECK(least >= greatest);  // lower numbers are greater priorities
  CUstream stream = nullptr;
  CHECK(ENTRY(cuStreamCreateWithPriority)(&stream, CU_STREAM_NON_BLOCKING, greatest) ==
        CUDA_SUCCESS);
  CHECK(ENTRY(cuStreamSynchronize)(stream) == CUDA_SUCCESS);
  CHECK(sim.control.leaks().streams == 1);
  CHECK(ENTRY(cuStreamDestroy_v2)(stream) == CUDA_SUCCESS);
}
