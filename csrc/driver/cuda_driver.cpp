#include "driver/cuda_driver.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/make_node.h"
#include "base/process.h"

namespace vtensor {
namespace {

constexpr std::size_t kDefaultPageSize = std::size_t{2} << 20;

CUmemAllocationHandleType handle_type(ExportKind kind) {
  return kind == ExportKind::fabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                    : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

}  // namespace

void CudaDriver::open(const CudaOptions& options) {
  const CUresult started = cuda_.call(cuda_.cuInit, 0u);
  if (started == CUDA_ERROR_STUB_LIBRARY) {
    throw DriverError("cuInit", started, "CUDA_ERROR_STUB_LIBRARY",
                      "[Pool] a CUDA device was asked for, ", options.library,
                      " is the stub that the CUDA toolkit has for linking: take the toolkit's "
                      "stubs folder off LD_LIBRARY_PATH, so that the NVIDIA driver's library "
                      "is found, or use the CPU");
  }
  if (started != CUDA_SUCCESS) {
    throw DriverError("cuInit", started, cuda_.name_of(started),
                      "[Pool] a CUDA device was asked for, cuInit answered ",
                      cuda_.name_of(started), " (", started,
                      "): check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU");
  }
  const RelaxedCapture relaxed(cuda_, "open");
  find_device(options);
  if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    throw DriverError("cuDeviceGetAttribute", CUDA_ERROR_NOT_SUPPORTED,
                      cuda_.name_of(CUDA_ERROR_NOT_SUPPORTED), "[Pool] cuda:", cuda_.device,
                      " has no virtual memory management (some vGPU profiles turn it off): use "
                      "another device, or use the CPU");
  }
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = cuda_.location;
  if (options.rdma) {
    if (attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) == 0)
      throw InvalidArgument("[Pool] rdma=True was asked for, cuda:", cuda_.device,
                            " makes no memory for GPUDirect RDMA: leave it out");
    properties_.allocFlags.gpuDirectRDMACapable = 1;
    // Driver 580 refuses to map memory for RDMA again (CUDA_ERROR_UNKNOWN) once a mapping of it
    // became the only writable one after its first mapping went.
    leaves_writable_.store(true, std::memory_order_relaxed);
  }

