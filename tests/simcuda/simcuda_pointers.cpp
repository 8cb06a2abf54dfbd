// What the simulated libcuda (a test double) tells of an address: whether there is a pointer to it
// for kernels, and what is mapped there.
#include "sim.h"

using simcuda::answer;
using simcuda::During;
using simcuda::Needs;
using simcuda::Sim;
using namespace vtensor::cuda;

namespace {

// Bits of the setting "pointers".
constexpr std::uint64_t kWithoutAccess = 1, kReserved = 2;

bool has_device_pointer(const Sim& s, CUdeviceptr at) {
  CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  if (s.model->memory.handle_at(at, &access) == 0) {
    return (s.settings.pointers & kReserved) != 0 && s.model->memory.is_reserved(at);
  }
  return access != CU_MEM_ACCESS_FLAGS_PROT_NONE || (s.settings.pointers & kWithoutAccess) != 0;
}

}  // namespace

// Triton asks it of each tensor that a kernel is given, also while a stream is captured.
SIMCUDA_ENTRY(cuPointerGetAttribute)(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
  return answer("cuPointerGetAttribute", Needs::context, During::any_capture, [&](Sim& s) {
    CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        if (!has_device_pointer(s, at)) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<CUdeviceptr*>(value) = at;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MAPPED:
        if (!s.model->memory.is_reserved(at)) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<int*>(value) = s.model->memory.handle_at(at, &access) != 0;
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;  // not simulated
    }
  });
}

SIMCUDA_ENTRY(cuMemGetAccess)(unsigned long long* access, const CUmemLocation* location,
                              CUdeviceptr at) {
  return answer("cuMemGetAccess", Needs::vmm, [&](Sim& s) {
    CUmemAccess_flags found = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE ||
        s.model->memory.handle_at(at, &found) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!s.has_device(location->id)) return CUDA_ERROR_INVALID_DEVICE;
    *access = found;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuMemRetainAllocationHandle)(CUmemGenericAllocationHandle* handle, void* at) {
  return answer("cuMemRetainAllocationHandle", Needs::vmm, [&](Sim& s) {
    std::uint64_t found = 0;
    const CUresult code = s.model->memory.retain(reinterpret_cast<simcuda::Address>(at), &found);
    if (code == CUDA_SUCCESS) *handle = found;
    return code;
  });
}
