#include "sim.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

namespace simcuda {
namespace {

std::atomic<Sim*> made{nullptr};

__attribute__((destructor)) void report_leaks() {
  const char* wanted = std::getenv("SIMCUDA_REPORT_LEAKS");
  const Sim* s = made.load();
  if (wanted == nullptr || std::strcmp(wanted, "1") != 0) return;
  if (s == nullptr || s->process != getpid()) return;
  const SimcudaLeaks leaks = s->leaks();
  const std::string text = describe(leaks);
  if (!text.empty()) std::fprintf(stderr, "simcuda (test double): leaked %s\n", text.c_str());
}

}  // namespace

std::string describe(const SimcudaLeaks& left) {
  const std::pair<std::uint64_t, const char*> counts[] = {
      {left.handles, "handles"},     {left.mappings, "mappings"},
      {left.ranges, "ranges"},       {left.contexts, "context references"},
      {left.streams, "streams"},     {left.events, "events"},
      {left.objects, "user objects"}};
  std::string text;
  for (const auto& [count, what] : counts) {
    if (count != 0) text += std::to_string(count) + " " + what + " ";
  }
  return text;
}

Sim& sim() {
  static Sim* const only = [] {
    made = new Sim;
    return made.load();
  }();
  if (only->process != getpid()) {
    std::fputs("simcuda (test double): called in a forked child, where CUDA must not be used\n",
               stderr);
    std::abort();
  }
  return *only;
}

Context* Sim::find(CUcontext context) {
  const auto is_it = [context](const Context& candidate) {
    return reinterpret_cast<CUcontext>(const_cast<Context*>(&candidate)) == context &&
           candidate.retained > 0;
  };
  const auto primary = std::ranges::find_if(contexts, is_it);
  if (primary != contexts.end()) return &*primary;
  const auto other =
      std::ranges::find_if(others, [&](const auto& candidate) { return is_it(*candidate); });
  return other == others.end() ? nullptr : other->get();
}

CUcontext Sim::context() { return current_context == nullptr ? primary(0) : current_context; }

std::uint64_t Sim::free_memory(int device) const {
  const std::uint64_t used = model->memory.used(device);
  return used < settings.memory ? settings.memory - used : 0;
}

SimcudaLeaks Sim::leaks() const {
  SimcudaLeaks leaks{};
  leaks.handles = model->memory.handles();
  leaks.mappings = model->memory.mappings();
  leaks.ranges = model->memory.ranges();
  for (const Context& context : contexts) {
    leaks.contexts += static_cast<std::uint64_t>(context.retained);
  }
  leaks.streams = model->streams.streams();
  leaks.events = model->streams.events();
  leaks.objects = model->graphs.objects();
  return leaks;
}

CUresult wait_until(Sim& s, CUcontext context, std::unique_lock<std::mutex>& lock,
                    const std::function<bool()>& is_done) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(s.settings.sync_timeout);
  s.model->streams.wait_out_queries();
  while (!is_done()) {
    if (s.model->streams.error(context) != CUDA_SUCCESS) break;
    if (std::chrono::steady_clock::now() >= deadline) return CUDA_ERROR_LAUNCH_TIMEOUT;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    lock.lock();
  }
  return s.model->streams.error(context);
}

namespace {

// What calls answer in a process of which a context is in error. Those that look at no context go
// on; of the others cuda.h says that they may return the errors of earlier work.
CUresult sticky_error(Sim& s, const char* call, Needs needs) {
  if (needs == Needs::context) return s.model->streams.error(current_context);
  if (needs != Needs::vmm || !s.model->streams.any_error()) return CUDA_SUCCESS;
  constexpr std::array<std::string_view, 3> kNever = {"cuMemGetAllocationGranularity",
                                                      "cuMemAddressReserve", "cuMemAddressFree"};
  return std::ranges::find(kNever, call) != kNever.end() ? CUDA_SUCCESS
                                                         : CUDA_ERROR_ILLEGAL_ADDRESS;
}

}  // namespace

CUresult refusal(Sim& s, const char* call, Needs needs, During during) {
  const CUresult error = sticky_error(s, call, needs);
  if (error != CUDA_SUCCESS) return error;
  if (!s.initialised && std::strcmp(call, "cuInit") != 0) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs == Needs::vmm && !s.settings.vmm) return CUDA_ERROR_NOT_SUPPORTED;
  if (needs == Needs::context) {
    if (current_context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (s.find(current_context) == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  if (during == During::no_capture) return s.model->graphs.allow_unsafe_call(capture_mode);
  return CUDA_SUCCESS;
}

}  // namespace simcuda