  traits_.name = "cuda";
  traits_.asynchronous = true;
  traits_.granularity = granularity(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  const std::size_t recommended = granularity(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  traits_.page_size = options.page_size != 0
                          ? options.page_size
                          : ceil_div(kDefaultPageSize, recommended) * recommended;
  if (traits_.page_size % traits_.granularity != 0) {
    throw InvalidArgument("[Pool] a page size of ", traits_.page_size,
                          " bytes was asked for, cuda:", cuda_.device, " maps multiples of ",
                          traits_.granularity, " bytes: ask for one of these");
  }

  cuda_.timeout = options.timeout;
  // In two steps: the destructor releases what cuda_.context holds.
  CUcontext context = nullptr;
  cuda_.require("open", cuda_.cuDevicePrimaryCtxRetain, &context, cuda_.location.id);
  cuda_.context = context;
  // All but a tenth, which is for others that cannot wait for our memory: modules loaded lazily,
  // workspaces of libraries, torch's own cache.
  traits_.budget_part = 9;
  open_streams();
  if (options.uuid != DeviceUuid{}) return;  // a reader makes no pages of its own
  if (options.shareable) choose_exports();
}

void CudaDriver::find_device(const CudaOptions& options) {
  int count = 0;
  cuda_.require("open", cuda_.cuDeviceGetCount, &count);
  const bool by_uuid = options.uuid != DeviceUuid{};
  cuda_.device = by_uuid ? 0 : options.device;
  cuda_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  for (; cuda_.device >= 0 && cuda_.device < count; ++cuda_.device) {
    cuda_.require("open", cuda_.cuDeviceGet, &cuda_.location.id, cuda_.device);
    if (by_uuid || options.shareable) {
      CUuuid uuid{};
      cuda_.require("open", cuda_.cuDeviceGetUuid, &uuid, cuda_.location.id);
      std::copy(std::begin(uuid.bytes), std::end(uuid.bytes), traits_.uuid.begin());
    }
    traits_.device = {options.memory_is_host_memory ? 1 : 2, cuda_.device};
    if (!by_uuid || traits_.uuid == options.uuid) return;
  }
  if (by_uuid) {
    throw InvalidArgument("[reader] the writer's GPU is none of the ", count,
                          " CUDA devices of this process: check CUDA_VISIBLE_DEVICES");
  }
  throw InvalidArgument("[Pool] device cuda:", options.device, " was asked for, there are ", count,
                        " CUDA devices: name one of them, or check CUDA_VISIBLE_DEVICES");
}

// Tries fabric handles first: they take no descriptors. Without an IMEX channel a device that has
// the attribute may still refuse to make, export or import them.
void CudaDriver::choose_exports() {
  for (const ExportKind kind : {ExportKind::fabric, ExportKind::descriptors}) {
    if (!attribute(kind == ExportKind::fabric
                       ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
                       : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
      continue;
    }
    properties_.requestedHandleTypes = handle_type(kind);
    traits_.exports = kind;
    if (probe_exports()) return;
    traits_.exports = ExportKind::none;
  }
  throw InvalidArgument("[Pool] shareable=True was asked for, cuda:", cuda_.device,
                        " makes no memory that other processes can read: use another device, or "
                        "leave it out");
}

// Makes, exports and imports a page. False if the device refuses the page's properties.
bool CudaDriver::probe_exports() {
  Handle page = 0;
  bool fits = false;
  try {
    fits = traits_.page_size % granularity(CU_MEM_ALLOC_GRANULARITY_MINIMUM) == 0;
    if (fits) {
      page = create(1);
      destroy(import_page(export_page(page), traits_.exports), 1);
    }
  } catch (const DeviceOutOfMemory&) {
    // The device is full: its properties may be right.
  } catch (const DriverError& refusal) {
    constexpr long kOfProperties[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED,
                                      CUDA_ERROR_NOT_SUPPORTED};
    if (std::ranges::find(kOfProperties, refusal.code) == std::end(kOfProperties)) throw;
    fits = false;
  }
  if (page != 0) destroy(page, 1);
  return fits;
}

CudaDriver::~CudaDriver() {
  if (in_forked_child() || cuda_.context == nullptr) return;
  meter_.disarm();
  // Any thread may end a driver: without a current context, or while a stream is captured.
  std::optional<RelaxedCapture> relaxed;
  std::optional<PrimaryContext> context;
  try {
    relaxed.emplace(cuda_, "close");
    context.emplace(cuda_, "close");
  } catch (const Error&) {
    // The process ends, or the device is in error: gives back as much as it accepts.
  }
  const bool over = close();
  context.reset();
  if (over) cuda_.call(cuda_.cuDevicePrimaryCtxRelease, cuda_.location.id);
}

// False if work may still run: it needs the context and its mappings.
bool CudaDriver::close() {
  bool over = close_copies();
  // The core has waited for the fences of all that it unmapped. Ranges that are left are a broken
  // pool's: whether work still uses them is unknown.
  try {
    if (over && !ranges_.empty()) cuda_.synchronize("close");
  } catch (const DriverError&) {
    // The device is in error: gives back as much as it accepts.
  } catch (const std::exception&) {  // timed out, or no thread to wait in: work may still run
    over = false;
  }
  if (over) close_mappings();
  for (const Handle handle : handles_) cuda_.call(cuda_.cuMemRelease, handle);
  close_streams();
  return over;
}

int CudaDriver::attribute(CUdevice_attribute which) {
  int value = 0;
  cuda_.require("open", cuda_.cuDeviceGetAttribute, &value, which, cuda_.location.id);
  return value;
}

std::size_t CudaDriver::granularity(CUmemAllocationGranularity_flags kind) {
  std::size_t bytes = 0;
  cuda_.require("open", cuda_.cuMemGetAllocationGranularity, &bytes, &properties_, kind);
  return bytes;
}

// `record` was allocated before the call that made the handle.
Handle CudaDriver::enter(std::set<Handle>::node_type record, Handle handle) {
  record.value() = handle;
  const std::lock_guard lock(handles_mutex_);
  handles_.insert(std::move(record));
  return handle;
}

Handle CudaDriver::create(std::size_t) {
  const RelaxedCapture relaxed(cuda_, "create");
  CUmemGenericAllocationHandle handle = 0;
  auto record = make_node<std::set<Handle>>();
  const CUresult code = cuda_.call_at(cuda_.cuMemCreate, 0, traits_.page_size, &handle,
                                      traits_.page_size, &properties_, 0);
  if (code == CUDA_ERROR_OUT_OF_MEMORY) {
    throw DeviceOutOfMemory(
        "cuMemCreate", code, cuda_.name_of(code), "[driver.create] a page of ", traits_.page_size,
        " bytes was asked for, cuda:", cuda_.device,
        " has no memory left: free tensors, call torch.cuda.empty_cache(), or lower the pool's "
        "budget");
  }
  cuda_.check("create", Call::cuMemCreate, code);
  return enter(std::move(record), handle);
}

void CudaDriver::destroy(Handle handle, std::size_t) {
  if (in_forked_child()) return;
  const RelaxedCapture relaxed(cuda_, "destroy");
  std::set<Handle>::node_type record;
  {
    const std::lock_guard lock(handles_mutex_);
    record = handles_.extract(handle);  // from here on the handle is not exported
  }
  const CUresult code = cuda_.call_at(cuda_.cuMemRelease, 0, traits_.page_size, handle);
  if (code == CUDA_SUCCESS) return;
  const std::lock_guard lock(handles_mutex_);
  handles_.insert(std::move(record));
  cuda_.check("destroy", Call::cuMemRelease, code);
}

ExportedPage CudaDriver::export_page(Handle handle) {
  const RelaxedCapture relaxed(cuda_, "export_page");
  const std::lock_guard lock(handles_mutex_);
  if (!handles_.contains(handle))
    throw Error("[driver.export_page] page ", handle, " was asked for, which is no page any more");
  ExportedPage page;
  int descriptor = -1;
  void* const name =
      traits_.exports == ExportKind::fabric ? static_cast<void*>(page.fabric.data()) : &descriptor;
  cuda_.require_at("export_page", cuda_.cuMemExportToShareableHandle, 0, traits_.page_size, name,
                   handle, properties_.requestedHandleTypes, 0);
  page.descriptor = Descriptor(descriptor);
  return page;
}

Handle CudaDriver::import_page(const ExportedPage& page, ExportKind kind) {
  const RelaxedCapture relaxed(cuda_, "import_page");
  auto fabric = page.fabric;
  void* const name =
      kind == ExportKind::fabric
          ? static_cast<void*>(fabric.data())
          : reinterpret_cast<void*>(static_cast<std::intptr_t>(page.descriptor.get()));
  CUmemGenericAllocationHandle handle = 0;
  auto record = make_node<std::set<Handle>>();
  cuda_.require_at("import_page", cuda_.cuMemImportFromShareableHandle, 0, traits_.page_size,
                   &handle, name, handle_type(kind));
  return enter(std::move(record), handle);
}

std::size_t CudaDriver::free_memory() {
  const RelaxedCapture relaxed(cuda_, "free_memory");
  const PrimaryContext context(cuda_, "free_memory");
  std::size_t free = 0, total = 0;
  cuda_.require("free_memory", cuda_.cuMemGetInfo, &free, &total);
  return free;
}

std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options) {
  refuse_in_forked_child("Pool");
  watch_forks();
  auto driver = std::make_unique<CudaDriver>(options);
  driver->open(options);
  return driver;
}

}  // namespace vtensor
