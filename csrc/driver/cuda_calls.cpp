#include "driver/cuda_calls.h"

#include <future>
#include <memory>
#include <thread>

#include "base/thread.h"

namespace vtensor {
namespace {

thread_local bool is_relaxed = false;
// The context that enter_worker made current in this thread for good.
thread_local CUcontext worker_context = nullptr;

}  // namespace

DriverError CudaCalls::refusal(const char* operation, Call call, CUresult code) const {
  const std::string name = CudaApi::name_of(code);
  const std::string message = std::string("[driver.") + operation + "] " +
                              std::string(vtensor::name_of(call)) +
                              " on cuda:" + std::to_string(device) + " answered " + name + " (" +
                              std::to_string(static_cast<int>(code)) + ")";
  return DriverError(std::string(vtensor::name_of(call)), static_cast<long>(code), name,
                     message +
                         ": what the operation had done is undone; where other CUDA calls fail "
                         "too, the device is in error and the process must be restarted");
}

// cuCtxSynchronize knows no bound. So a thread waits in it that holds nothing of ours, and is left
// there where the device does not finish.
void CudaCalls::synchronize(const char* operation, std::chrono::milliseconds timeout) {
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
      throw TimedOut("[driver." + std::string(operation) + "] all work on cuda:" +
                     std::to_string(device) + " was to end, the device did not finish within " +
                     std::to_string(timeout.count()) + " ms: look for a kernel that does not end");
    }
  }
  const CUresult code = answer.get();
  if (code != CUDA_SUCCESS) throw refusal(operation, Call::cuCtxSynchronize, code);
}

void CudaCalls::enter_worker() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  require("enter_worker", cuThreadExchangeStreamCaptureMode, &mode);
  const CUresult code = call(cuCtxSetCurrent, context);
  if (code != CUDA_SUCCESS) {
    call(cuThreadExchangeStreamCaptureMode, &mode);
    throw refusal("enter_worker", Call::cuCtxSetCurrent, code);
  }
  is_relaxed = true;
  worker_context = context;
}

RelaxedCapture::RelaxedCapture(CudaCalls& cuda, const char* operation)
    : cuda_(cuda), exchanged_(!is_relaxed) {
  if (!exchanged_) return;
  cuda_.require(operation, cuda_.cuThreadExchangeStreamCaptureMode, &before_);
  is_relaxed = true;
}

RelaxedCapture::~RelaxedCapture() {
  if (!exchanged_) return;
  // What the operation did stands; a refusal here, tried twice, leaves the thread relaxed.
  const auto restore = [&] {
    CUstreamCaptureMode mode = before_;
    return cuda_.call(cuda_.cuThreadExchangeStreamCaptureMode, &mode);
  };
  if (restore() != CUDA_SUCCESS) restore();
  is_relaxed = false;
}

PrimaryContext::PrimaryContext(CudaCalls& cuda, const char* operation) : cuda_(cuda) {
  if (worker_context == cuda_.context) return;
  cuda_.require(operation, cuda_.cuCtxGetCurrent, &before_);
  if (before_ == cuda_.context) return;
  cuda_.require(operation, cuda_.cuCtxSetCurrent, cuda_.context);
  changed_ = true;
}

PrimaryContext::~PrimaryContext() {
  if (!changed_) return;
  if (cuda_.call(cuda_.cuCtxSetCurrent, before_) != CUDA_SUCCESS) {
    cuda_.call(cuda_.cuCtxSetCurrent, before_);
  }
}

}  // namespace vtensor
