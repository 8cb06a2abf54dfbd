// Compiles where csrc/driver/cuda_abi.h says of libcuda what NVIDIA's cuda.h says of it. `make
// check` compiles it over several releases of cuda.h; nothing links or runs it.
#include "base/calls.h"  // before cuda.h, which gives its names to newer versions

// Has cuda.h declare cuStreamGetCaptureInfo_v2 from 13.0 on too.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "simcuda/cuda_abi.h"

namespace {

namespace ours = vtensor::cuda;

// A type of ours in cuda.h's words. One that is not named below stays ours, and differs.
template <class T>
struct Theirs {
  using type = T;
};
template <class T>
using TheirsT = typename Theirs<T>::type;
template <class T>
struct Theirs<const T> {
  using type = const TheirsT<T>;
};
template <class T>
struct Theirs<T*> {
  using type = TheirsT<T>*;
};
template <class Result, class... Arguments>
struct Theirs<Result(Arguments...)> {
  using type = TheirsT<Result>(TheirsT<Arguments>...);
};

#define NAMED(name)           \
  template <>                 \
  struct Theirs<ours::name> { \
    using type = ::name;      \
  }
#define EQUAL_TYPE(name) static_assert(std::is_same_v<TheirsT<ours::name>, ::name>)
#define EQUAL_ENUM(name) \
  NAMED(name);           \
  static_assert(std::is_same_v<std::underlying_type_t<ours::name>, std::underlying_type_t<::name>>)
#define EQUAL_VALUE(name) \
  static_assert(static_cast<long long>(ours::name) == static_cast<long long>(::name))
#define EQUAL_STRUCT(name) \
  NAMED(name);             \
  static_assert(sizeof(ours::name) == sizeof(::name) && alignof(ours::name) == alignof(::name))
#define EQUAL_FIELD(name, field)                                         \
  static_assert(offsetof(ours::name, field) == offsetof(::name, field)); \
  static_assert(std::is_same_v<TheirsT<decltype(ours::name::field)>, decltype(::name::field)>)
#define EQUAL_FUNCTION(name) static_assert(std::is_same_v<TheirsT<ours::name>, decltype(::name)>)

NAMED(CUctx_st);
NAMED(CUstream_st);
NAMED(CUevent_st);
NAMED(CUgraph_st);
NAMED(CUgraphNode_st);
NAMED(CUgraphExec_st);
NAMED(CUuserObject_st);

EQUAL_ENUM(CUresult);
EQUAL_ENUM(CUdevice_attribute);
EQUAL_ENUM(CUmemAllocationType);
EQUAL_ENUM(CUmemAllocationHandleType);
EQUAL_ENUM(CUmemLocationType);
EQUAL_ENUM(CUmemAccess_flags);
EQUAL_ENUM(CUmemAllocationGranularity_flags);
EQUAL_ENUM(CUpointer_attribute);
EQUAL_ENUM(CUdriverProcAddressQueryResult);
EQUAL_ENUM(CUstreamCaptureMode);
EQUAL_ENUM(CUstreamCaptureStatus);

EQUAL_TYPE(CUdevice);
EQUAL_TYPE(CUdeviceptr);
EQUAL_TYPE(CUmemGenericAllocationHandle);
EQUAL_TYPE(CUcontext);
EQUAL_TYPE(CUstream);
EQUAL_TYPE(CUevent);
EQUAL_TYPE(CUgraph);
EQUAL_TYPE(CUgraphNode);
EQUAL_TYPE(CUgraphExec);
EQUAL_TYPE(CUuserObject);
EQUAL_TYPE(CUhostFn);

EQUAL_VALUE(CUDA_SUCCESS);
EQUAL_VALUE(CUDA_ERROR_INVALID_VALUE);
EQUAL_VALUE(CUDA_ERROR_OUT_OF_MEMORY);
EQUAL_VALUE(CUDA_ERROR_NOT_INITIALIZED);
EQUAL_VALUE(CUDA_ERROR_STUB_LIBRARY);
EQUAL_VALUE(CUDA_ERROR_NO_DEVICE);
EQUAL_VALUE(CUDA_ERROR_INVALID_DEVICE);
EQUAL_VALUE(CUDA_ERROR_INVALID_CONTEXT);
EQUAL_VALUE(CUDA_ERROR_INVALID_HANDLE);
EQUAL_VALUE(CUDA_ERROR_ILLEGAL_STATE);
EQUAL_VALUE(CUDA_ERROR_NOT_FOUND);
EQUAL_VALUE(CUDA_ERROR_NOT_READY);
EQUAL_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS);
EQUAL_VALUE(CUDA_ERROR_LAUNCH_TIMEOUT);
EQUAL_VALUE(CUDA_ERROR_CONTEXT_IS_DESTROYED);
EQUAL_VALUE(CUDA_ERROR_NOT_PERMITTED);
EQUAL_VALUE(CUDA_ERROR_NOT_SUPPORTED);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_MERGE);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
EQUAL_VALUE(CUDA_ERROR_CAPTURED_EVENT);
EQUAL_VALUE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
EQUAL_VALUE(CUDA_ERROR_UNKNOWN);
EQUAL_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
EQUAL_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
EQUAL_VALUE(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
EQUAL_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
EQUAL_VALUE(CU_MEM_ALLOCATION_TYPE_INVALID);
EQUAL_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
EQUAL_VALUE(CU_MEM_HANDLE_TYPE_NONE);
EQUAL_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
EQUAL_VALUE(CU_MEM_HANDLE_TYPE_FABRIC);
EQUAL_VALUE(CU_MEM_LOCATION_TYPE_INVALID);
EQUAL_VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
EQUAL_VALUE(CU_MEM_ACCESS_FLAGS_PROT_NONE);
EQUAL_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ);
EQUAL_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
EQUAL_VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
EQUAL_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
EQUAL_VALUE(CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
EQUAL_VALUE(CU_POINTER_ATTRIBUTE_MAPPED);
EQUAL_VALUE(CU_GET_PROC_ADDRESS_SUCCESS);
EQUAL_VALUE(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
EQUAL_VALUE(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
EQUAL_VALUE(CU_STREAM_CAPTURE_MODE_GLOBAL);
EQUAL_VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
EQUAL_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
EQUAL_VALUE(CU_STREAM_CAPTURE_STATUS_NONE);
EQUAL_VALUE(CU_STREAM_CAPTURE_STATUS_ACTIVE);
EQUAL_VALUE(CU_STREAM_CAPTURE_STATUS_INVALIDATED);
EQUAL_VALUE(CU_STREAM_DEFAULT);
EQUAL_VALUE(CU_STREAM_NON_BLOCKING);
EQUAL_VALUE(CU_EVENT_DISABLE_TIMING);
EQUAL_VALUE(CU_EVENT_WAIT_DEFAULT);
EQUAL_VALUE(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
EQUAL_VALUE(CU_GRAPH_USER_OBJECT_MOVE);

EQUAL_STRUCT(CUmemLocation);
EQUAL_FIELD(CUmemLocation, type);
EQUAL_FIELD(CUmemLocation, id);

EQUAL_STRUCT(CUmemAllocationProp);
EQUAL_FIELD(CUmemAllocationProp, type);
EQUAL_FIELD(CUmemAllocationProp, requestedHandleTypes);
EQUAL_FIELD(CUmemAllocationProp, location);
EQUAL_FIELD(CUmemAllocationProp, win32HandleMetaData);
EQUAL_FIELD(CUmemAllocationProp, allocFlags.compressionType);
EQUAL_FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
EQUAL_FIELD(CUmemAllocationProp, allocFlags.usage);
EQUAL_FIELD(CUmemAllocationProp, allocFlags.reserved);

EQUAL_STRUCT(CUmemFabricHandle);
EQUAL_STRUCT(CUuuid);
EQUAL_STRUCT(CUmemAccessDesc);
EQUAL_FIELD(CUmemAccessDesc, location);
EQUAL_FIELD(CUmemAccessDesc, flags);

// What the driver calls, and then what only the simulation and its clients do.
#define EQUAL_CALL(name, symbol) EQUAL_FUNCTION(symbol);
VTENSOR_CUDA_CALLS(EQUAL_CALL)
EQUAL_FUNCTION(cuGetErrorName);
EQUAL_FUNCTION(cuDriverGetVersion);
EQUAL_FUNCTION(cuGetProcAddress_v2);
EQUAL_FUNCTION(cuDeviceGetName);
EQUAL_FUNCTION(cuCtxGetStreamPriorityRange);
EQUAL_FUNCTION(cuMemRetainAllocationHandle);
EQUAL_FUNCTION(cuMemsetD8_v2);
EQUAL_FUNCTION(cuMemcpyDtoD_v2);
EQUAL_FUNCTION(cuStreamCreateWithPriority);
EQUAL_FUNCTION(cuStreamSynchronize);
EQUAL_FUNCTION(cuStreamBeginCapture_v2);
EQUAL_FUNCTION(cuStreamEndCapture);
EQUAL_FUNCTION(cuGraphDestroy);
EQUAL_FUNCTION(cuGraphInstantiateWithFlags);
EQUAL_FUNCTION(cuGraphExecDestroy);
EQUAL_FUNCTION(cuGraphLaunch);

}  // namespace
