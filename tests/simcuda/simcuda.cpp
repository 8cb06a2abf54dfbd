// A simulated libcuda: a TEST DOUBLE. It exports the entry points that vtensor's CUDA driver uses,
// with their real names and versions, over the host memory of sim_memory.h.
#include "simcuda.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "sim_control.h"
#include "sim_memory.h"

#define SIMCUDA_EXPORT extern "C" __attribute__((visibility("default")))

namespace simcuda {
namespace {

constexpr std::uint64_t kMaxDevices = 64;

struct Context {
  int retained = 0;
};

struct Sim {
  std::mutex mutex;
  pid_t process = getpid();
  Settings settings = Settings::from_environment();
  CallControl control;
  std::unique_ptr<SimMemory> memory = std::make_unique<SimMemory>();
  std::array<Context, kMaxDevices> contexts;
  bool initialised = false;
  CUresult broken =
      CUDA_SUCCESS;  // after an illegal access every call answers this, as on a device

  bool has_device(int device) const {
    return device >= 0 &&
           static_cast<std::size_t>(device) < std::min(settings.devices, kMaxDevices);
  }
  // Null where the handle names no context that is alive.
  Context* find(CUcontext context) {
    for (Context& candidate : contexts) {
      if (reinterpret_cast<CUcontext>(&candidate) == context && candidate.retained > 0) {
        return &candidate;
      }
    }
    return nullptr;
  }
  int device_of(CUcontext context) const {
    return static_cast<int>(reinterpret_cast<const Context*>(context) - contexts.data());
  }
  std::uint64_t free_memory(int device) const {
    const std::uint64_t used = memory->used(device);
    return used < settings.memory ? settings.memory - used : 0;
  }
  SimcudaLeaks leaks() const {
    SimcudaLeaks leaks{memory->handles(), memory->mappings(), memory->ranges(), 0};
    for (const Context& context : contexts) {
      leaks.contexts += static_cast<std::uint64_t>(context.retained);
    }
    return leaks;
  }
};

thread_local CUcontext current_context = nullptr;

std::atomic<Sim*> made{nullptr};

// Never destroyed: a process that ends may still call.
Sim& sim() {
  static Sim* const only = [] {
    made = new Sim;
    return made.load();
  }();
  if (only->process != getpid()) {
    std::fputs("simcuda (test double): called in a forked child, where CUDA must not be used\n",
               stderr);
    std::abort();
  }
  return *only;
}

struct Argument {
  const char* name;
  unsigned long long value;
};

// What a call gives back through its pointer, for the log.
using Result = std::optional<unsigned long long>;

std::string describe(const char* call, std::initializer_list<Argument> arguments, CUresult code,
                     const Result& result) {
  std::string line = std::string(call) + "(";
  for (const Argument& argument : arguments) {
    if (line.back() != '(') line += ", ";
    char text[96];
    const bool is_address = std::strstr(argument.name, "ptr") != nullptr;
    std::snprintf(text, sizeof text, is_address ? "%s=0x%llx" : "%s=%llu", argument.name,
                  argument.value);
    line += text;
  }
  line += ") = ";
  const char* name = error_name(code);
  line += name ? std::string(name) : std::to_string(static_cast<int>(code));
  if (code == CUDA_SUCCESS && result) line += " -> " + std::to_string(*result);
  return line;
}

enum class Needs { nothing, vmm, context };

// Every entry point: counts, delays, refuses where asked to or where the rules say so, or has
// `model` answer; then logs.
template <class Model>
CUresult answer(const char* call, Needs needs, std::initializer_list<Argument> arguments,
                Model model) {
  Sim& s = sim();
  std::unique_lock lock(s.mutex);
  CUresult code = s.control.enter(call);
  const Latency latency = s.control.latency(call);
  lock.unlock();
  latency.pass();
  lock.lock();

  Result result;
  if (code == CUDA_SUCCESS) code = s.broken;
  if (code == CUDA_SUCCESS && !s.initialised && std::strcmp(call, "cuInit") != 0) {
    code = CUDA_ERROR_NOT_INITIALIZED;
  }
  if (code == CUDA_SUCCESS && needs == Needs::vmm && !s.settings.vmm) {
    code = CUDA_ERROR_NOT_SUPPORTED;
  }
  if (code == CUDA_SUCCESS && needs == Needs::context) {
    if (current_context == nullptr) {
      code = CUDA_ERROR_INVALID_CONTEXT;
    } else if (s.find(current_context) == nullptr) {
      code = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
  }
  if (code == CUDA_SUCCESS) code = model(s, result);
  if (s.control.logging()) s.control.record(describe(call, arguments, code, result));
  return code;
}

bool is_aligned(const Sim& s, unsigned long long at, std::size_t size) {
  return at % s.settings.granularity == 0 && size % s.settings.granularity == 0;
}

bool is_device_memory(const Sim& s, const CUmemAllocationProp* properties) {
  return properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         s.has_device(properties->location.id);
}

__attribute__((destructor)) void report_leaks() {
  const char* wanted = std::getenv("SIMCUDA_REPORT_LEAKS");
  const Sim* s = made.load();
  if (wanted == nullptr || std::strcmp(wanted, "1") != 0) return;
  if (s == nullptr || s->process != getpid()) return;
  const SimcudaLeaks leaks = s->leaks();
  if (leaks.handles + leaks.mappings + leaks.ranges + leaks.contexts == 0) return;
  std::fprintf(stderr,
               "simcuda (test double): leaked %llu handles, %llu mappings, %llu ranges, %llu "
               "context references\n",
               static_cast<unsigned long long>(leaks.handles),
               static_cast<unsigned long long>(leaks.mappings),
               static_cast<unsigned long long>(leaks.ranges),
               static_cast<unsigned long long>(leaks.contexts));
}

}  // namespace
}  // namespace simcuda

using simcuda::answer;
using simcuda::Needs;
using simcuda::Result;
using simcuda::Sim;
using simcuda::sim;

// The driver API. cuda.h's macros give the definitions their exported versions, such as
// cuMemGetInfo_v2.

SIMCUDA_EXPORT CUresult CUDAAPI cuGetErrorName(CUresult code, const char** name) {
  *name = simcuda::error_name(code);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMCUDA_EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
  return answer("cuInit", Needs::nothing, {{"flags", flags}}, [&](Sim& s, Result&) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (s.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
    s.initialised = true;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return answer("cuDeviceGetCount", Needs::nothing, {}, [&](Sim& s, Result& result) {
    result = s.settings.devices;
    *count = static_cast<int>(s.settings.devices);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return answer("cuDeviceGet", Needs::nothing,
                {{"ordinal", static_cast<unsigned long long>(ordinal)}},
                [&](Sim& s, Result& result) {
                  if (!s.has_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
                  result = static_cast<unsigned long long>(ordinal);
                  *device = ordinal;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                                     CUdevice device) {
  return answer("cuDeviceGetAttribute", Needs::nothing,
                {{"attribute", static_cast<unsigned long long>(attribute)},
                 {"device", static_cast<unsigned long long>(device)}},
                [&](Sim& s, Result& result) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  switch (attribute) {
                    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
                      *value = s.settings.vmm != 0;
                      break;
                    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
                      *value = s.settings.rdma != 0;
                      break;
                    default:
                      return CUDA_ERROR_INVALID_VALUE;  // the only two that are simulated
                  }
                  result = static_cast<unsigned long long>(*value);
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return answer("cuDevicePrimaryCtxRetain", Needs::nothing,
                {{"device", static_cast<unsigned long long>(device)}}, [&](Sim& s, Result&) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  auto& primary = s.contexts[static_cast<std::size_t>(device)];
                  ++primary.retained;
                  *context = reinterpret_cast<CUcontext>(&primary);
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return answer("cuDevicePrimaryCtxRelease", Needs::nothing,
                {{"device", static_cast<unsigned long long>(device)}}, [&](Sim& s, Result&) {
                  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
                  auto& primary = s.contexts[static_cast<std::size_t>(device)];
                  if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
                  --primary.retained;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  return answer("cuCtxGetCurrent", Needs::nothing, {}, [&](Sim&, Result&) {
    *context = simcuda::current_context;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  return answer("cuCtxSetCurrent", Needs::nothing, {{"set", context != nullptr}},
                [&](Sim& s, Result&) {
                  if (context != nullptr && !s.find(context)) return CUDA_ERROR_INVALID_CONTEXT;
                  simcuda::current_context = context;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
  return answer("cuCtxSynchronize", Needs::context, {}, [&](Sim& s, Result&) {
    const CUresult code = s.memory->finish();
    s.broken = code;  // what an illegal access leaves behind
    return code;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  return answer("cuMemGetInfo", Needs::context, {}, [&](Sim& s, Result& result) {
    result = *free = s.free_memory(s.device_of(simcuda::current_context));
    *total = s.settings.memory;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_EXPORT CUresult CUDAAPI
cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                              CUmemAllocationGranularity_flags kind) {
  return answer("cuMemGetAllocationGranularity", Needs::vmm,
                {{"kind", static_cast<unsigned long long>(kind)}}, [&](Sim& s, Result& result) {
                  if (!is_device_memory(s, properties)) return CUDA_ERROR_INVALID_VALUE;
                  result = *granularity = s.settings.granularity;
                  return CUDA_SUCCESS;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment,
                                                    CUdeviceptr hint, unsigned long long flags) {
  return answer("cuMemAddressReserve", Needs::vmm,
                {{"size", size}, {"alignment", alignment}, {"hint_ptr", hint}, {"flags", flags}},
                [&](Sim& s, Result& result) {
                  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
                  simcuda::Address range = 0;
                  const CUresult code =
                      s.memory->reserve(&range, size, alignment, s.settings.granularity);
                  if (code == CUDA_SUCCESS) result = *ptr = range;
                  return code;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  return answer("cuMemAddressFree", Needs::vmm, {{"ptr", ptr}, {"size", size}},
                [&](Sim& s, Result&) { return s.memory->free_range(ptr, size); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                            const CUmemAllocationProp* properties,
                                            unsigned long long flags) {
  const bool rdma = properties != nullptr && properties->allocFlags.gpuDirectRDMACapable != 0;
  return answer("cuMemCreate", Needs::vmm, {{"size", size}, {"rdma", rdma}, {"flags", flags}},
                [&](Sim& s, Result& result) {
                  if (flags != 0 || size == 0 || !is_aligned(s, 0, size) ||
                      !is_device_memory(s, properties) || (rdma && !s.settings.rdma)) {
                    return CUDA_ERROR_INVALID_VALUE;
                  }
                  const int device = properties->location.id;
                  std::uint64_t made = 0;
                  const CUresult code =
                      s.memory->create(&made, size, device, s.free_memory(device));
                  if (code == CUDA_SUCCESS) result = *handle = made;
                  return code;
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return answer("cuMemRelease", Needs::vmm, {{"handle", handle}},
                [&](Sim& s, Result&) { return s.memory->release(handle); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                         CUmemGenericAllocationHandle handle,
                                         unsigned long long flags) {
  return answer(
      "cuMemMap", Needs::vmm,
      {{"ptr", ptr}, {"size", size}, {"offset", offset}, {"handle", handle}, {"flags", flags}},
      [&](Sim& s, Result&) {
        if (flags != 0 || !is_aligned(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
        return s.memory->map(ptr, size, offset, handle);
      });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
  return answer("cuMemUnmap", Needs::vmm, {{"ptr", ptr}, {"size", size}},
                [&](Sim& s, Result&) { return s.memory->unmap(ptr, size); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size,
                                               const CUmemAccessDesc* wanted, size_t count) {
  const bool is_one = wanted != nullptr && count == 1;
  return answer("cuMemSetAccess", Needs::vmm,
                {{"ptr", ptr},
                 {"size", size},
                 {"access", is_one ? static_cast<unsigned long long>(wanted->flags) : 0},
                 {"count", count}},
                [&](Sim& s, Result&) {
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
                  return s.memory->set_access(ptr, size, wanted->flags);
                });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemsetD8(CUdeviceptr ptr, unsigned char value, size_t size) {
  return answer("cuMemsetD8", Needs::context, {{"ptr", ptr}, {"value", value}, {"size", size}},
                [&](Sim& s, Result&) { return s.memory->start_fill(ptr, value, size); });
}

SIMCUDA_EXPORT CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return answer("cuMemcpyDtoD", Needs::context,
                {{"to_ptr", to}, {"from_ptr", from}, {"size", size}},
                [&](Sim& s, Result&) { return s.memory->start_copy(to, from, size); });
}

// The control interface of simcuda.h.

SIMCUDA_EXPORT int simcuda_configure(const char* setting, uint64_t value) {
  std::lock_guard lock(sim().mutex);
  std::uint64_t* found = sim().settings.find(setting);
  if (found == nullptr) return -1;
  *found = value;
  return 0;
}

SIMCUDA_EXPORT void simcuda_reset(void) {
  Sim& s = sim();
  std::lock_guard lock(s.mutex);
  s.settings = simcuda::Settings::from_environment();
  s.control = simcuda::CallControl();
  s.memory = std::make_unique<simcuda::SimMemory>();
  s.contexts = {};
  s.initialised = false;
  s.broken = CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_fail(const char* call, uint64_t skip, uint64_t refuse, int code) {
  if (!simcuda::CallControl::is_call(call)) return -1;
  std::lock_guard lock(sim().mutex);
  sim().control.fail(call, skip, refuse, static_cast<CUresult>(code));
  return 0;
}

SIMCUDA_EXPORT int simcuda_set_latency(const char* call, double microseconds, int busy) {
  if (!simcuda::CallControl::is_call(call)) return -1;
  std::lock_guard lock(sim().mutex);
  sim().control.set_latency(call, {microseconds, busy != 0});
  return 0;
}

SIMCUDA_EXPORT SimcudaLeaks simcuda_leaks(void) {
  std::lock_guard lock(sim().mutex);
  return sim().leaks();
}

SIMCUDA_EXPORT uint64_t simcuda_free_memory(int device) {
  std::lock_guard lock(sim().mutex);
  return sim().free_memory(device);
}

SIMCUDA_EXPORT uint64_t simcuda_mapping_at(uint64_t address, int* access) {
  std::lock_guard lock(sim().mutex);
  CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  const std::uint64_t handle = sim().memory->handle_at(address, &flags);
  *access = static_cast<int>(flags);
  return handle;
}

SIMCUDA_EXPORT uint64_t simcuda_calls(const char* call) {
  std::lock_guard lock(sim().mutex);
  return sim().control.count(call);
}

SIMCUDA_EXPORT void simcuda_log(int on) {
  std::lock_guard lock(sim().mutex);
  sim().control.log(on != 0);
}

SIMCUDA_EXPORT size_t simcuda_log_lines(void) {
  std::lock_guard lock(sim().mutex);
  return sim().control.lines().size();
}

SIMCUDA_EXPORT size_t simcuda_log_line(size_t index, char* line, size_t size) {
  std::lock_guard lock(sim().mutex);
  const auto& lines = sim().control.lines();
  const std::string text = index < lines.size() ? lines[index] : std::string();
  return static_cast<size_t>(std::snprintf(line, size, "%s", text.c_str()));
}
