// Pages of an NVIDIA GPU: one cuMemCreate allocation a page, mapped with CUDA's virtual memory
// management.
//
// The VMM calls need no current context and are not ordered with any stream; memset, copy and
// synchronise run in the device's primary context, the one that PyTorch uses too.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <vector>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "driver/cuda_api.h"
#include "driver/driver.h"

namespace vtensor {
namespace {

constexpr std::size_t kDefaultPageSize = std::size_t{2} << 20;

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const CudaOptions& options) : cuda_(options.library) {}
  ~CudaDriver() override;

  void open(const CudaOptions& options);

  const DriverTraits& traits() const override { return traits_; }
  Address reserve(std::size_t pages) override;
  void free_range(Address range, std::size_t pages) override;
  Handle create(std::size_t n) override;
  void destroy(Handle first, std::size_t n) override;
  void map(Address at, std::span<const Handle> handles, Access access) override;
  void unmap(Address at, std::span<const Handle> handles, Access access) override;
  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access) override;
  void zero(Address at, std::size_t bytes) override;
  void copy_page(Handle to, Address from) override;
  void populate(Address, std::size_t) override {}                 // memory comes with cuMemCreate
  void find_parted(Address, std::span<std::uint8_t>) override {}  // no fault parts pages here
  void quiesce() override;

 private:
  template <class Function, class... Args>
  CUresult call(const CudaEntry<Function>& entry, Args... args) {
    if (meter_.enter(entry.call)) {
      return entry.call == Call::cuMemCreate ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
    }
    return entry.function(args...);
  }
  template <class Function, class... Args>
  void require(const char* operation, const CudaEntry<Function>& entry, Args... args) {
    const CUresult code = call(entry, args...);
    if (code != CUDA_SUCCESS) throw refusal(operation, entry.call, code);
  }
  DriverError refusal(const char* operation, Call call, CUresult code) const;

  template <class Work>
  void in_context(const char* operation, Work work);
  std::size_t granularity(CUmemAllocationGranularity_flags kind);
  int attribute(CUdevice_attribute which);
  CUresult set_access(Address at, std::size_t n, Access access);
  void map_or_undo(const char* operation, Address at, std::span<const Handle> handles,
                   Access access);
  void finish(const char* operation);
  void finish_earlier_work(const char* operation);
  void release_scratch();

  const CudaApi cuda_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmemAllocationProp properties_{};
  DriverTraits traits_{};
  // Some devices know no read-only mappings: what is guarded is then left writable, and only the
  // in-place operations of VTensor part shared pages (I6: "where the device allows it").
  std::atomic<bool> read_only_refused_{false};

  std::mutex records_;                     // guards the two below
  std::map<Address, std::size_t> ranges_;  // pages by address
  std::set<Handle> handles_;

  std::mutex finishing_;  // guards changes of the flag
  std::atomic<bool> unfinished_{false};

  std::mutex copying_;   // guards the two below
  Address scratch_ = 0;  // a page of addresses at which copies are made
  bool scratch_mapped_ = false;
};

// What a forked child gives back is the parent's, and libcuda must not be called there (I13).
bool is_forked_child() { return in_forked_child.load(std::memory_order_relaxed); }

