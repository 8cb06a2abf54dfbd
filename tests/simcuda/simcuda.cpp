// The entry points of the simulated libcuda (a test double) that vtensor's CUDA driver uses, with
// their real names and versions: devices, contexts and memory. Streams are in simcuda_streams.cpp.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "sim.h"

using simcuda::answer;
using simcuda::answer_waiting;
using simcuda::During;
using simcuda::Needs;
using simcuda::Sim;
using namespace vtensor::cuda;

namespace {

bool is_aligned(const Sim& s, unsigned long long at, std::size_t size) {
  return at % s.settings.granularity == 0 && size % s.settings.granularity == 0;
}

bool is_device_memory(const Sim& s, const CUmemAllocationProp* properties) {
  return properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         s.has_device(properties->location.id);
}

// Before a call that changes what is accessible: waits for all work on the device, where it blocks.
CUresult begin_change(Sim& s, std::unique_lock<std::mutex>& lock, CUdeviceptr at, size_t size) {
  if (s.settings.blocking) {
    const auto idle = [&] { return s.model->streams.all_idle(); };
    const CUresult code = simcuda::wait_until(s, nullptr, lock, idle);
    if (code != CUDA_SUCCESS) return code;
  }
  if (s.model->streams.touches(at, size)) s.model->streams.count_illegal_access();
  return CUDA_SUCCESS;
}

// Bits of the setting "pointers".
constexpr std::uint64_t kWithoutAccess = 1, kReserved = 2;

bool has_device_pointer(const Sim& s, CUdeviceptr at) {
  const auto* const mapping = s.model->memory.mapping_at(at);
  if (mapping == nullptr) {
    return (s.settings.pointers & kReserved) != 0 && s.model->memory.is_reserved(at);
  }
  return mapping->access != CU_MEM_ACCESS_FLAGS_PROT_NONE ||
         (s.settings.pointers & kWithoutAccess) != 0;
}

}  // namespace

