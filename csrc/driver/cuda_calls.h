// libcuda, looked up at run time, so that the library builds, imports and runs without CUDA. Every
// call is counted and traced, throws its refusal, and is refused in a forked child (I13).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/calls.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"
#include "driver/cuda_abi.h"

namespace vtensor {

using namespace cuda;  // CUresult and others

template <class Function>
struct CudaEntry {
  Call call;
  Function* function = nullptr;
};

struct CudaApi {
  // Loads `library` for the rest of the process: a loaded libcuda has threads and exit handlers of
  // its own. Throws DriverError.
  explicit CudaApi(const std::string& library);

  // "CUDA_ERROR_INVALID_VALUE"; the number if the loaded libcuda does not know it.
  std::string name_of(CUresult code) const;

#define VTENSOR_CUDA_MEMBER(name, symbol) CudaEntry<cuda::symbol> name{Call::name};
  VTENSOR_CUDA_CALLS(VTENSOR_CUDA_MEMBER)
#undef VTENSOR_CUDA_MEMBER

 private:
  cuda::cuGetErrorName* error_name_ = nullptr;
};

class CudaCalls : public CudaApi {
 public:
  CudaCalls(const std::string& library, CallMeter& meter) : CudaApi(library), meter_(meter) {}

  template <class Function, class... Args>
  CUresult call(const CudaEntry<Function>& entry, Args... args) {
    return call_at(entry, 0, 0, args...);
  }
  // `call`, with the addresses that it is about, for the trace.
  template <class Function, class... Args>
  CUresult call_at(const CudaEntry<Function>& entry, std::uint64_t address, std::uint64_t bytes,
                   Args... args) {
    refuse_in_forked_child("driver");
    const trace::Span span(trace::What::driver_call, address, bytes, 0, entry.call);
    if (meter_.enter(entry.call)) {
      return entry.call == Call::cuMemCreate ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
    }
    return entry.function(args...);
  }
  // `call`, repeated once if it is refused: for calls that restore or undo.
  template <class Function, class... Args>
  CUresult insist(const CudaEntry<Function>& entry, Args... args) {
    const CUresult code = call(entry, args...);
    return code == CUDA_SUCCESS ? code : call(entry, args...);
  }

  // `call`; throws a refusal in the name of `operation`.
  template <class Function, class... Args>
  void require(const char* operation, const CudaEntry<Function>& entry, Args... args) {
    require_at(operation, entry, 0, 0, args...);
  }
  template <class Function, class... Args>
  void require_at(const char* operation, const CudaEntry<Function>& entry, std::uint64_t address,
                  std::uint64_t bytes, Args... args) {
    check(operation, entry.call, call_at(entry, address, bytes, args...));
  }
  // Throws DriverError or DeviceOutOfMemory if `code`, the answer of `call`, is a refusal.
  void check(const char* operation, Call call, CUresult code) const;
  DriverError refusal(const char* operation, Call call, CUresult code) const;

  // Waits for all work of the primary context. Throws TimedOut, std::system_error if no thread can
  // be made, and DriverError if the context is in error or one of its streams is being captured.
  void synchronize(const char* operation);

  // Set once the driver is open.
  int device = 0;                       // the device's number in this process
  CUmemLocation location{};             // of the device's memory
  CUcontext context = nullptr;          // the device's primary one, which PyTorch uses too
  std::chrono::milliseconds timeout{};  // of a wait for the device

 private:
  CallMeter& meter_;
};

// For a scope, stream captures of any thread neither refuse this thread's calls nor are invalidated
// by them. In the worker the first scope lasts until its thread ends.
class RelaxedCapture {
 public:
  RelaxedCapture(CudaCalls& cuda, const char* operation);
  ~RelaxedCapture();
  RelaxedCapture& operator=(RelaxedCapture&&) = delete;

 private:
  CudaCalls& cuda_;
  const bool exchanged_;
  CUstreamCaptureMode before_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// For a scope, the primary context is current: memory work, streams and events need it. In the
// worker the first scope lasts until its thread ends.
class PrimaryContext {
 public:
  PrimaryContext(CudaCalls& cuda, const char* operation);
  ~PrimaryContext();
  PrimaryContext& operator=(PrimaryContext&&) = delete;

 private:
  CudaCalls& cuda_;
  CUcontext before_ = nullptr;
  bool changed_ = false;
};

}  // namespace vtensor
