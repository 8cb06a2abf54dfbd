#include "sim.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace simcuda {
namespace {

std::atomic<Sim*> made{nullptr};

__attribute__((destructor)) void report_leaks() {
  const char* wanted = std::getenv("SIMCUDA_REPORT_LEAKS");
  const Sim* s = made.load();
  if (wanted == nullptr || std::strcmp(wanted, "1") != 0) return;
  if (s == nullptr || s->process != getpid()) return;
  const SimcudaLeaks leaks = s->leaks();
  const std::pair<std::uint64_t, const char*> counts[] = {
      {leaks.handles, "handles"},     {leaks.mappings, "mappings"},
      {leaks.ranges, "ranges"},       {leaks.contexts, "context references"},
      {leaks.streams, "streams"},     {leaks.events, "events"},
      {leaks.objects, "user objects"}};
  std::string text;
  std::uint64_t sum = 0;
  for (const auto& [count, what] : counts) {
    sum += count;
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what;
  }
  if (sum != 0) std::fprintf(stderr, "simcuda (test double): leaked %s\n", text.c_str());
}

}  // namespace

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
  for (Context& candidate : contexts) {
    if (reinterpret_cast<CUcontext>(&candidate) == context && candidate.retained > 0) {
      return &candidate;
    }
  }
  return nullptr;
}

int Sim::device() const { return current_context == nullptr ? 0 : device_of(current_context); }

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

std::string describe(const char* call, std::initializer_list<Argument> arguments, CUresult code,
                     const Result& result) {
  std::string line = std::string(call) + "(";
  for (const Argument& argument : arguments) {
    if (line.back() != '(') line += ", ";
    char text[96];
    const bool is_address = std::strstr(argument.name, "ptr") != nullptr;
    std::snprintf(text, sizeof text, is_address ? "%s=0x%llx" : "%s=%llu", argument.name,
                  argument.value);
    line += text;
  }
  line += ") = ";
  const char* name = error_name(code);
  line += name ? std::string(name) : std::to_string(static_cast<int>(code));
  if (code == CUDA_SUCCESS && result) line += " -> " + std::to_string(*result);
  return line;
}

CUresult refusal(Sim& s, const char* call, Needs needs, During during) {
  // After an illegal access every call answers that, as on a device.
  if (s.model->streams.error() != CUDA_SUCCESS) return s.model->streams.error();
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
