// Counting of driver calls by name and by thread, and failure injection at the n-th of them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

namespace vtensor {

enum class Call : std::uint8_t {
  // host
  memfd_create,
  mmap,       // map and remap
  munmap,     // unmap (an mmap of the empty reservation over the page) and the freeing of a range
  fallocate,  // FALLOC_FL_PUNCH_HOLE
  madvise,    // populate
  pwrite,     // page copies
  pagemap,    // search for parted pages
  // CUDA
  cuInit,
  cuDeviceGetCount,
  cuDeviceGet,
  cuDeviceGetAttribute,
  cuDevicePrimaryCtxRetain,
  cuDevicePrimaryCtxRelease,
  cuMemGetAllocationGranularity,
  cuMemGetInfo,
  cuMemAddressReserve,
  cuMemAddressFree,
  cuMemCreate,
  cuMemRelease,
  cuMemMap,
  cuMemUnmap,
  cuMemSetAccess,
  cuPointerGetAttribute,
  cuMemsetD8Async,
  cuMemcpyDtoDAsync,
  cuMemcpyDtoHAsync,
  cuMemcpyHtoDAsync,
  cuCtxGetCurrent,
  cuCtxSetCurrent,
  cuCtxGetDevice,
  cuCtxSynchronize,
  cuThreadExchangeStreamCaptureMode,
  cuStreamCreate,
  cuStreamDestroy,
  cuStreamQuery,
  cuStreamGetCtx,
  cuStreamWaitEvent,
  cuStreamIsCapturing,
  cuStreamGetCaptureInfo,
  cuEventCreate,
  cuEventDestroy,
  cuEventRecord,
  cuEventQuery,
  cuUserObjectCreate,
  cuUserObjectRelease,
  cuGraphRetainUserObject,
  count_,
};

constexpr std::size_t kCallCount = static_cast<std::size_t>(Call::count_);

inline constexpr std::array<std::string_view, kCallCount> kCallNames = {
    "memfd_create",
    "mmap",
    "munmap",
    "fallocate",
    "madvise",
    "pwrite",
    "pagemap",
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuPointerGetAttribute",
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetDevice",
    "cuCtxSynchronize",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamQuery",
    "cuStreamGetCtx",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
};

constexpr std::string_view name_of(Call call) { return kCallNames[static_cast<std::size_t>(call)]; }

// Which side of the library a thread works for; stats() reports driver calls by it.
enum class ThreadRole : std::uint8_t { caller, mapper };

inline thread_local ThreadRole thread_role = ThreadRole::caller;

// One per driver. `enter` is called before every driver call.
class CallMeter {
 public:
  // Counts the call. True where an injected failure replaces it: the driver must then not make the
  // call and must behave as if it had been refused.
  bool enter(Call call) {
    counts_[static_cast<std::size_t>(thread_role)][static_cast<std::size_t>(call)].fetch_add(
        1, std::memory_order_relaxed);
    if (!armed_.load(std::memory_order_relaxed)) return false;
    return count_down();
  }

  std::uint64_t count(ThreadRole role, Call call) const {
    return counts_[static_cast<std::size_t>(role)][static_cast<std::size_t>(call)].load(
        std::memory_order_relaxed);
  }

  // Lets `skip` more calls through, refuses the next `refuse`, then lets all through again.
  void fail_after(std::uint64_t skip, std::uint64_t refuse = 1) {
    passed_.store(0, std::memory_order_relaxed);
    skip_.store(skip, std::memory_order_relaxed);
    refuse_.store(refuse, std::memory_order_relaxed);
    armed_.store(true, std::memory_order_release);
  }
  void disarm() { armed_.store(false, std::memory_order_relaxed); }

 private:
  bool count_down() {
    const std::uint64_t n = passed_.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t skip = skip_.load(std::memory_order_relaxed);
    const std::uint64_t refuse = refuse_.load(std::memory_order_relaxed);
    return n >= skip && n - skip < refuse;
  }

  std::array<std::array<std::atomic<std::uint64_t>, kCallCount>, 2> counts_{};
  std::atomic<bool> armed_{false};
  std::atomic<std::uint64_t> passed_{0}, skip_{0}, refuse_{0};
};

}  // namespace vtensor