std::vector<std::size_t> all_of(std::size_t n) {
  std::vector<std::size_t> indices(n);
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

DriverError CudaDriver::refusal(const char* operation, Call call, CUresult code) const {
  const std::string name = cuda_.name_of(code);
  const std::string message = std::string("[driver.") + operation + "] " +
                              std::string(name_of(call)) +
                              " on cuda:" + std::to_string(traits_.device.index) + " answered " +
                              name + " (" + std::to_string(static_cast<int>(code)) + ")";
  return DriverError(std::string(name_of(call)), static_cast<long>(code), name,
                     message +
                         ": what the operation had done is undone; where other CUDA calls fail "
                         "too, the device is in error and the process must be restarted");
}

void CudaDriver::open(const CudaOptions& options) {
  traits_.device = {options.memory_is_host_memory ? 1 : 2, options.device};
  const CUresult started = call(cuda_.cuInit, 0u);
  if (started != CUDA_SUCCESS) {
    throw DriverError("cuInit", started, cuda_.name_of(started),
                      "[Pool] a CUDA device was asked for, cuInit answered " +
                          cuda_.name_of(started) + " (" + std::to_string(started) +
                          "): check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device=\"cpu\"");
  }
  int count = 0;
  require("open", cuda_.cuDeviceGetCount, &count);
  if (options.device < 0 || options.device >= count) {
    throw InvalidArgument("[Pool] device cuda:" + std::to_string(options.device) +
                          " was asked for, there are " + std::to_string(count) +
                          " CUDA devices: name one of them, or check CUDA_VISIBLE_DEVICES");
  }
  require("open", cuda_.cuDeviceGet, &device_, options.device);
  if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    throw DriverError("cuDeviceGetAttribute", CUDA_ERROR_NOT_SUPPORTED,
                      cuda_.name_of(CUDA_ERROR_NOT_SUPPORTED),
                      "[Pool] cuda:" + std::to_string(options.device) +
                          " has no virtual memory management (some vGPU profiles turn it off): use "
                          "another device, or device=\"cpu\"");
  }
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties_.location.id = device_;
  properties_.allocFlags.gpuDirectRDMACapable =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;

  traits_.name = "cuda";
  traits_.granularity = granularity(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  const std::size_t recommended = granularity(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  traits_.page_size = options.page_size != 0
                          ? options.page_size
                          : ceil_div(kDefaultPageSize, recommended) * recommended;
  if (traits_.page_size % traits_.granularity != 0) {
    throw InvalidArgument("[Pool] page_size=" + std::to_string(traits_.page_size) +
                          " was asked for, cuda:" + std::to_string(options.device) +
                          " maps multiples of " + std::to_string(traits_.granularity) +
                          " bytes: ask for one of these");
  }

  // Two steps: context_ is what the destructor gives back.
  CUcontext context = nullptr;
  require("open", cuda_.cuDevicePrimaryCtxRetain, &context, device_);
  context_ = context;
  std::size_t free = 0, total = 0;
  in_context("open", [&] { require("open", cuda_.cuMemGetInfo, &free, &total); });
  // A tenth is left to what cannot wait for us to give memory back: modules that are loaded lazily,
  // workspaces of libraries, torch's own cache.
  traits_.available = free / 10 * 9;
}

CudaDriver::~CudaDriver() {
  if (is_forked_child()) return;
  meter_.disarm();
  try {
    if (context_ != nullptr) quiesce();
  } catch (const Error&) {
    // The process is ending or the device is in error: give back what it still takes.
  }
  // Only the scratch page and ranges with quarantined pages are left. What is mapped in those is
  // not known, so every page is tried.
  for (const auto& [range, pages] : ranges_) {
    for (std::size_t i = 0; i < pages; ++i) {
      if (range != scratch_ || scratch_mapped_) {
        call(cuda_.cuMemUnmap, range + i * traits_.page_size, traits_.page_size);
      }
    }
    call(cuda_.cuMemAddressFree, range, pages * traits_.page_size);
  }
  for (const Handle handle : handles_) call(cuda_.cuMemRelease, handle);
  if (context_ != nullptr) call(cuda_.cuDevicePrimaryCtxRelease, device_);
}

int CudaDriver::attribute(CUdevice_attribute which) {
  int value = 0;
  require("open", cuda_.cuDeviceGetAttribute, &value, which, device_);
  return value;
}

std::size_t CudaDriver::granularity(CUmemAllocationGranularity_flags kind) {
  std::size_t bytes = 0;
  require("open", cuda_.cuMemGetAllocationGranularity, &bytes, &properties_, kind);
  return bytes;
}

// Runs `work` with the primary context current, and leaves the thread with the context it had.
template <class Work>
void CudaDriver::in_context(const char* operation, Work work) {
  CUcontext before = nullptr;
  require(operation, cuda_.cuCtxGetCurrent, &before);
  if (before == context_) return work();
  require(operation, cuda_.cuCtxSetCurrent, context_);
  try {
    work();
  } catch (...) {
    call(cuda_.cuCtxSetCurrent, before);
    throw;
  }
  const CUresult code = call(cuda_.cuCtxSetCurrent, before);
  if (code == CUDA_SUCCESS) return;
  call(cuda_.cuCtxSetCurrent, before);
  throw refusal(operation, Call::cuCtxSetCurrent, code);
}

Address CudaDriver::reserve(std::size_t pages) {
  refuse_in_forked_child("driver.reserve");
  const auto bytes = checked_multiply(pages, traits_.page_size);
  if (!bytes || *bytes == 0) {
    throw InvalidArgument(
        "[driver.reserve] " + std::to_string(pages) + " pages of " +
        std::to_string(traits_.page_size) +
        " bytes were asked for, which no address range can hold: lower capacity=");
  }
  // Alignments are powers of two; where the page size is none, its largest such factor.
  const std::size_t alignment = traits_.page_size & (~traits_.page_size + 1);
  CUdeviceptr range = 0;
  require("reserve", cuda_.cuMemAddressReserve, &range, *bytes, alignment, 0, 0);
  std::lock_guard lock(records_);
  ranges_.emplace(range, pages);
  return range;
}

void CudaDriver::free_range(Address range, std::size_t pages) {
  if (is_forked_child()) return;
  require("free_range", cuda_.cuMemAddressFree, range, pages * traits_.page_size);
  std::lock_guard lock(records_);
  ranges_.erase(range);
}

Handle CudaDriver::create(std::size_t n) {
  refuse_in_forked_child("driver.create");
  if (n != 1) {
    throw InvalidArgument(
        "[driver.create] " + std::to_string(n) +
        " adjacent handles were asked for, CUDA has none: create them one by one");
  }
  CUmemGenericAllocationHandle handle = 0;
  const CUresult code = call(cuda_.cuMemCreate, &handle, traits_.page_size, &properties_, 0);
  if (code == CUDA_ERROR_OUT_OF_MEMORY) {
    throw DeviceOutOfMemory(
        "cuMemCreate", code, cuda_.name_of(code),
        "[driver.create] a page of " + std::to_string(traits_.page_size) +
            " bytes was asked for, cuda:" + std::to_string(traits_.device.index) +
            " has no memory left: free tensors, call torch.cuda.empty_cache(), or lower budget=");
  }
  if (code != CUDA_SUCCESS) throw refusal("create", Call::cuMemCreate, code);
  std::lock_guard lock(records_);
  handles_.insert(handle);
  return handle;
}

void CudaDriver::destroy(Handle first, std::size_t n) {
  if (is_forked_child()) return;
  if (n != 1) {
    throw InvalidArgument("[driver.destroy] " + std::to_string(n) +
                          " adjacent handles were named, CUDA has none: destroy them one by one");
  }
  require("destroy", cuda_.cuMemRelease, first);
  std::lock_guard lock(records_);
  handles_.erase(first);
}

// One call for a whole run: it costs more than all the maps before it.
CUresult CudaDriver::set_access(Address at, std::size_t n, Access access) {
  const auto set = [&](CUmemAccess_flags flags) {
    CUmemAccessDesc wanted{};
    wanted.location = properties_.location;
    wanted.flags = flags;
    return call(cuda_.cuMemSetAccess, at, n * traits_.page_size, &wanted, std::size_t{1});
  };
  if (access == Access::guarded && !read_only_refused_.load(std::memory_order_relaxed)) {
    const CUresult code = set(CU_MEM_ACCESS_FLAGS_PROT_READ);
    if (code != CUDA_ERROR_NOT_SUPPORTED && code != CUDA_ERROR_INVALID_VALUE) return code;
    // Either read-only is not known here, or the run itself is wrong: then this is refused as well.
    const CUresult writable = set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (writable == CUDA_SUCCESS) read_only_refused_.store(true, std::memory_order_relaxed);
    return writable;
  }
  return set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

void CudaDriver::map_or_undo(const char* operation, Address at, std::span<const Handle> handles,
                             Access access) {
  const std::size_t size = traits_.page_size;
  std::size_t mapped = 0;
  CUresult code = CUDA_SUCCESS;
  Call refused = Call::cuMemMap;
  for (; mapped < handles.size(); ++mapped) {
    code = call(cuda_.cuMemMap, at + mapped * size, size, 0, handles[mapped], 0);
    if (code != CUDA_SUCCESS) break;
  }
  if (code == CUDA_SUCCESS) {
    refused = Call::cuMemSetAccess;
    code = set_access(at, handles.size(), access);
  }
  if (code == CUDA_SUCCESS) return;
  const DriverError cause = refusal(operation, refused, code);
  if (mapped != 0 && call(cuda_.cuMemUnmap, at, mapped * size) != CUDA_SUCCESS) {
    throw UndoFailed(cause, all_of(mapped));
  }
  throw cause;
}

void CudaDriver::map(Address at, std::span<const Handle> handles, Access access) {
  refuse_in_forked_child("driver.map");
  if (handles.empty()) return;
  finish_earlier_work("map");
  map_or_undo("map", at, handles, access);
}

void CudaDriver::unmap(Address at, std::span<const Handle> handles, Access) {
  if (is_forked_child()) return;
  if (handles.empty()) return;
  finish_earlier_work("unmap");
  require("unmap", cuda_.cuMemUnmap, at, handles.size() * traits_.page_size);
}

void CudaDriver::remap(Address at, std::span<const Handle> from, Access from_access,
                       std::span<const Handle> to, Access to_access) {
  refuse_in_forked_child("driver.remap");
  if (std::ranges::equal(from, to)) {
    if (from_access == to_access || from.empty()) return;
    const CUresult code = set_access(at, to.size(), to_access);
    if (code != CUDA_SUCCESS) throw refusal("remap", Call::cuMemSetAccess, code);
    return;
  }
  finish_earlier_work("remap");
  require("remap", cuda_.cuMemUnmap, at, from.size() * traits_.page_size);
  try {
    map_or_undo("remap", at, to, to_access);
  } catch (const UndoFailed& cause) {
    throw UndoFailed(cause, all_of(from.size()));  // what is not stuck is mapped no more
  } catch (const DriverError& cause) {
    try {
      map_or_undo("remap", at, from, from_access);
    } catch (const DriverError&) {
      throw UndoFailed(cause, all_of(from.size()));
    }
    throw;
  }
}

// Waits for memory work that was just started. Where that is refused the work may still run.
void CudaDriver::finish(const char* operation) {
  const CUresult code = call(cuda_.cuCtxSynchronize);
  if (code == CUDA_SUCCESS) return;
  std::lock_guard lock(finishing_);
  unfinished_.store(true, std::memory_order_release);
  throw refusal(operation, Call::cuCtxSynchronize, code);
}

// Goes before every change of a mapping: work of ours that could not be waited for would fault on
// it.
void CudaDriver::finish_earlier_work(const char* operation) {
  if (!unfinished_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(finishing_);
  if (!unfinished_.load(std::memory_order_relaxed)) return;
  in_context(operation, [&] { require(operation, cuda_.cuCtxSynchronize); });
  unfinished_.store(false, std::memory_order_release);
}

void CudaDriver::zero(Address at, std::size_t bytes) {
  refuse_in_forked_child("driver.zero");
  if (bytes == 0) return;
  in_context("zero", [&] {
    require("zero", cuda_.cuMemsetD8, at, 0, bytes);
    finish("zero");
  });
}

void CudaDriver::copy_page(Handle to, Address from) {
  refuse_in_forked_child("driver.copy_page");
  std::lock_guard lock(copying_);
  finish_earlier_work("copy_page");
  if (scratch_ == 0) scratch_ = reserve(1);
  release_scratch();
  in_context("copy_page", [&] {
    // The copy runs in the default stream, which does not wait for every stream that may write the
    // source.
    require("copy_page", cuda_.cuCtxSynchronize);
    try {
      map_or_undo("copy_page", scratch_, {&to, 1}, Access::writable);
    } catch (const UndoFailed& failure) {
      scratch_mapped_ = true;
      throw DriverError(failure);  // only in our own range: nothing of the caller's is stuck
    }
    scratch_mapped_ = true;
    require("copy_page", cuda_.cuMemcpyDtoD, scratch_, from, traits_.page_size);
    finish("copy_page");
  });
  try {
    release_scratch();
  } catch (const DriverError&) {
    // The copy is whole; the next one tries again.
  }
}

void CudaDriver::release_scratch() {
  if (!scratch_mapped_) return;
  require("copy_page", cuda_.cuMemUnmap, scratch_, traits_.page_size);
  scratch_mapped_ = false;
}

void CudaDriver::quiesce() {
  refuse_in_forked_child("driver.quiesce");
  in_context("quiesce", [&] { require("quiesce", cuda_.cuCtxSynchronize); });
}

}  // namespace

std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options) {
  refuse_in_forked_child("Pool");
  watch_forks();
  auto driver = std::make_unique<CudaDriver>(options);
  driver->open(options);
  return driver;
}

}  // namespace vtensor
