#include "sim_graphs.h"

#include <algorithm>

namespace simcuda {
namespace {

thread_local bool calling_destructor = false;

}  // namespace

void Destructors::call(CUhostFn destructor, void* argument) {
  const std::lock_guard lock(mutex_);
  waiting_.emplace_back(destructor, argument);
  more_.notify_one();
  if (started_) return;
  started_ = true;
  std::thread([this] { work(); }).detach();
}

bool Destructors::is_calling() { return calling_destructor; }

void Destructors::work() {
  calling_destructor = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return !waiting_.empty(); });
    const auto [destructor, argument] = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    destructor(argument);
    lock.lock();
  }
}

CUresult SimGraphs::begin(const std::shared_ptr<SimStreams::Stream>& stream,
                          CUstreamCaptureMode mode) {
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto graph = std::make_unique<Graph>();
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->graph = reinterpret_cast<CUgraph>(graph.get());
  graphs_.emplace(capture->graph, std::move(graph));
  stream->capture = capture;
  captures_.push_back(std::move(capture));
  return CUDA_SUCCESS;
}

CUresult SimGraphs::end(const std::shared_ptr<SimStreams::Stream>& stream, CUgraph* graph) {
  const std::shared_ptr<Capture> capture = stream->capture;
  *graph = nullptr;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
      capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  for (const auto& joined : capture->joined) joined->capture = nullptr;
  stream->capture = nullptr;
  capture->origin = nullptr;
  capture->joined.clear();
  std::erase(captures_, capture);
  if (capture->invalidated) {
    destroy(capture->graph);
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  *graph = capture->graph;
  return CUDA_SUCCESS;
}

CUresult SimGraphs::allow_unsafe_call(CUstreamCaptureMode mode) {
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  CUresult answer = CUDA_SUCCESS;
  for (const auto& capture : captures_) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool forbids = own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                             : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                   mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    capture->invalidated = true;
    answer = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return answer;
}

bool SimGraphs::invalidate_all(CUcontext context) {
  bool any = false;
  for (const auto& capture : captures_) {
    if (capture->origin->context != context) continue;
    capture->invalidated = true;
    any = true;
  }
  return any;
}

template <class Name>
CUresult SimGraphs::destroy_in(Graphs<Name>& all, Name name) {
  const auto found = all.find(name);
  if (found == all.end()) return CUDA_ERROR_INVALID_VALUE;
  let_go(found->second->kept);
  all.erase(found);
  return CUDA_SUCCESS;
}

CUresult SimGraphs::destroy(CUgraph graph) { return destroy_in(graphs_, graph); }

CUresult SimGraphs::instantiate(CUgraphExec* executable, CUgraph graph) {
  const Graph* source = find(graph);
  if (source == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<Graph>(*source);
  retain(made->kept);
  *executable = reinterpret_cast<CUgraphExec>(made.get());
  executables_.emplace(*executable, std::move(made));
  return CUDA_SUCCESS;
}

CUresult SimGraphs::destroy(CUgraphExec executable) { return destroy_in(executables_, executable); }

CUresult SimGraphs::make_object(CUuserObject* object, void* pointer, CUhostFn destructor,
                                unsigned references, unsigned flags) {
  if (destructor == nullptr || references == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto made = std::make_unique<Object>(Object{pointer, destructor, references});
  *object = reinterpret_cast<CUuserObject>(made.get());
  objects_.emplace(*object, std::move(made));
  return CUDA_SUCCESS;
}

CUresult SimGraphs::release_object(CUuserObject object, unsigned references) {
  const auto found = objects_.find(object);
  if (found == objects_.end() || references == 0) return CUDA_ERROR_INVALID_VALUE;
  Object& it = *found->second;
  if (references > it.references) return CUDA_ERROR_INVALID_VALUE;
  it.references -= references;
  if (it.references != 0) return CUDA_SUCCESS;
  destructors_.call(it.destructor, it.pointer);
  objects_.erase(found);
  return CUDA_SUCCESS;
}

CUresult SimGraphs::keep(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
  Graph* const it = find(graph);
  const auto found = objects_.find(object);
  if (it == nullptr || found == objects_.end() || references == 0 ||
      (flags & ~static_cast<unsigned>(CU_GRAPH_USER_OBJECT_MOVE)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  it->kept[object] += references;
  if (flags == 0) found->second->references += references;
  return CUDA_SUCCESS;
}

std::function<void()> SimGraphs::keep_for_launch(const Graph& executable) {
  retain(executable.kept);
  return [this, kept = executable.kept] { let_go(kept); };
}

void SimGraphs::retain(const References& kept) {
  for (const auto& [object, references] : kept) objects_.at(object)->references += references;
}

void SimGraphs::let_go(const References& kept) {
  for (const auto& [object, references] : kept) release_object(object, references);
}

}  // namespace simcuda
