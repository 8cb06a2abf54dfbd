#include "driver/cuda_calls.h"

#include <dlfcn.h>

#include <future>
#include <memory>
#include <thread>

#include "base/thread.h"

namespace vtensor {
namespace {

thread_local bool is_relaxed = false;
// The worker stays relaxed and in the primary context: that saves each operation four calls.
thread_local CUcontext worker_context = nullptr;

bool is_worker() { return thread_role == ThreadRole::mapper; }

std::string loader_message() {
  const char* message = dlerror();
  return message ? message : "unknown reason";
}

template <class Function>
void resolve(void* loaded, const std::string& library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(loaded, symbol));
  if (function == nullptr) {
    throw DriverError("dlsym", 0, "MISSING_SYMBOL", "[cuda] ", library, " has no ", symbol, " (",
                      loader_message(), "): install an NVIDIA driver of CUDA 11.4 or newer");
  }
}

}  // namespace

CudaApi::CudaApi(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    throw DriverError("dlopen", 0, "LIBRARY_NOT_FOUND", "[cuda] cannot load ", library, " (",
                      loader_message(),
                      "): install the NVIDIA driver, give the container access to it (--gpus "
                      "all), or use the CPU");
  }
#define VTENSOR_CUDA_RESOLVE(name, symbol) resolve(loaded, library, #symbol, name.function);
  VTENSOR_CUDA_CALLS(VTENSOR_CUDA_RESOLVE)
#undef VTENSOR_CUDA_RESOLVE
  resolve(loaded, library, "cuGetErrorName", error_name_);
}

std::string CudaApi::name_of(CUresult code) const {
  const char* name = nullptr;
  if (error_name_(code, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return text("CUresult ", code);
}

DriverError CudaCalls::refusal(const char* operation, Call call, CUresult code) const {
  const std::string name = CudaApi::name_of(code);
  return DriverError(
      std::string(vtensor::name_of(call)), static_cast<long>(code), name,
      text("[driver.", operation, "] ", vtensor::name_of(call), " on cuda:", device, " answered ",
           name, " (", code, "): the operation did not happen; if other CUDA calls fail ",
           "too, the device is in error and the process must be restarted"));
}

void CudaCalls::check(const char* operation, Call call, CUresult code) const {
  if (code == CUDA_SUCCESS) return;
  DriverError cause = refusal(operation, call, code);
  // cuMemMap may lack memory too, for page tables.
  if (code == CUDA_ERROR_OUT_OF_MEMORY) throw DeviceOutOfMemory(cause);
  throw cause;
}

// cuCtxSynchronize has no bound. So a thread that holds nothing of ours makes the call, and is left
// behind in it if the device does not finish.
void CudaCalls::synchronize(const char* operation) {
  const auto promise = std::make_shared<std::promise<CUresult>>();
  std::future<CUresult> answer = promise->get_future();
  {
    const trace::Span span(trace::What::driver_call, 0, 0, 0, Call::cuCtxSynchronize);
    if (meter_.enter(Call::cuCtxSynchronize)) {
      throw refusal(operation, Call::cuCtxSynchronize, CUDA_ERROR_UNKNOWN);
    }
    {
      const SignalsBlocked blocked;
      std::thread([promise, exchange = cuThreadExchangeStreamCaptureMode.function,
                   enter = cuCtxSetCurrent.function, wait = cuCtxSynchronize.function,
                   context = context] {
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUresult code = exchange(&mode);
        if (code == CUDA_SUCCESS) code = enter(context);
        promise->set_value(code == CUDA_SUCCESS ? wait() : code);
      }).detach();
    }
    if (answer.wait_for(timeout) != std::future_status::ready) {
      throw TimedOut("[driver.", operation, "] all work on cuda:", device,
                     " was to end, the device did not finish within ", timeout.count(),
                     " ms: look for a kernel that does not end");
    }
  }
  check(operation, Call::cuCtxSynchronize, answer.get());
}

RelaxedCapture::RelaxedCapture(CudaCalls& cuda, const char* operation)
    : cuda_(cuda), exchanged_(!is_relaxed) {
  if (!exchanged_) return;
  cuda_.require(operation, cuda_.cuThreadExchangeStreamCaptureMode, &before_);
  is_relaxed = true;
}

RelaxedCapture::~RelaxedCapture() {
  if (!exchanged_ || is_worker()) return;
  // The operation has happened. If this is refused, the thread stays relaxed.
  cuda_.insist(cuda_.cuThreadExchangeStreamCaptureMode, &before_);
  is_relaxed = false;
}

PrimaryContext::PrimaryContext(CudaCalls& cuda, const char* operation) : cuda_(cuda) {
  if (worker_context == cuda_.context) return;
  cuda_.require(operation, cuda_.cuCtxGetCurrent, &before_);
  if (before_ != cuda_.context) {
    cuda_.require(operation, cuda_.cuCtxSetCurrent, cuda_.context);
    changed_ = !is_worker();
  }
  if (is_worker()) worker_context = cuda_.context;
}

PrimaryContext::~PrimaryContext() {
  if (changed_) cuda_.insist(cuda_.cuCtxSetCurrent, before_);
}

}  // namespace vtensor
