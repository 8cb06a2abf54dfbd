// libcuda, looked up at run time, so that the library builds, imports and runs without CUDA; and
// how the CUDA driver calls it: every call counted and traced, refusals as errors, refused in a
// forked child (I13), and what a thread needs before it calls.
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
  // A call about `bytes` bytes at `address`, for the trace.
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
  // As `call`, and once more if that is refused: for what restores or undoes.
  template <class Function, class... Args>
  CUresult insist(const CudaEntry<Function>& entry, Args... args) {
    const CUresult code = call(entry, args...);
    return code == CUDA_SUCCESS ? code : call(entry, args...);
  }

  // As `call`; throws in the name of `operation` if it is refused.
  template <class Function, class... Args>
  void require(const char* operation, const CudaEntry<Function>& entry, Args... args) {
    require_at(operation, entry, 0, 0, args...);
  }
  template <class Function, class... Args>
  void require_at(const char* operation, const CudaEntry<Function>& entry, std::uint64_t address,
                  std::uint64_t bytes, Args... args) {
    check(operation, entry.call, call_at(entry, address, bytes, args...));
  }
  // Throws the refusal if `code`, the answer of `call`, is one: DriverError, or DeviceOutOfMemory.
  void check(const char* operation, Call call, CUresult code) const;
  DriverError refusal(const char* operation, Call call, CUresult code) const;

  // Waits for all work of the primary context. Throws TimedOut, std::system_error if no thread can
  // be made, and DriverError if the context is in error or a stream of it is being captured.
  void synchronize(const char* operation);

  // What the CUDA driver works on. It is known once the driver is open.
  int device = 0;                       // its number in this process
  CUmemLocation location{};             // of its memory
  CUcontext context = nullptr;          // the device's primary one, which PyTorch uses too
  std::chrono::milliseconds timeout{};  // of a wait for the device

 private:
  CallMeter& meter_;
};

// While it lives a stream capture, in whatever thread, neither refuses this thread's calls nor is
// invalidated by them. The first one of a worker lasts as long as its thread.
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

// While it lives the primary context is current: memory work, streams and events need one. The
// first one of a worker lasts as long as its thread.
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
