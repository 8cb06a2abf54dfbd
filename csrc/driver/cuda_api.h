// The entry points of libcuda that the CUDA driver uses, looked up at run time: the library builds,
// imports and runs on the CPU without CUDA installed.
#pragma once

#include <string>

#include "base/calls.h"
#include "driver/cuda_abi.h"

namespace vtensor {

using namespace cuda;  // CUresult and the like

template <class Function>
struct CudaEntry {
  Call call;
  Function* function = nullptr;
};

struct CudaApi {
  // Loads `library` for the rest of the process: a loaded libcuda has threads and exit handlers of
  // its own. Throws DriverError.
  explicit CudaApi(const std::string& library);

  // "CUDA_ERROR_INVALID_VALUE"; the number where the loaded libcuda does not know it.
  std::string name_of(CUresult code) const;

#define VTENSOR_CUDA_MEMBER(name, symbol) CudaEntry<cuda::symbol> name{Call::name};
  VTENSOR_CUDA_CALLS(VTENSOR_CUDA_MEMBER)
#undef VTENSOR_CUDA_MEMBER

 private:
  cuda::cuGetErrorName* error_name_ = nullptr;
};

}  // namespace vtensor
