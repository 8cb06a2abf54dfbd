// The control interface of the simulated libcuda (a test double): see simcuda.h.
#include "sim.h"

using simcuda::CallControl;
using simcuda::Sim;
using simcuda::SimStreams;
using simcuda::Work;
using namespace vtensor::cuda;

namespace {

// The simulation, under its lock.
struct Locked {
  Sim& sim = simcuda::sim();
  const std::lock_guard<std::mutex> lock{sim.mutex};

  Sim* operator->() const { return &sim; }
  SimStreams& streams() const { return sim.model->streams; }
  // Null where there is no such stream.
  std::shared_ptr<SimStreams::Stream> find(std::uint64_t stream) const {
    return streams().find(reinterpret_cast<CUstream>(stream), sim.context());
  }
};

// -1 where there is no such call.
template <class Change>
int change_call(const char* call, Change change) {
  if (!CallControl::is_call(call)) return -1;
  change(Locked()->control);
  return 0;
}

// -1 where there is no such stream.
template <class Change>
int change_stream(std::uint64_t stream, Change change) {
  const Locked s;
  const auto found = s.find(stream);
  if (found == nullptr) return -1;
  change(s.streams(), *found);
  s->run_if_eager();
  return 0;
}

int hold(std::uint64_t stream, bool held) {
  if (stream != SIMCUDA_ALL_STREAMS) {
    return change_stream(stream, [&](auto& streams, auto& it) { streams.hold(it, held); });
  }
  const Locked s;
  s.streams().hold_all(held);
  s->run_if_eager();
  return 0;
}

}  // namespace

SIMCUDA_EXPORT int simcuda_configure(const char* setting, uint64_t value) {
  const Locked s;
  std::uint64_t* const found = s->settings.find(setting);
  if (found == nullptr) return -1;
  *found = value;
  return 0;
}

SIMCUDA_EXPORT void simcuda_reset(void) {
  const Locked s;
  s->settings = simcuda::Settings::from_environment();
  s->control = CallControl();
  s->model = std::make_unique<simcuda::Model>(s->destructors);
  s->contexts = {};
  s->others.clear();
  s->initialised = false;
  simcuda::capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;  // of this thread
}

SIMCUDA_EXPORT int simcuda_fail(const char* call, uint64_t skip, uint64_t refuse, int code) {
  return change_call(call, [&](CallControl& control) {
    control.fail(call, skip, refuse, static_cast<CUresult>(code));
  });
}

SIMCUDA_EXPORT uint64_t simcuda_disarm(void) { return Locked()->control.disarm(); }

SIMCUDA_EXPORT int simcuda_set_latency(const char* call, double microseconds) {
  return change_call(call, [&](CallControl& control) { control.set_latency(call, microseconds); });
}

SIMCUDA_EXPORT int simcuda_hold_calls(const char* call, int hold) {
  return change_call(call, [&](CallControl& control) { control.hold(call, hold != 0); });
}

SIMCUDA_EXPORT SimcudaLeaks simcuda_leaks(void) { return Locked()->leaks(); }

SIMCUDA_EXPORT const char* simcuda_describe(const SimcudaLeaks* left) {
  thread_local std::string text;
  text = simcuda::describe(*left);
  return text.c_str();
}

SIMCUDA_EXPORT uint64_t simcuda_free_memory(int device) { return Locked()->free_memory(device); }

SIMCUDA_EXPORT uint64_t simcuda_mapping_at(uint64_t address, int* access) {
  const Locked s;
  const auto* const mapping = s->model->memory.mapping_at(address);
  *access = mapping == nullptr ? 0 : static_cast<int>(mapping->access);
  return mapping == nullptr ? 0 : mapping->handle;
}

SIMCUDA_EXPORT uint64_t simcuda_calls(const char* call) { return Locked()->control.count(call); }

SIMCUDA_EXPORT uint64_t simcuda_refusals(void) { return Locked()->control.refusals(); }

SIMCUDA_EXPORT int simcuda_hold(uint64_t stream) { return hold(stream, true); }

SIMCUDA_EXPORT int simcuda_release(uint64_t stream) { return hold(stream, false); }

SIMCUDA_EXPORT int simcuda_step(uint64_t stream) {
  return change_stream(stream, [](auto& streams, auto& it) { streams.step(it); });
}

SIMCUDA_EXPORT void simcuda_late_events(uint64_t queries, double milliseconds) {
  const Locked s;
  s.streams().set_late(queries, milliseconds);
  s->run_if_eager();
}

SIMCUDA_EXPORT void simcuda_unseen_events(uint64_t queries) {
  Locked().streams().set_unseen(queries);
}

SIMCUDA_EXPORT int simcuda_launch(uint64_t stream, uint64_t address, uint64_t size, int writes) {
  return simcuda::submit(Locked().sim, reinterpret_cast<CUstream>(stream),
                         {.kind = writes != 0 ? Work::Kind::fill : Work::Kind::read,
                          .at = address,
                          .size = size,
                          .value = static_cast<unsigned char>(writes)});
}

SIMCUDA_EXPORT int simcuda_occupy(uint64_t stream, double milliseconds) {
  const Locked s;
  const auto found = s.find(stream);
  if (found == nullptr) return -1;
  s.streams().occupy(found, milliseconds);
  return 0;
}

SIMCUDA_EXPORT int simcuda_take_memory(int device, int64_t bytes) {
  const Locked s;
  if (!s->has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  return s->model->memory.take(device, bytes, s->free_memory(device));
}

SIMCUDA_EXPORT uint64_t simcuda_make_context(int device) {
  const Locked s;
  s->others.push_back(std::make_unique<simcuda::Context>(device, 1));
  return simcuda::number(s->others.back().get());
}

SIMCUDA_EXPORT uint64_t simcuda_make_stream(int blocking) {
  const Locked s;
  return simcuda::number(s.streams().make(s->context(), blocking != 0));
}

SIMCUDA_EXPORT int simcuda_destroy_stream(uint64_t stream) {
  return Locked().streams().destroy(reinterpret_cast<CUstream>(stream)) ? 0 : -1;
}

SIMCUDA_EXPORT uint64_t simcuda_pending(uint64_t stream) {
  const Locked s;
  const auto found = s.find(stream);
  return found == nullptr ? 0 : found->queue.size();
}

SIMCUDA_EXPORT void simcuda_run(void) { Locked().streams().run(); }

SIMCUDA_EXPORT uint64_t simcuda_illegal_accesses(void) {
  return Locked().streams().illegal_accesses();
}
