// The one simulated libcuda of the process (a test double), and what every entry point goes
// through.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sim_control.h"
#include "sim_graphs.h"
#include "sim_memory.h"
#include "sim_streams.h"
#include "simcuda.h"

#define SIMCUDA_EXPORT extern "C" __attribute__((visibility("default")))
// The head of an entry point's definition, which must have the type that cuda_abi.h gives it.
#define SIMCUDA_ENTRY(symbol)                  \
  SIMCUDA_EXPORT vtensor::cuda::symbol symbol; \
  SIMCUDA_EXPORT vtensor::cuda::CUresult symbol

namespace simcuda {

constexpr std::uint64_t kMaxDevices = 64;

// The primary one of a device, or another.
struct Context {
  int device = 0;
  int retained = 0;
};

// What reset() makes anew. Destroyed in the reverse order.
struct Model {
  SimMemory memory;
  SimStreams streams{memory};
  SimGraphs graphs;

  explicit Model(Destructors& destructors) : graphs(destructors) {}
};

struct Sim {
  std::mutex mutex;
  pid_t process = getpid();
  Settings settings = Settings::from_environment();
  CallControl control;
  Destructors destructors;
  std::unique_ptr<Model> model = std::make_unique<Model>(destructors);
  std::array<Context, kMaxDevices> contexts;     // by device
  std::vector<std::unique_ptr<Context>> others;  // for ever: made by tests
  bool initialised = false;

  bool has_device(int device) const {
    return device >= 0 &&
           static_cast<std::size_t>(device) < std::min(settings.devices, kMaxDevices);
  }
  bool takes(CUmemAllocationHandleType type) const {
    return (settings.handle_types & type) == type;
  }
  // Null where the handle names no context that is alive.
  Context* find(CUcontext context);
  CUcontext primary(int device) {
    return reinterpret_cast<CUcontext>(&contexts[static_cast<std::size_t>(device)]);
  }
  // The current one; the first device's primary one where there is none.
  CUcontext context();
  std::uint64_t free_memory(int device) const;
  SimcudaLeaks leaks() const;
  void run_if_eager() {
    if (settings.eager) model->streams.run();
  }
};

inline thread_local CUcontext current_context = nullptr;
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Of what there is how many; empty where there is nothing.
std::string describe(const SimcudaLeaks& left);
// Never destroyed: a process that ends may still call. Aborts in a forked child.
Sim& sim();

template <class Handle>
unsigned long long number(Handle handle) {
  return reinterpret_cast<unsigned long long>(handle);
}

enum class Needs { nothing, vmm, context };
// Which stream captures the call is allowed beside. By default what needs nothing is allowed beside
// any, and all else is taken to be unsafe.
enum class During { any_capture, no_capture };

// The answer before the model is asked, where that is not CUDA_SUCCESS.
CUresult refusal(Sim& s, const char* call, Needs needs, During during);

// Returns when `is_done` says so, or the context is in error, without keeping others from calling.
CUresult wait_until(Sim& s, CUcontext context, std::unique_lock<std::mutex>& lock,
                    const std::function<bool()>& is_done);

// Every entry point: counts, delays, refuses where asked to or where the rules say so, or has
// `model(sim, lock)` answer.
template <class Model>
CUresult answer_waiting(const char* call, Needs needs, During during, Model model) {
  if (Destructors::is_calling()) return CUDA_ERROR_NOT_PERMITTED;
  Sim& s = sim();
  std::unique_lock lock(s.mutex);
  CallControl::Call& entered = s.control.find(call);
  CUresult code = s.control.enter(entered);
  const auto latency = entered.latency;
  lock.unlock();
  if (latency.count() > 0) std::this_thread::sleep_for(latency);
  lock.lock();
  CallControl::await(entered, lock);

  if (code == CUDA_SUCCESS) code = refusal(s, call, needs, during);
  if (code == CUDA_SUCCESS) code = model(s, lock);
  if (code != CUDA_SUCCESS) s.control.count_refusal();
  return code;
}

template <class Model>
CUresult answer(const char* call, Needs needs, During during, Model model) {
  return answer_waiting(call, needs, during,
                        [&](Sim& s, std::unique_lock<std::mutex>&) { return model(s); });
}

template <class Model>
CUresult answer(const char* call, Needs needs, Model model) {
  const During during = needs == Needs::nothing ? During::any_capture : During::no_capture;
  return answer(call, needs, during, model);
}

// Has a stream do something: at once, when asked about it, or when a graph is launched.
CUresult submit(Sim& s, CUstream stream, Work work);

}  // namespace simcuda
