// The part of libcuda's binary interface that the simulated libcuda and its clients use beside the
// part that the CUDA driver uses (csrc/driver/cuda_abi.h).
#pragma once

#include "driver/cuda_abi.h"

namespace vtensor::cuda {

struct CUgraphExec_st;
using CUgraphExec = CUgraphExec_st*;

inline constexpr CUstreamCaptureMode CU_STREAM_CAPTURE_MODE_GLOBAL{0};
inline constexpr CUstreamCaptureMode CU_STREAM_CAPTURE_MODE_THREAD_LOCAL{1};
inline constexpr CUstreamCaptureStatus CU_STREAM_CAPTURE_STATUS_INVALIDATED{2};
inline constexpr unsigned CU_STREAM_DEFAULT = 0;

enum CUdriverProcAddressQueryResult : unsigned {
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};

using cuCtxGetStreamPriorityRange = CUresult(int* least, int* greatest);
using cuDeviceGetName = CUresult(char* name, int size, CUdevice device);
using cuDriverGetVersion = CUresult(int* version);
using cuGetProcAddress_v2 = CUresult(const char* symbol, void** function, int version,
                                     std::uint64_t flags, CUdriverProcAddressQueryResult* status);
using cuGraphDestroy = CUresult(CUgraph graph);
using cuGraphExecDestroy = CUresult(CUgraphExec executable);
using cuGraphInstantiateWithFlags = CUresult(CUgraphExec* executable, CUgraph graph,
                                             unsigned long long flags);
using cuGraphLaunch = CUresult(CUgraphExec executable, CUstream stream);
using cuMemRetainAllocationHandle = CUresult(CUmemGenericAllocationHandle* handle, void* at);
using cuMemcpyDtoD_v2 = CUresult(CUdeviceptr to, CUdeviceptr from, std::size_t size);
using cuMemsetD8_v2 = CUresult(CUdeviceptr at, unsigned char value, std::size_t size);
using cuStreamBeginCapture_v2 = CUresult(CUstream stream, CUstreamCaptureMode mode);
using cuStreamCreateWithPriority = CUresult(CUstream* stream, unsigned flags, int priority);
using cuStreamEndCapture = CUresult(CUstream stream, CUgraph* graph);
using cuStreamSynchronize = CUresult(CUstream stream);

}  // namespace vtensor::cuda
