#include "conformance/subject.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/errors.h"
#include "driver/cuda_calls.h"

namespace vtensor::conformance {
namespace {

std::uint8_t* pointer(Address at) { return reinterpret_cast<std::uint8_t*>(at); }

// Copies between the host and the real device's memory, in its primary context.
class RealDevice {
 public:
  static const RealDevice& get() {
    static const RealDevice device;
    return device;
  }

  void read(Address at, void* to, std::size_t bytes) const { check(copy_from_(to, at, bytes)); }
  void write(Address at, const void* from, std::size_t bytes) const {
    check(copy_to_(at, from, bytes));
    check(api_.cuCtxSynchronize.function());
  }
  unsigned long long access(Address at) const {
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = 0;
    unsigned long long flags = 0;
    check(get_access_(&flags, &location, at));
    return flags;
  }

 private:
  RealDevice() : api_("libcuda.so.1") {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    copy_from_ = reinterpret_cast<decltype(copy_from_)>(dlsym(library, "cuMemcpyDtoH_v2"));
    copy_to_ = reinterpret_cast<decltype(copy_to_)>(dlsym(library, "cuMemcpyHtoD_v2"));
    get_access_ = reinterpret_cast<decltype(get_access_)>(dlsym(library, "cuMemGetAccess"));
    CUcontext context = nullptr;
    check(api_.cuInit.function(0));
    check(api_.cuDevicePrimaryCtxRetain.function(&context, 0));
    check(api_.cuCtxSetCurrent.function(context));
  }
  void check(CUresult code) const {
    if (code != CUDA_SUCCESS) throw std::runtime_error("libcuda: " + api_.name_of(code));
  }

  CudaApi api_;
  CUresult (*copy_from_)(void*, CUdeviceptr, std::size_t) = nullptr;
  CUresult (*copy_to_)(CUdeviceptr, const void*, std::size_t) = nullptr;
  CUresult (*get_access_)(unsigned long long*, const CUmemLocation*, CUdeviceptr) = nullptr;
};

}  // namespace

void HostPages::fill(Address at, std::size_t bytes, std::uint8_t value) {
  std::memset(pointer(at), value, bytes);
}

bool HostPages::holds(Address at, std::size_t bytes, std::uint8_t value) {
  // Each byte is as the one before it.
  return *pointer(at) == value && std::memcmp(pointer(at), pointer(at) + 1, bytes - 1) == 0;
}

// The kernel, asked to store the byte that is there, answers EFAULT where a store would fault.
bool HostPages::stores(Address at) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe");
  std::uint8_t byte = *pointer(at);
  const bool written = write(ends[1], &byte, 1) == 1;
  const bool stored = written && read(ends[0], pointer(at), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return stored;
}

const SimcudaControl& SimulatedCuda::control() {
  static const SimcudaControl control;
  return control;
}

void SimulatedCuda::prepare() {
  control().reset();
  control().configure("granularity", kPageSize);
  control().configure("eager", 0);
  control().configure("sync_timeout", 2'000);
}

void SimulatedCuda::fill(Address at, std::size_t bytes, std::uint8_t value) {
  control().run();
  HostPages::fill(at, bytes, value);
}

bool SimulatedCuda::holds(Address at, std::size_t bytes, std::uint8_t value) {
  control().run();
  return HostPages::holds(at, bytes, value);
}

std::unique_ptr<Driver> SimulatedCuda::open() { return make_cuda_driver(simulated(kPageSize)); }

std::string SimulatedCuda::leaks() {
  SimcudaLeaks left = control().leaks();
  left.objects = 0;  // one whose release was refused too is given up
  return describe(left);
}

std::string RealCuda::unavailable() {
  static const std::string reason = []() -> std::string {
    try {
      make_cuda_driver({});
      return {};
    } catch (const Error& error) {
      return error.what();
    }
  }();
  return reason;
}

void RealCuda::fill(Address at, std::size_t bytes, std::uint8_t value) {
  const std::vector<std::uint8_t> buffer(bytes, value);
  RealDevice::get().write(at, buffer.data(), bytes);
}

bool RealCuda::holds(Address at, std::size_t bytes, std::uint8_t value) {
  std::vector<std::uint8_t> buffer(bytes);
  RealDevice::get().read(at, buffer.data(), bytes);
  return std::ranges::all_of(buffer, [&](std::uint8_t b) { return b == value; });
}

bool RealCuda::stores(Address at) {
  return RealDevice::get().access(at) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

}  // namespace vtensor::conformance
