// What surrounds the model of the simulated libcuda (a test double): settings, failures to inject,
// latencies and counts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_abi.h"

namespace simcuda {

using namespace vtensor::cuda;  // CUresult and the like

struct Settings {
  std::uint64_t devices = 1;
  std::uint64_t memory = std::uint64_t{4} << 30;
  std::uint64_t vmm = 1;
  std::uint64_t granularity = std::uint64_t{2} << 20;
  std::uint64_t read_only = 1;
  std::uint64_t rdma = 1;
  std::uint64_t pointers = 1;
  std::uint64_t handle_types = 1;
  std::uint64_t imex = 1;
  std::uint64_t first_uuid = 1;
  std::uint64_t eager = 1;
  std::uint64_t sync_timeout = 10'000;
  std::uint64_t blocking = 0;

  static Settings from_environment();
  // Null where there is no such setting.
  std::uint64_t* find(const std::string& name);
};

class CallControl {
 public:
  static bool is_call(const std::string& name);

  void fail(const std::string& call, std::uint64_t skip, std::uint64_t refuse, CUresult code);
  // Forgets the failures asked for; the number of refusals that were still to come.
  std::uint64_t disarm();
  void set_latency(const std::string& call, double microseconds);
  void hold(const std::string& call, bool held);

  // Counts a call; what it must answer without being made, or CUDA_SUCCESS.
  CUresult enter(const std::string& call);
  std::chrono::duration<double, std::micro> latency(const std::string& call) const;
  // Returns once the call is not held, and lets go of the lock until then.
  void await(const std::string& call, std::unique_lock<std::mutex>& lock) const;
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
  std::map<std::string, std::uint64_t> counts_;
  std::map<std::string, double> latencies_;  // microseconds
  std::set<std::string> held_;
  std::vector<Failure> failures_;
  std::uint64_t refusals_ = 0;
};

// "CUDA_ERROR_INVALID_VALUE"; null where the simulation never answers that.
const char* error_name(CUresult code);

}  // namespace simcuda
