// The entry points of libcuda that the CUDA driver uses, looked up at run time: the library builds,
// imports and runs on the CPU without CUDA installed.
#pragma once

#include <string>

#include "base/calls.h"
#include "driver/cuda_abi.h"

namespace vtensor {

using namespace cuda;  // CUresult and the like

// X(documented name, exported symbol)
#define VTENSOR_CUDA_ENTRIES(X)                                           \
  X(cuInit, cuInit)                                                       \
  X(cuDeviceGetCount, cuDeviceGetCount)                                   \
  X(cuDeviceGet, cuDeviceGet)                                             \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute)                           \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                   \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)              \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)         \
  X(cuMemGetInfo, cuMemGetInfo_v2)                                        \
  X(cuMemAddressReserve, cuMemAddressReserve)                             \
  X(cuMemAddressFree, cuMemAddressFree)                                   \
  X(cuMemCreate, cuMemCreate)                                             \
  X(cuMemRelease, cuMemRelease)                                           \
  X(cuMemMap, cuMemMap)                                                   \
  X(cuMemUnmap, cuMemUnmap)                                               \
  X(cuMemSetAccess, cuMemSetAccess)                                       \
  X(cuPointerGetAttribute, cuPointerGetAttribute)                         \
  X(cuMemsetD8Async, cuMemsetD8Async)                                     \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2)                              \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2)                              \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)                              \
  X(cuCtxGetCurrent, cuCtxGetCurrent)                                     \
  X(cuCtxSetCurrent, cuCtxSetCurrent)                                     \
  X(cuCtxGetDevice, cuCtxGetDevice)                                       \
  X(cuCtxSynchronize, cuCtxSynchronize)                                   \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode) \
  X(cuStreamCreate, cuStreamCreate)                                       \
  X(cuStreamDestroy, cuStreamDestroy_v2)                                  \
  X(cuStreamQuery, cuStreamQuery)                                         \
  X(cuStreamGetCtx, cuStreamGetCtx)                                       \
  X(cuStreamWaitEvent, cuStreamWaitEvent)                                 \
  X(cuStreamIsCapturing, cuStreamIsCapturing)                             \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2)                    \
  X(cuEventCreate, cuEventCreate)                                         \
  X(cuEventDestroy, cuEventDestroy_v2)                                    \
  X(cuEventRecord, cuEventRecord)                                         \
  X(cuEventQuery, cuEventQuery)                                           \
  X(cuUserObjectCreate, cuUserObjectCreate)                               \
  X(cuUserObjectRelease, cuUserObjectRelease)                             \
  X(cuGraphRetainUserObject, cuGraphRetainUserObject)

template <class Function>
struct CudaEntry {
  Call call;
  Function* function = nullptr;
};

struct CudaApi {
  // Loads `library` for the rest of the process: a loaded libcuda has threads and exit handlers of
  // its own. Throws DriverError.
  explicit CudaApi(const std::string& library);

  // "CUDA_ERROR_INVALID_VALUE"; the number where the loaded libcuda does not know it.
  std::string name_of(CUresult code) const;

#define VTENSOR_CUDA_MEMBER(name, symbol) CudaEntry<cuda::symbol> name{Call::name};
  VTENSOR_CUDA_ENTRIES(VTENSOR_CUDA_MEMBER)
#undef VTENSOR_CUDA_MEMBER

 private:
  cuda::cuGetErrorName* error_name_ = nullptr;
};

}  // namespace vtensor