SIMCUDA_ENTRY(cuGetErrorName)(CUresult code, const char** name) {
  *name = simcuda::error_name(code);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMCUDA_ENTRY(cuInit)(unsigned int flags) {
  return answer("cuInit", Needs::nothing, [&](Sim& s) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (s.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
    s.initialised = true;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDeviceGetCount)(int* count) {
  return answer("cuDeviceGetCount", Needs::nothing, [&](Sim& s) {
    *count = static_cast<int>(s.settings.devices);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDeviceGet)(CUdevice* device, int ordinal) {
  return answer("cuDeviceGet", Needs::nothing, [&](Sim& s) {
    if (!s.has_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDeviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device) {
  return answer("cuDeviceGetAttribute", Needs::nothing, [&](Sim& s) {
    if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = s.settings.vmm != 0;
        break;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        *value = s.settings.rdma != 0;
        break;
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = s.takes(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        break;
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        *value = s.takes(CU_MEM_HANDLE_TYPE_FABRIC);
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;  // not simulated
    }
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDeviceGetUuid_v2)(CUuuid* uuid, CUdevice device) {
  return answer("cuDeviceGetUuid", Needs::nothing, [&](Sim& s) {
    if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = {{'s', 'i', 'm', static_cast<char>(s.settings.first_uuid + device)}};
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device) {
  return answer("cuDevicePrimaryCtxRetain", Needs::nothing, [&](Sim& s) {
    if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto& primary = s.contexts[static_cast<std::size_t>(device)];
    primary.device = device;
    ++primary.retained;
    *context = reinterpret_cast<CUcontext>(&primary);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuDevicePrimaryCtxRelease_v2)(CUdevice device) {
  return answer("cuDevicePrimaryCtxRelease", Needs::nothing, [&](Sim& s) {
    if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto& primary = s.contexts[static_cast<std::size_t>(device)];
    if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --primary.retained;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuCtxGetCurrent)(CUcontext* context) {
  return answer("cuCtxGetCurrent", Needs::nothing, [&](Sim&) {
    *context = simcuda::current_context;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuCtxSetCurrent)(CUcontext context) {
  return answer("cuCtxSetCurrent", Needs::nothing, [&](Sim& s) {
    if (context != nullptr && !s.find(context)) return CUDA_ERROR_INVALID_CONTEXT;
    simcuda::current_context = context;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuCtxGetDevice)(CUdevice* device) {
  return answer("cuCtxGetDevice", Needs::context, During::any_capture, [&](Sim& s) {
    *device = s.find(simcuda::current_context)->device;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemGetInfo_v2)(size_t* free, size_t* total) {
  return answer("cuMemGetInfo", Needs::context, [&](Sim& s) {
    *free = s.free_memory(s.find(simcuda::current_context)->device);
    *total = s.settings.memory;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemGetAllocationGranularity)(size_t* granularity,
                                             const CUmemAllocationProp* properties,
                                             CUmemAllocationGranularity_flags) {
  return answer("cuMemGetAllocationGranularity", Needs::vmm, [&](Sim& s) {
    if (!is_device_memory(s, properties)) return CUDA_ERROR_INVALID_VALUE;
    *granularity = s.settings.granularity;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemAddressReserve)(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr,
                                   unsigned long long flags) {
  return answer("cuMemAddressReserve", Needs::vmm, [&](Sim& s) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return s.model->memory.reserve(ptr, size, alignment, s.settings.granularity);
  });
}

SIMCUDA_ENTRY(cuMemAddressFree)(CUdeviceptr ptr, size_t size) {
  return answer("cuMemAddressFree", Needs::vmm,
                [&](Sim& s) { return s.model->memory.free_range(ptr, size); });
}

SIMCUDA_ENTRY(cuMemCreate)(CUmemGenericAllocationHandle* handle, size_t size,
                           const CUmemAllocationProp* properties, unsigned long long flags) {
  const bool rdma = properties != nullptr && properties->allocFlags.gpuDirectRDMACapable != 0;
  return answer("cuMemCreate", Needs::vmm, [&](Sim& s) {
    if (flags != 0 || size == 0 || !is_aligned(s, 0, size) || !is_device_memory(s, properties) ||
        (rdma && s.settings.rdma == 0)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const CUmemAllocationHandleType types = properties->requestedHandleTypes;
    if (!s.takes(types)) return CUDA_ERROR_NOT_SUPPORTED;
    // As where the attribute is there and no IMEX channel is.
    if ((types & CU_MEM_HANDLE_TYPE_FABRIC) != 0 && s.settings.imex == 0)
      return CUDA_ERROR_NOT_PERMITTED;
    const int device = properties->location.id;
    return s.model->memory.create(handle, size, device, s.free_memory(device), types, rdma);
  });
}

SIMCUDA_ENTRY(cuMemRelease)(CUmemGenericAllocationHandle handle) {
  return answer("cuMemRelease", Needs::vmm,
                [&](Sim& s) { return s.model->memory.release(handle); });
}

SIMCUDA_ENTRY(cuMemExportToShareableHandle)(void* shareable, CUmemGenericAllocationHandle handle,
                                            CUmemAllocationHandleType type,
                                            unsigned long long flags) {
  return answer("cuMemExportToShareableHandle", Needs::vmm, [&](Sim& s) {
    const int file = flags == 0 ? s.model->memory.export_file(handle, type) : -1;
    if (file < 0) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
      auto* const name = static_cast<CUmemFabricHandle*>(shareable)->data;
      std::snprintf(reinterpret_cast<char*>(name), sizeof(CUmemFabricHandle), "/proc/%d/fd/%d",
                    getpid(), file);
    } else {
      const int made = fcntl(file, F_DUPFD_CLOEXEC, 0);
      if (made < 0) return CUDA_ERROR_UNKNOWN;
      *static_cast<int*>(shareable) = made;
    }
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle* handle, void* shareable,
                                              CUmemAllocationHandleType type) {
  return answer("cuMemImportFromShareableHandle", Needs::vmm, [&](Sim& s) {
    const bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    const int file = fabric ? open(static_cast<const char*>(shareable), O_RDWR | O_CLOEXEC)
                            : static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
    const CUresult code = s.model->memory.import_file(handle, file);
    if (fabric && file >= 0) close(file);
    return code;
  });
}

SIMCUDA_ENTRY(cuMemMap)(CUdeviceptr ptr, size_t size, size_t offset,
                        CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return answer("cuMemMap", Needs::vmm, [&](Sim& s) {
    if (flags != 0 || !is_aligned(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    return s.model->memory.map(ptr, size, offset, handle);
  });
}

SIMCUDA_ENTRY(cuMemUnmap)(CUdeviceptr ptr, size_t size) {
  return answer_waiting("cuMemUnmap", Needs::vmm, During::no_capture,
                        [&](Sim& s, std::unique_lock<std::mutex>& lock) {
                          const CUresult code = begin_change(s, lock, ptr, size);
                          return code != CUDA_SUCCESS ? code : s.model->memory.unmap(ptr, size);
                        });
}

SIMCUDA_ENTRY(cuMemSetAccess)(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* wanted,
                              size_t count) {
  const bool is_one = wanted != nullptr && count == 1;
  return answer_waiting(
      "cuMemSetAccess", Needs::vmm, During::no_capture,
      [&](Sim& s, std::unique_lock<std::mutex>& lock) {
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
        const CUresult code = begin_change(s, lock, ptr, size);
        if (code != CUDA_SUCCESS) return code;
        return s.model->memory.set_access(ptr, size, wanted->flags);
      });
}

// Triton asks it of each tensor that a kernel is given, also while a stream is captured.
SIMCUDA_ENTRY(cuPointerGetAttribute)(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
  return answer("cuPointerGetAttribute", Needs::context, During::any_capture, [&](Sim& s) {
    // Others are not simulated.
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
    if (!has_device_pointer(s, at)) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<CUdeviceptr*>(value) = at;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemRetainAllocationHandle)(CUmemGenericAllocationHandle* handle, void* at) {
  return answer("cuMemRetainAllocationHandle", Needs::vmm, [&](Sim& s) {
    return s.model->memory.retain(reinterpret_cast<simcuda::Address>(at), handle);
  });
}

// What a script may ask of any libcuda.

SIMCUDA_ENTRY(cuDriverGetVersion)(int* version) {
  *version = 13000;  // 13.0
  return CUDA_SUCCESS;
}

SIMCUDA_ENTRY(cuDeviceGetName)(char* name, int size, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(size), "simulated libcuda (test double)");
  return CUDA_SUCCESS;
}
