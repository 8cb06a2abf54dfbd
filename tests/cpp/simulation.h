// The simulated device from its beginning, as a caller of its libcuda has it.
#pragma once

#include <cstddef>

#include "conformance/streams.h"
#include "driver/cuda_calls.h"
#include "simcuda/client.h"

namespace vtensor::cuda {

constexpr std::size_t kPage = std::size_t{64} << 10;

struct Simulation {
  FreshDevice control{kPage};
  conformance::Caller caller{simcuda_library()};
  const CudaApi& api = caller.api;
  CUmemAllocationProp properties{};

  Simulation() {
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  }

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
  CUresult map(CUdeviceptr at, CUmemGenericAllocationHandle handle) {
    return api.cuMemMap.function(at, kPage, 0, handle, 0);
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

inline unsigned char byte(CUdeviceptr at) { return *reinterpret_cast<volatile unsigned char*>(at); }

}  // namespace vtensor::cuda
