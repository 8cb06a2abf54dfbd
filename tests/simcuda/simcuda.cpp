// The entry points of the simulated libcuda (a test double) that vtensor's CUDA driver uses, with
// their real names and versions: devices, contexts and memory. Streams are in simcuda_streams.cpp.
#include <cuda.h>

#include <algorithm>
#include <cstdio>

#include "sim.h"

using simcuda::answer;
using simcuda::Needs;
using simcuda::Result;
using simcuda::Sim;

namespace {

bool is_aligned(const Sim& s, unsigned long long at, std::size_t size) {
  return at % s.settings.granularity == 0 && size % s.settings.granularity == 0;
}

bool is_device_memory(const Sim& s, const CUmemAllocationProp* properties) {
  return properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         s.has_device(properties->location.id);
}

}  // namespace

// cuda.h's macros give the definitions their exported versions, such as cuMemGetInfo_v2.

SIMCUDA_EXPORT CUresult CUDAAPI cuGetErrorName(CUresult code, const char** name) {
  *name = simcuda::error_name(code);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMCUDA_EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
  return answer("cuInit", Needs::nothing, {{"flags", flags}}, [&](Sim& s, Result&) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (s.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
    s.initialised = true;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return answer("cuDeviceGetCount", Needs::nothing, {}, [&](Sim& s, Result& result) {
    result = s.settings.devices;
    *count = static_cast<int>(s.settings.devices);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return answer("cuDeviceGet", Needs::nothing,
                {{"ordinal", static_cast<unsigned long long>(ordinal)}},
                [&](Sim& s, Result& result) {
                  if (!s.has_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
                  result = static_cast<unsigned long long>(ordinal);
                  *device = ordinal;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                                     CUdevice device) {
  return answer("cuDeviceGetAttribute", Needs::nothing,
                {{"attribute", static_cast<unsigned long long>(attribute)},
                 {"device", static_cast<unsigned long long>(device)}},
                [&](Sim& s, Result& result) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  switch (attribute) {
                    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
                      *value = s.settings.vmm != 0;
                      break;
                    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
                      *value = s.settings.rdma != 0;
                      break;
                    default:
                      return CUDA_ERROR_INVALID_VALUE;  // the only two that are simulated
                  }
                  result = static_cast<unsigned long long>(*value);
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return answer("cuDevicePrimaryCtxRetain", Needs::nothing,
                {{"device", static_cast<unsigned long long>(device)}}, [&](Sim& s, Result&) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  auto& primary = s.contexts[static_cast<std::size_t>(device)];
                  ++primary.retained;
                  *context = reinterpret_cast<CUcontext>(&primary);
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return answer("cuDevicePrimaryCtxRelease", Needs::nothing,
                {{"device", static_cast<unsigned long long>(device)}}, [&](Sim& s, Result&) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  auto& primary = s.contexts[static_cast<std::size_t>(device)];
                  if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
                  --primary.retained;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  return answer("cuCtxGetCurrent", Needs::nothing, {}, [&](Sim&, Result&) {
    *context = simcuda::current_context;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  return answer("cuCtxSetCurrent", Needs::nothing, {{"set", context != nullptr}},
                [&](Sim& s, Result&) {
                  if (context != nullptr && !s.find(context)) return CUDA_ERROR_INVALID_CONTEXT;
                  simcuda::current_context = context;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  return answer("cuMemGetInfo", Needs::context, {}, [&](Sim& s, Result& result) {
    result = *free = s.free_memory(s.device_of(simcuda::current_context));
    *total = s.settings.memory;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI
cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                              CUmemAllocationGranularity_flags kind) {
  return answer("cuMemGetAllocationGranularity", Needs::vmm,
                {{"kind", static_cast<unsigned long long>(kind)}}, [&](Sim& s, Result& result) {
                  if (!is_device_memory(s, properties)) return CUDA_ERROR_INVALID_VALUE;
                  result = *granularity = s.settings.granularity;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment,
                                                    CUdeviceptr hint, unsigned long long flags) {
  return answer("cuMemAddressReserve", Needs::vmm,
                {{"size", size}, {"alignment", alignment}, {"hint_ptr", hint}, {"flags", flags}},
                [&](Sim& s, Result& result) {
                  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
                  simcuda::Address range = 0;
                  const CUresult code =
                      s.model->memory.reserve(&range, size, alignment, s.settings.granularity);
                  if (code == CUDA_SUCCESS) result = *ptr = range;
                  return code;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  return answer("cuMemAddressFree", Needs::vmm, {{"ptr", ptr}, {"size", size}},
                [&](Sim& s, Result&) { return s.model->memory.free_range(ptr, size); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                            const CUmemAllocationProp* properties,
                                            unsigned long long flags) {
  const bool rdma = properties != nullptr && properties->allocFlags.gpuDirectRDMACapable != 0;
  return answer("cuMemCreate", Needs::vmm, {{"size", size}, {"rdma", rdma}, {"flags", flags}},
                [&](Sim& s, Result& result) {
                  if (flags != 0 || size == 0 || !is_aligned(s, 0, size) ||
                      !is_device_memory(s, properties) || (rdma && s.settings.rdma != 1)) {
                    return CUDA_ERROR_INVALID_VALUE;
                  }
                  const int device = properties->location.id;
                  std::uint64_t made = 0;
                  const CUresult code =
                      s.model->memory.create(&made, size, device, s.free_memory(device));
                  if (code == CUDA_SUCCESS) result = *handle = made;
                  return code;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return answer("cuMemRelease", Needs::vmm, {{"handle", handle}},
                [&](Sim& s, Result&) { return s.model->memory.release(handle); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                         CUmemGenericAllocationHandle handle,
                                         unsigned long long flags) {
  return answer(
      "cuMemMap", Needs::vmm,
      {{"ptr", ptr}, {"size", size}, {"offset", offset}, {"handle", handle}, {"flags", flags}},
      [&](Sim& s, Result&) {
        if (flags != 0 || !is_aligned(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
        return s.model->memory.map(ptr, size, offset, handle);
      });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
  return answer("cuMemUnmap", Needs::vmm, {{"ptr", ptr}, {"size", size}}, [&](Sim& s, Result&) {
    if (s.model->streams.touches(ptr, size)) s.model->streams.count_illegal_access();
    return s.model->memory.unmap(ptr, size);
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size,
                                               const CUmemAccessDesc* wanted, size_t count) {
  const bool is_one = wanted != nullptr && count == 1;
  return answer("cuMemSetAccess", Needs::vmm,
                {{"ptr", ptr},
                 {"size", size},
                 {"access", is_one ? static_cast<unsigned long long>(wanted->flags) : 0},
                 {"count", count}},
                [&](Sim& s, Result&) {
                  // More than one location is not simulated.
                  if (!is_one || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
                    return CUDA_ERROR_INVALID_VALUE;
                  }
                  if (!s.has_device(wanted->location.id)) return CUDA_ERROR_INVALID_DEVICE;
                  if (wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READ && !s.settings.read_only) {
                    return CUDA_ERROR_NOT_SUPPORTED;
                  }
                  if (wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
                      wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
                      wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
                    return CUDA_ERROR_INVALID_VALUE;
                  }
                  if (s.model->streams.touches(ptr, size)) {
                    s.model->streams.count_illegal_access();
                  }
                  return s.model->memory.set_access(ptr, size, wanted->flags);
                });
}

// What a script may ask of any libcuda.

SIMCUDA_EXPORT CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(size), "simulated libcuda (test double)");
  return CUDA_SUCCESS;
}
