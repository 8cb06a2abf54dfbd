#include "driver/cuda_api.h"

#include <dlfcn.h>

#include "base/errors.h"

namespace vtensor {
namespace {

std::string loader_message() {
  const char* message = dlerror();
  return message ? message : "unknown reason";
}

template <class Function>
void resolve(void* loaded, const std::string& library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(loaded, symbol));
  if (function == nullptr) {
    throw DriverError("dlsym", 0, "MISSING_SYMBOL",
                      "[cuda] " + library + " has no " + symbol + " (" + loader_message() +
                          "): install an NVIDIA driver of CUDA 11.3 or newer");
  }
}

}  // namespace

CudaApi::CudaApi(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    throw DriverError("dlopen", 0, "LIBRARY_NOT_FOUND",
                      "[cuda] cannot load " + library + " (" + loader_message() +
                          "): install the NVIDIA driver, give the container access to it "
                          "(--gpus all), or use the CPU");
  }
#define VTENSOR_CUDA_RESOLVE(name, symbol) resolve(loaded, library, #symbol, name.function);
  VTENSOR_CUDA_CALLS(VTENSOR_CUDA_RESOLVE)
#undef VTENSOR_CUDA_RESOLVE
  resolve(loaded, library, "cuGetErrorName", error_name_);
}

std::string CudaApi::name_of(CUresult code) const {
  const char* name = nullptr;
  if (error_name_(code, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return "CUresult " + std::to_string(static_cast<int>(code));
}

}  // namespace vtensor
