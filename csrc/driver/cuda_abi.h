// The part of libcuda's binary interface that the CUDA driver uses: numbers, layouts and
// signatures, under the names of the CUDA driver API reference
// (https://docs.nvidia.com/cuda/cuda-driver-api). They hold for CUDA 12.4 to 13.x, on 64-bit Linux.
//
// With them the build needs nothing of CUDA. `make check` compares all of them with NVIDIA's cuda.h
// (tests/cuda_abi).
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtensor::cuda {

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUuserObject_st;

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = CUctx_st*;
using CUstream = CUstream_st*;
using CUevent = CUevent_st*;
using CUgraph = CUgraph_st*;
using CUgraphNode = CUgraphNode_st*;
using CUuserObject = CUuserObject_st*;
using CUhostFn = void (*)(void*);

// Enumerations list only the values that are used: a libcuda may answer other numbers too.

enum CUresult : unsigned {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
  CUDA_ERROR_UNKNOWN = 999,
};

enum CUdevice_attribute : unsigned {
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
};

enum CUmemAllocationType : unsigned {
  CU_MEM_ALLOCATION_TYPE_INVALID = 0,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
};
enum CUmemAllocationHandleType : unsigned {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8,
};
enum CUmemLocationType : unsigned {
  CU_MEM_LOCATION_TYPE_INVALID = 0,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
};
enum CUmemAccess_flags : unsigned {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
};
enum CUmemAllocationGranularity_flags : unsigned {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
};

enum CUpointer_attribute : unsigned {
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_MAPPED = 13,
};

enum CUstreamCaptureMode : unsigned {
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};
enum CUstreamCaptureStatus : unsigned {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
};

// Flags: the entry points take them as plain numbers.
inline constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
inline constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
inline constexpr unsigned CU_EVENT_WAIT_DEFAULT = 0;
inline constexpr unsigned CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1;
inline constexpr unsigned CU_GRAPH_USER_OBJECT_MOVE = 1;

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmemFabricHandle {
  unsigned char data[64];
};

struct CUuuid {
  char bytes[16];
};

struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

// The types of the entry points, under the symbols that libcuda exports. As types they cannot be
// linked to by mistake: libcuda is loaded at run time.

using cuGetErrorName = CUresult(CUresult code, const char** name);
using cuInit = CUresult(unsigned flags);

using cuDeviceGetCount = CUresult(int* count);
using cuDeviceGet = CUresult(CUdevice* device, int ordinal);
using cuDeviceGetAttribute = CUresult(int* value, CUdevice_attribute attribute, CUdevice device);
using cuDeviceGetUuid_v2 = CUresult(CUuuid* uuid, CUdevice device);
using cuDevicePrimaryCtxRetain = CUresult(CUcontext* context, CUdevice device);
using cuDevicePrimaryCtxRelease_v2 = CUresult(CUdevice device);
using cuCtxGetCurrent = CUresult(CUcontext* context);
using cuCtxSetCurrent = CUresult(CUcontext context);
using cuCtxGetDevice = CUresult(CUdevice* device);
using cuCtxSynchronize = CUresult();

using cuMemGetInfo_v2 = CUresult(std::size_t* free, std::size_t* total);
using cuMemGetAllocationGranularity = CUresult(std::size_t* granularity,
                                               const CUmemAllocationProp* properties,
                                               CUmemAllocationGranularity_flags kind);
using cuMemAddressReserve = CUresult(CUdeviceptr* range, std::size_t size, std::size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags);
using cuMemAddressFree = CUresult(CUdeviceptr range, std::size_t size);
using cuMemCreate = CUresult(CUmemGenericAllocationHandle* handle, std::size_t size,
                             const CUmemAllocationProp* properties, unsigned long long flags);
using cuMemRelease = CUresult(CUmemGenericAllocationHandle handle);
using cuMemMap = CUresult(CUdeviceptr at, std::size_t size, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags);
using cuMemUnmap = CUresult(CUdeviceptr at, std::size_t size);
using cuMemSetAccess = CUresult(CUdeviceptr at, std::size_t size, const CUmemAccessDesc* wanted,
                                std::size_t count);
using cuMemExportToShareableHandle = CUresult(void* shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags);
// `shareable`: a descriptor as a pointer, or a pointer to a CUmemFabricHandle.
using cuMemImportFromShareableHandle = CUresult(CUmemGenericAllocationHandle* handle,
                                                void* shareable, CUmemAllocationHandleType type);
using cuPointerGetAttribute = CUresult(void* value, CUpointer_attribute attribute, CUdeviceptr at);
using cuMemsetD8Async = CUresult(CUdeviceptr at, unsigned char value, std::size_t size,
                                 CUstream stream);
using cuMemcpyDtoDAsync_v2 = CUresult(CUdeviceptr to, CUdeviceptr from, std::size_t size,
                                      CUstream stream);
using cuMemcpyDtoHAsync_v2 = CUresult(void* to, CUdeviceptr from, std::size_t size,
                                      CUstream stream);
using cuMemcpyHtoDAsync_v2 = CUresult(CUdeviceptr to, const void* from, std::size_t size,
                                      CUstream stream);

using cuStreamCreate = CUresult(CUstream* stream, unsigned flags);
using cuStreamDestroy_v2 = CUresult(CUstream stream);
using cuStreamQuery = CUresult(CUstream stream);
using cuStreamGetCtx = CUresult(CUstream stream, CUcontext* context);
using cuStreamWaitEvent = CUresult(CUstream stream, CUevent event, unsigned flags);
using cuEventCreate = CUresult(CUevent* event, unsigned flags);
using cuEventDestroy_v2 = CUresult(CUevent event);
using cuEventRecord = CUresult(CUevent event, CUstream stream);
using cuEventQuery = CUresult(CUevent event);

using cuThreadExchangeStreamCaptureMode = CUresult(CUstreamCaptureMode* mode);
using cuStreamIsCapturing = CUresult(CUstream stream, CUstreamCaptureStatus* status);
using cuStreamGetCaptureInfo_v2 = CUresult(CUstream stream, CUstreamCaptureStatus* status,
                                           std::uint64_t* id, CUgraph* graph,
                                           const CUgraphNode** dependencies,
                                           std::size_t* dependency_count);
using cuUserObjectCreate = CUresult(CUuserObject* object, void* pointer, CUhostFn destructor,
                                    unsigned references, unsigned flags);
using cuUserObjectRelease = CUresult(CUuserObject object, unsigned references);
using cuGraphRetainUserObject = CUresult(CUgraph graph, CUuserObject object, unsigned references,
                                         unsigned flags);

}  // namespace vtensor::cuda
