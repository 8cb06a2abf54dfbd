#include "sim_control.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "base/calls.h"

namespace simcuda {
namespace {

// What tests and benchmarks call besides vtensor, and what vtensor calls.
constexpr auto kCalls = std::to_array<std::string_view>(
    {"cuMemRetainAllocationHandle", "cuMemsetD8", "cuMemcpyDtoD", "cuStreamSynchronize",
     "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy", "cuGraphInstantiate",
     "cuGraphExecDestroy", "cuGraphLaunch", VTENSOR_CUDA_CALLS(VTENSOR_NAME)});

struct SettingName {
  const char* name;
  const char* variable;
  std::uint64_t Settings::* value;
};
constexpr SettingName kSettings[] = {
#define SIMCUDA_SETTING(name, variable, value) {#name, variable, &Settings::name},
    SIMCUDA_SETTINGS(SIMCUDA_SETTING)
#undef SIMCUDA_SETTING
};

bool matches(const std::string& pattern, std::string_view call) {
  return pattern == "*" || pattern == call;
}

}  // namespace

Settings Settings::from_environment() {
  Settings settings;
  for (const SettingName& setting : kSettings) {
    const char* text = std::getenv(setting.variable);
    if (text != nullptr && *text != '\0') {
      settings.*setting.value = std::strtoull(text, nullptr, 0);
    }
  }
  return settings;
}

std::uint64_t* Settings::find(const std::string& name) {
  for (const SettingName& setting : kSettings) {
    if (name == setting.name) return &(this->*setting.value);
  }
  return nullptr;
}

bool CallControl::is_call(const std::string& name) {
  return name == "*" || std::ranges::find(kCalls, name) != kCalls.end();
}

void CallControl::fail(const std::string& call, std::uint64_t skip, std::uint64_t refuse,
                       CUresult code) {
  failures_.push_back({call, skip, refuse, code});
}

std::uint64_t CallControl::disarm() {
  std::uint64_t refusals = 0;
  for (const Failure& failure : failures_) refusals += failure.refuse;
  failures_.clear();
  return refusals;
}

void CallControl::set_latency(const std::string& call, double microseconds) {
  for (const std::string_view name : kCalls) {
    if (matches(call, name)) find(name).latency = decltype(Call::latency)(microseconds);
  }
}

void CallControl::hold(const std::string& call, bool held) {
  for (const std::string_view name : kCalls) {
    if (matches(call, name)) find(name).held = held;
  }
}

CUresult CallControl::enter(Call& call) {
  ++call.count;
  CUresult answer = CUDA_SUCCESS;
  for (Failure& failure : failures_) {
    if (!matches(failure.call, call.name)) continue;
    if (failure.skip != 0) {
      --failure.skip;
    } else if (failure.refuse != 0) {
      --failure.refuse;
      answer = failure.code;
    }
  }
  std::erase_if(failures_, [](const Failure& failure) { return failure.refuse == 0; });
  return answer;
}

void CallControl::await(const Call& call, std::unique_lock<std::mutex>& lock) {
  while (call.held) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    lock.lock();
  }
}

std::uint64_t CallControl::count(const std::string& call) const {
  std::uint64_t sum = 0;
  for (const auto& [name, entered] : calls_) {
    if (matches(call, name)) sum += entered.count;
  }
  return sum;
}

const char* error_name(CUresult code) {
  switch (code) {
#define SIMCUDA_NAME(code) \
  case code:               \
    return #code;
    SIMCUDA_NAME(CUDA_SUCCESS)
    SIMCUDA_NAME(CUDA_ERROR_INVALID_VALUE)
    SIMCUDA_NAME(CUDA_ERROR_OUT_OF_MEMORY)
    SIMCUDA_NAME(CUDA_ERROR_NOT_INITIALIZED)
    SIMCUDA_NAME(CUDA_ERROR_NO_DEVICE)
    SIMCUDA_NAME(CUDA_ERROR_INVALID_DEVICE)
    SIMCUDA_NAME(CUDA_ERROR_INVALID_CONTEXT)
    SIMCUDA_NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
    SIMCUDA_NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED)
    SIMCUDA_NAME(CUDA_ERROR_NOT_PERMITTED)
    SIMCUDA_NAME(CUDA_ERROR_NOT_SUPPORTED)
    SIMCUDA_NAME(CUDA_ERROR_INVALID_HANDLE)
    SIMCUDA_NAME(CUDA_ERROR_ILLEGAL_STATE)
    SIMCUDA_NAME(CUDA_ERROR_NOT_FOUND)
    SIMCUDA_NAME(CUDA_ERROR_NOT_READY)
    SIMCUDA_NAME(CUDA_ERROR_LAUNCH_TIMEOUT)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_MERGE)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    SIMCUDA_NAME(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
    SIMCUDA_NAME(CUDA_ERROR_CAPTURED_EVENT)
    SIMCUDA_NAME(CUDA_ERROR_UNKNOWN)
#undef SIMCUDA_NAME
    default:
      return nullptr;
  }
}

}  // namespace simcuda
