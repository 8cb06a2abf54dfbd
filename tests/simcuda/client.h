// Loads the simulated libcuda (a test double) into a C++ test: its control interface, and its
// driver API.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "driver/driver.h"
#include "simcuda/cuda_abi.h"
#include "simcuda/simcuda.h"

inline std::string simcuda_library() {
  const char* path = std::getenv("VTENSOR_SIMCUDA");
  return path != nullptr ? path : VTENSOR_SIMCUDA_PATH;
}

template <class Function>
Function* simcuda_symbol(const char* name) {
  static void* const library = dlopen(simcuda_library().c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) throw std::runtime_error(std::string("simcuda: ") + dlerror());
  return reinterpret_cast<Function*>(symbol);
}

struct SimcudaControl {
#define SIMCUDA_ENTRY(name, function) \
  decltype(::function)* name = simcuda_symbol<decltype(::function)>(#function)
  SIMCUDA_ENTRY(configure, simcuda_configure);
  SIMCUDA_ENTRY(reset, simcuda_reset);
  SIMCUDA_ENTRY(fail, simcuda_fail);
  SIMCUDA_ENTRY(set_latency, simcuda_set_latency);
  SIMCUDA_ENTRY(hold_calls, simcuda_hold_calls);
  SIMCUDA_ENTRY(leaks, simcuda_leaks);
  SIMCUDA_ENTRY(describe, simcuda_describe);
  SIMCUDA_ENTRY(free_memory, simcuda_free_memory);
  SIMCUDA_ENTRY(calls, simcuda_calls);
  SIMCUDA_ENTRY(refusals, simcuda_refusals);
  SIMCUDA_ENTRY(hold, simcuda_hold);
  SIMCUDA_ENTRY(release, simcuda_release);
  SIMCUDA_ENTRY(step, simcuda_step);
  SIMCUDA_ENTRY(late_events, simcuda_late_events);
  SIMCUDA_ENTRY(unseen_events, simcuda_unseen_events);
  SIMCUDA_ENTRY(launch, simcuda_launch);
  SIMCUDA_ENTRY(occupy, simcuda_occupy);
  SIMCUDA_ENTRY(make_context, simcuda_make_context);
  SIMCUDA_ENTRY(make_stream, simcuda_make_stream);
  SIMCUDA_ENTRY(destroy_stream, simcuda_destroy_stream);
  SIMCUDA_ENTRY(pending, simcuda_pending);
  SIMCUDA_ENTRY(run, simcuda_run);
  SIMCUDA_ENTRY(illegal_accesses, simcuda_illegal_accesses);
#undef SIMCUDA_ENTRY
};

// The options of a driver over the simulated device.
inline vtensor::CudaOptions simulated(std::size_t page_size, bool shareable = false) {
  return {.shareable = shareable,
          .page_size = page_size,
          .library = simcuda_library(),
          .memory_is_host_memory = true};
}

inline std::string describe(const SimcudaLeaks& left) { return SimcudaControl().describe(&left); }

// The simulated device as it begins, with pages of this size.
struct FreshDevice : SimcudaControl {
  explicit FreshDevice(std::size_t page_size) {
    reset();
    configure("granularity", page_size);
  }
};
