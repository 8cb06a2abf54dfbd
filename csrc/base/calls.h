// Every driver call: its name, counts by kind of thread, and injected failures.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace vtensor {

// X(name of a system call)
#define VTENSOR_SYSTEM_CALLS(X)                                                \
  X(memfd_create)                                                              \
  X(mmap)      /* map and remap */                                             \
  X(munmap)    /* unmap (an mmap over the page), and the freeing of a range */ \
  X(fallocate) /* FALLOC_FL_PUNCH_HOLE */                                      \
  X(madvise)   /* populate */                                                  \
  X(pwrite)    /* page copies */                                               \
  X(pagemap)   /* search for private copies */                                 \
  X(open)      /* from here on: for shared budgets and readers only */         \
  X(fcntl)     /* F_OFD_SETLK */                                               \
  X(eventfd)                                                                   \
  X(socketpair)                                                                \
  X(sendmsg)

// X(documented name, symbol that libcuda exports)
#define VTENSOR_CUDA_CALLS(X)                                             \
  X(cuInit, cuInit)                                                       \
  X(cuDeviceGetCount, cuDeviceGetCount)                                   \
  X(cuDeviceGet, cuDeviceGet)                                             \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute)                           \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2)                                  \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                   \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)              \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)         \
  X(cuMemGetInfo, cuMemGetInfo_v2)                                        \
  X(cuMemAddressReserve, cuMemAddressReserve)                             \
  X(cuMemAddressFree, cuMemAddressFree)                                   \
  X(cuMemCreate, cuMemCreate)                                             \
  X(cuMemRelease, cuMemRelease)                                           \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle)           \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)       \
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

#define VTENSOR_ENUMERATOR(name, ...) name,
#define VTENSOR_NAME(name, ...) #name,

enum class Call : std::uint8_t {
  VTENSOR_SYSTEM_CALLS(VTENSOR_ENUMERATOR) VTENSOR_CUDA_CALLS(VTENSOR_ENUMERATOR) count_,
};

constexpr std::size_t kCallCount = static_cast<std::size_t>(Call::count_);

inline constexpr std::array<std::string_view, kCallCount> kCallNames = {
    VTENSOR_SYSTEM_CALLS(VTENSOR_NAME) VTENSOR_CUDA_CALLS(VTENSOR_NAME)};

constexpr std::string_view name_of(Call call) { return kCallNames[static_cast<std::size_t>(call)]; }

// The kinds of threads by which driver calls are counted.
enum class ThreadRole : std::uint8_t { caller, mapper };

inline thread_local ThreadRole thread_role = ThreadRole::caller;

// One per driver. `enter` is called before every driver call.
class CallMeter {
 public:
  // Counts the call. True if the call is to fail: the driver then does not make it, and acts as if
  // the system had refused it.
  bool enter(Call call) {
    counts_[static_cast<std::size_t>(thread_role)][static_cast<std::size_t>(call)].fetch_add(
        1, std::memory_order_relaxed);
    const std::uint64_t refuse = refuse_.load(std::memory_order_acquire);
    if (refuse == 0 || passed_.fetch_add(1, std::memory_order_relaxed) >= refuse) return false;
    refused_[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  std::uint64_t count(ThreadRole role, Call call) const {
    return counts_[static_cast<std::size_t>(role)][static_cast<std::size_t>(call)].load(
        std::memory_order_relaxed);
  }

  // Calls made to fail since `fail_after`.
  std::uint64_t refused(Call call) const {
    return refused_[static_cast<std::size_t>(call)].load(std::memory_order_relaxed);
  }

  // Lets `skip` more calls through, refuses the next `refuse`, and then lets all through.
  void fail_after(std::uint64_t skip, std::uint64_t refuse = 1) {
    disarm();
    for (auto& refused : refused_) refused.store(0, std::memory_order_relaxed);
    passed_.store(0 - skip, std::memory_order_relaxed);
    refuse_.store(refuse, std::memory_order_release);
  }
  void disarm() { refuse_.store(0, std::memory_order_relaxed); }

 private:
  std::array<std::array<std::atomic<std::uint64_t>, kCallCount>, 2> counts_{};
  std::array<std::atomic<std::uint64_t>, kCallCount> refused_{};
  // Calls since `fail_after`, less the skipped ones: below 0, so past `refuse_`, while skipping.
  std::atomic<std::uint64_t> passed_{0};
  std::atomic<std::uint64_t> refuse_{0};  // calls to refuse after the skipped ones; 0: disarmed
};

}  // namespace vtensor
