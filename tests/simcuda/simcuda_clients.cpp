// What clients other than vtensor need of the simulated libcuda (a test double): cuGetProcAddress,
// by which they find all else, and streams as cuda.core makes them.
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "sim.h"

SIMCUDA_EXPORT vtensor::cuda::cuStreamCreate cuStreamCreate;

using namespace vtensor::cuda;

namespace {

// Calls that CUDA changed after the version that is simulated: from then on the name stands for
// another signature.
struct Changed {
  const char* symbol;
  int version;
};
constexpr Changed kChanged[] = {{"cuStreamGetCaptureInfo", 12030}, {"cuCtxSynchronize", 13000}};

// This library, whatever name it was loaded by.
void* own_library() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&own_library), &info);
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

void* find(const std::string& symbol, int version) {
  static void* const library = own_library();
  const bool is_newer = std::ranges::any_of(kChanged, [&](const Changed& changed) {
    return symbol == changed.symbol && version >= changed.version;
  });
  if (is_newer) return nullptr;
  void* const second = dlsym(library, (symbol + "_v2").c_str());
  return second != nullptr ? second : dlsym(library, symbol.c_str());
}

}  // namespace

// As cuGetErrorName, asked before cuInit, neither counted nor logged.
SIMCUDA_ENTRY(cuGetProcAddress_v2)(const char* symbol, void** function, int version, std::uint64_t,
                                   CUdriverProcAddressQueryResult* status) {
  *function = find(symbol, version);
  const bool found = *function != nullptr;
  if (status != nullptr) {
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Priorities mean nothing here: there is one, as on devices that have none.

SIMCUDA_ENTRY(cuCtxGetStreamPriorityRange)(int* least, int* greatest) {
  *least = *greatest = 0;
  return CUDA_SUCCESS;
}

SIMCUDA_ENTRY(cuStreamCreateWithPriority)(CUstream* stream, unsigned flags, int) {
  return ::cuStreamCreate(stream, flags);
}
