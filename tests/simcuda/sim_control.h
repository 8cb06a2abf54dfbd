// What surrounds the model of the simulated libcuda (a test double): settings, failures to inject,
// latencies and counts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda_abi.h"

namespace simcuda {

using namespace vtensor::cuda;  // CUresult and the like

// Name, environment variable, what it is at first: see simcuda.h.
#define SIMCUDA_SETTINGS(X)                                     \
  X(devices, "SIMCUDA_DEVICES", 1)                              \
  X(memory, "SIMCUDA_MEMORY", std::uint64_t{4} << 30)           \
  X(vmm, "SIMCUDA_VMM", 1)                                      \
  X(granularity, "SIMCUDA_GRANULARITY", std::uint64_t{2} << 20) \
  X(read_only, "SIMCUDA_READ_ONLY", 1)                          \
  X(rdma, "SIMCUDA_RDMA", 1)                                    \
  X(pointers, "SIMCUDA_POINTERS", 1)                            \
  X(handle_types, "SIMCUDA_HANDLE_TYPES", 1)                    \
  X(imex, "SIMCUDA_IMEX", 1)                                    \
  X(first_uuid, "SIMCUDA_FIRST_UUID", 1)                        \
  X(eager, "SIMCUDA_EAGER", 1)                                  \
  X(sync_timeout, "SIMCUDA_SYNC_TIMEOUT", 10'000)               \
  X(blocking, "SIMCUDA_BLOCKING", 0)

struct Settings {
#define SIMCUDA_MEMBER(name, variable, value) std::uint64_t name = value;
  SIMCUDA_SETTINGS(SIMCUDA_MEMBER)
#undef SIMCUDA_MEMBER

  static Settings from_environment();
  // Null where there is no such setting.
  std::uint64_t* find(const std::string& name);
};

class CallControl {
 public:
  struct Call {
    std::string_view name;
    std::uint64_t count = 0;
    std::chrono::duration<double, std::micro> latency{};
    bool held = false;
  };

  static bool is_call(const std::string& name);

  void fail(const std::string& call, std::uint64_t skip, std::uint64_t refuse, CUresult code);
  // Forgets the failures asked for; the number of refusals that were still to come.
  std::uint64_t disarm();
  void set_latency(const std::string& call, double microseconds);
  void hold(const std::string& call, bool held);

  // An entry point calls it once, because comparing names takes most of a simulated call's time.
  // Keeps the view of the name.
  Call& find(std::string_view name) { return calls_.try_emplace(name, Call{name}).first->second; }
  // Counts a call; what it must answer without being made, or CUDA_SUCCESS.
  CUresult enter(Call& call);
  // Returns once the call is not held, and lets go of the lock until then.
  static void await(const Call& call, std::unique_lock<std::mutex>& lock);
  std::uint64_t count(const std::string& call) const;

  void count_refusal() { ++refusals_; }
  // Calls that were answered otherwise than by CUDA_SUCCESS.
  std::uint64_t refusals() const { return refusals_; }

 private:
  struct Failure {
    std::string call;
    std::uint64_t skip, refuse;
    CUresult code;
  };
  std::unordered_map<std::string_view, Call> calls_;
  std::vector<Failure> failures_;
  std::uint64_t refusals_ = 0;
};

// "CUDA_ERROR_INVALID_VALUE"; null where the simulation never answers that.
const char* error_name(CUresult code);

}  // namespace simcuda
