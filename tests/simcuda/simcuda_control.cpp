// The control interface of the simulated libcuda (a test double): see simcuda.h.
#include "sim.h"

using simcuda::Sim;
using simcuda::sim;
using simcuda::SimStreams;
using simcuda::Work;
using namespace vtensor::cuda;

namespace {

std::shared_ptr<SimStreams::Stream> stream_of(Sim& s, std::uint64_t stream) {
  return s.model->streams.find(reinterpret_cast<CUstream>(stream), s.context());
}

// Changes what a stream may do; -1 where there is no such stream.
template <class Change>
int change_stream(std::uint64_t stream, Change change) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  const auto found = stream_of(s, stream);
  if (found == nullptr) return -1;
  change(s.model->streams, *found);
  if (s.settings.eager) s.model->streams.run();
  return 0;
}

int hold(std::uint64_t stream, bool held) {
  if (stream != SIMCUDA_ALL_STREAMS) {
    return change_stream(
        stream, [&](SimStreams& streams, SimStreams::Stream& it) { streams.hold(it, held); });
  }
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  s.model->streams.hold_all(held);
  if (s.settings.eager) s.model->streams.run();
  return 0;
}

}  // namespace

SIMCUDA_EXPORT int simcuda_configure(const char* setting, uint64_t value) {
  std::lock_guard lock(sim().mutex);
  std::uint64_t* found = sim().settings.find(setting);
  if (found == nullptr) return -1;
  *found = value;
  return 0;
}

SIMCUDA_EXPORT void simcuda_reset(void) {
  Sim& s = sim();
  std::lock_guard lock(s.mutex);
  s.settings = simcuda::Settings::from_environment();
  s.control = simcuda::CallControl();
  s.model = std::make_unique<simcuda::Model>(s.destructors);
  s.contexts = {};
  s.others.clear();
  s.initialised = false;
  simcuda::capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;  // of this thread
}

SIMCUDA_EXPORT int simcuda_fail(const char* call, uint64_t skip, uint64_t refuse, int code) {
  if (!simcuda::CallControl::is_call(call)) return -1;
  std::lock_guard lock(sim().mutex);
  sim().control.fail(call, skip, refuse, static_cast<CUresult>(code));
  return 0;
}

SIMCUDA_EXPORT uint64_t simcuda_disarm(void) {
  std::lock_guard lock(sim().mutex);
  return sim().control.disarm();
}

SIMCUDA_EXPORT int simcuda_set_latency(const char* call, double microseconds) {
  if (!simcuda::CallControl::is_call(call)) return -1;
  std::lock_guard lock(sim().mutex);
  sim().control.set_latency(call, microseconds);
  return 0;
}

SIMCUDA_EXPORT int simcuda_hold_calls(const char* call, int hold) {
  if (!simcuda::CallControl::is_call(call)) return -1;
  std::lock_guard lock(sim().mutex);
  sim().control.hold(call, hold != 0);
  return 0;
}

SIMCUDA_EXPORT SimcudaLeaks simcuda_leaks(void) {
  std::lock_guard lock(sim().mutex);
  return sim().leaks();
}

SIMCUDA_EXPORT const char* simcuda_describe(const SimcudaLeaks* left) {
  thread_local std::string text;
  text = simcuda::describe(*left);
  return text.c_str();
}

SIMCUDA_EXPORT uint64_t simcuda_free_memory(int device) {
  std::lock_guard lock(sim().mutex);
  return sim().free_memory(device);
}

SIMCUDA_EXPORT uint64_t simcuda_mapping_at(uint64_t address, int* access) {
  std::lock_guard lock(sim().mutex);
  CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  const std::uint64_t handle = sim().model->memory.handle_at(address, &flags);
  *access = static_cast<int>(flags);
  return handle;
}

SIMCUDA_EXPORT uint64_t simcuda_calls(const char* call) {
  std::lock_guard lock(sim().mutex);
  return sim().control.count(call);
}

SIMCUDA_EXPORT uint64_t simcuda_refusals(void) {
  std::lock_guard lock(sim().mutex);
  return sim().control.refusals();
}

SIMCUDA_EXPORT int simcuda_hold(uint64_t stream) { return hold(stream, true); }

SIMCUDA_EXPORT int simcuda_release(uint64_t stream) { return hold(stream, false); }

SIMCUDA_EXPORT int simcuda_step(uint64_t stream) {
  return change_stream(stream,
                       [](SimStreams& streams, SimStreams::Stream& it) { streams.step(it); });
}

SIMCUDA_EXPORT void simcuda_late_events(uint64_t queries, double milliseconds) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  s.model->streams.set_late(queries, milliseconds);
  if (s.settings.eager) s.model->streams.run();
}

SIMCUDA_EXPORT void simcuda_unseen_events(uint64_t queries) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  s.model->streams.set_unseen(queries);
}

SIMCUDA_EXPORT int simcuda_launch(uint64_t stream, uint64_t address, uint64_t size, int writes) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  Work work{.kind = writes != 0 ? Work::Kind::fill : Work::Kind::read,
            .at = address,
            .size = size,
            .value = static_cast<unsigned char>(writes)};
  return simcuda::submit(s, reinterpret_cast<CUstream>(stream), std::move(work));
}

SIMCUDA_EXPORT int simcuda_occupy(uint64_t stream, double milliseconds) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  const auto found = stream_of(s, stream);
  if (found == nullptr) return -1;
  s.model->streams.occupy(found, milliseconds);
  return 0;
}

SIMCUDA_EXPORT int simcuda_take_memory(int device, int64_t bytes) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  if (!s.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  return s.model->memory.take(device, bytes, s.free_memory(device));
}

SIMCUDA_EXPORT uint64_t simcuda_make_context(int device) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  s.others.push_back(std::make_unique<simcuda::Context>(device, 1));
  return simcuda::number(s.others.back().get());
}

SIMCUDA_EXPORT uint64_t simcuda_make_stream(int blocking) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  return simcuda::number(s.model->streams.make(s.context(), blocking != 0));
}

SIMCUDA_EXPORT int simcuda_destroy_stream(uint64_t stream) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  return s.model->streams.destroy(reinterpret_cast<CUstream>(stream)) ? 0 : -1;
}

SIMCUDA_EXPORT uint64_t simcuda_pending(uint64_t stream) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  const auto found = stream_of(s, stream);
  return found == nullptr ? 0 : found->queue.size();
}

SIMCUDA_EXPORT void simcuda_run(void) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  s.model->streams.run();
}

SIMCUDA_EXPORT uint64_t simcuda_illegal_accesses(void) {
  Sim& s = sim();
  const std::lock_guard lock(s.mutex);
  return s.model->streams.illegal_accesses();
}
