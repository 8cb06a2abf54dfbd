// The entry points of the simulated libcuda (a test double) for streams, events, stream captures
// and graphs.
#include <utility>

#include "sim.h"

using simcuda::answer;
using simcuda::During;
using simcuda::Needs;
using simcuda::number;
using simcuda::Sim;
using simcuda::SimStreams;
using simcuda::Work;
using namespace vtensor::cuda;
using StreamPtr = std::shared_ptr<SimStreams::Stream>;

namespace {

bool is_default(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

// Finds a stream that something is asked of, under the rules of captures.
CUresult enter_stream(Sim& s, CUstream name, StreamPtr* stream) {
  *stream = s.model->streams.find(name, s.context());
  if (*stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (is_default(name)) {
    if (const StreamPtr capturing = s.model->streams.blocking_capture((*stream)->context)) {
      capturing->capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  const auto& capture = (*stream)->capture;
  if (capture != nullptr && capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return CUDA_SUCCESS;
}

// What asks whether work is done is refused while that work is only being captured.
CUresult refuse_captured(const std::shared_ptr<simcuda::Capture>& capture, CUresult code) {
  if (capture == nullptr) return CUDA_SUCCESS;
  capture->invalidated = true;
  return code;
}

// The capture that a stream is in, or none.
CUresult find_capture(Sim& s, CUstream name, CUstreamCaptureStatus* status,
                      std::shared_ptr<simcuda::Capture>* capture) {
  const StreamPtr found = s.model->streams.find(name, s.context());
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (is_default(name) && s.model->streams.blocking_capture(found->context))
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *capture = found->capture;
  *status = found->capture == nullptr     ? CU_STREAM_CAPTURE_STATUS_NONE
            : found->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

// Refused at once where its memory is not accessible.
CUresult submit_checked(Sim& s, CUstream stream, const Work& work) {
  return s.model->streams.allows(work) ? simcuda::submit(s, stream, work)
                                       : CUDA_ERROR_INVALID_VALUE;
}

CUresult fill(Sim& s, CUstream stream, CUdeviceptr at, unsigned char value, std::size_t size) {
  return submit_checked(s, stream,
                        {.kind = Work::Kind::fill, .at = at, .size = size, .value = value});
}

CUresult copy(Sim& s, CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  return submit_checked(s, stream,
                        {.kind = Work::Kind::copy, .at = to, .size = size, .from = from});
}

CUresult copy_host(Sim& s, CUstream stream, Work::Kind kind, CUdeviceptr at, void* host,
                   size_t size) {
  return submit_checked(s, stream, {.kind = kind, .at = at, .size = size, .host = host});
}

}  // namespace

CUresult simcuda::submit(Sim& s, CUstream stream, Work work) {
  StreamPtr found;
  const CUresult code = enter_stream(s, stream, &found);
  if (code != CUDA_SUCCESS) return code;
  if (found->capture != nullptr) {
    s.model->graphs.find(found->capture->graph)->nodes.push_back(std::move(work));
    return CUDA_SUCCESS;
  }
  s.model->streams.launch(found, std::move(work));
  s.run_if_eager();
  return CUDA_SUCCESS;
}

SIMCUDA_ENTRY(cuMemsetD8_v2)(CUdeviceptr ptr, unsigned char value, size_t size) {
  return answer("cuMemsetD8", Needs::context,
                [&](Sim& s) { return fill(s, nullptr, ptr, value, size); });
}

SIMCUDA_ENTRY(cuMemsetD8Async)(CUdeviceptr ptr, unsigned char value, size_t size, CUstream stream) {
  return answer("cuMemsetD8Async", Needs::context, During::any_capture,
                [&](Sim& s) { return fill(s, stream, ptr, value, size); });
}

SIMCUDA_ENTRY(cuMemcpyDtoD_v2)(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return answer("cuMemcpyDtoD", Needs::context,
                [&](Sim& s) { return copy(s, nullptr, to, from, size); });
}

SIMCUDA_ENTRY(cuMemcpyDtoDAsync_v2)(CUdeviceptr to, CUdeviceptr from, size_t size,
                                    CUstream stream) {
  return answer("cuMemcpyDtoDAsync", Needs::context, During::any_capture,
                [&](Sim& s) { return copy(s, stream, to, from, size); });
}

SIMCUDA_ENTRY(cuMemcpyDtoHAsync_v2)(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  return answer("cuMemcpyDtoHAsync", Needs::context, During::any_capture,
                [&](Sim& s) { return copy_host(s, stream, Work::Kind::to_host, from, to, size); });
}

SIMCUDA_ENTRY(cuMemcpyHtoDAsync_v2)(CUdeviceptr to, const void* from, size_t size,
                                    CUstream stream) {
  return answer("cuMemcpyHtoDAsync", Needs::context, During::any_capture, [&](Sim& s) {
    return copy_host(s, stream, Work::Kind::from_host, to, const_cast<void*>(from), size);
  });
}

SIMCUDA_ENTRY(cuCtxSynchronize)(void) {
  return simcuda::answer_waiting("cuCtxSynchronize", Needs::context, During::no_capture,
                                 [&](Sim& s, std::unique_lock<std::mutex>& lock) {
                                   const CUcontext context = s.context();
                                   // A context with a capture in it cannot be asked, whatever the
                                   // thread's mode.
                                   if (s.model->graphs.invalidate_all(context))
                                     return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                                   return simcuda::wait_until(s, context, lock, [&] {
                                     return s.model->streams.idle(context);
                                   });
                                 });
}

SIMCUDA_ENTRY(cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode* mode) {
  return answer("cuThreadExchangeStreamCaptureMode", Needs::nothing, [&](Sim&) {
    std::swap(*mode, simcuda::capture_mode);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuStreamCreate)(CUstream* stream, unsigned int flags) {
  return answer("cuStreamCreate", Needs::context, [&](Sim& s) {
    *stream = s.model->streams.make(s.context(), (flags & CU_STREAM_NON_BLOCKING) == 0);
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuStreamDestroy_v2)(CUstream stream) {
  return answer("cuStreamDestroy", Needs::context, [&](Sim& s) {
    return s.model->streams.destroy(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

SIMCUDA_ENTRY(cuStreamQuery)(CUstream stream) {
  return answer("cuStreamQuery", Needs::context, [&](Sim& s) {
    StreamPtr found;
    CUresult code = enter_stream(s, stream, &found);
    if (code != CUDA_SUCCESS) return code;
    code = refuse_captured(found->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (code != CUDA_SUCCESS) return code;
    if (s.model->streams.idle(found)) return CUDA_SUCCESS;
    const CUresult error = s.model->streams.error(found->context);
    return error != CUDA_SUCCESS ? error : CUDA_ERROR_NOT_READY;
  });
}

SIMCUDA_ENTRY(cuStreamSynchronize)(CUstream stream) {
  return simcuda::answer_waiting(
      "cuStreamSynchronize", Needs::context, During::no_capture,
      [&](Sim& s, std::unique_lock<std::mutex>& lock) {
        StreamPtr found;
        CUresult code = enter_stream(s, stream, &found);
        if (code != CUDA_SUCCESS) return code;
        code = refuse_captured(found->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        if (code != CUDA_SUCCESS) return code;
        return simcuda::wait_until(s, found->context, lock,
                                   [&] { return s.model->streams.idle(found); });
      });
}

SIMCUDA_ENTRY(cuStreamGetCtx)(CUstream stream, CUcontext* context) {
  return answer("cuStreamGetCtx", Needs::nothing, [&](Sim& s) {
    if (is_default(stream)) {
      *context = simcuda::current_context;
      return *context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    }
    const StreamPtr found = s.model->streams.find(stream, nullptr);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *context = found->context;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned int) {
  return answer("cuStreamWaitEvent", Needs::context, During::any_capture, [&](Sim& s) {
    StreamPtr found;
    const CUresult code = enter_stream(s, stream, &found);
    if (code != CUDA_SUCCESS) return code;
    const auto* const it = s.model->streams.find(event);
    if (it == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const auto& capture = it->capture;
    if (capture == nullptr) {
      if (found->capture != nullptr) {
        found->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
      }
      s.model->streams.wait(found, *it);
      s.run_if_eager();
      return CUDA_SUCCESS;
    }
    if (capture->origin == nullptr) return CUDA_ERROR_CAPTURED_EVENT;  // that capture is over
    if (found->capture == nullptr) {
      found->capture = capture;
      capture->joined.push_back(found);
    }
    return found->capture == capture ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_MERGE;
  });
}

SIMCUDA_ENTRY(cuEventCreate)(CUevent* event, unsigned int) {
  return answer("cuEventCreate", Needs::context, [&](Sim& s) {
    *event = s.model->streams.make_event(s.context());
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuEventDestroy_v2)(CUevent event) {
  return answer("cuEventDestroy", Needs::context, [&](Sim& s) {
    return s.model->streams.destroy(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

SIMCUDA_ENTRY(cuEventRecord)(CUevent event, CUstream stream) {
  return answer("cuEventRecord", Needs::context, During::any_capture, [&](Sim& s) {
    StreamPtr found;
    const CUresult code = enter_stream(s, stream, &found);
    if (code != CUDA_SUCCESS) return code;
    auto* const it = s.model->streams.find(event);
    if (it == nullptr || it->context != found->context) return CUDA_ERROR_INVALID_HANDLE;
    if (found->capture != nullptr) {
      it->capture = found->capture;
      return CUDA_SUCCESS;
    }
    s.model->streams.record(found, it);
    s.run_if_eager();
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuEventQuery)(CUevent event) {
  return answer("cuEventQuery", Needs::nothing, During::no_capture, [&](Sim& s) {
    auto* const it = s.model->streams.find(event);
    if (it == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = refuse_captured(it->capture, CUDA_ERROR_CAPTURED_EVENT);
    if (code == CUDA_SUCCESS) code = s.model->streams.error(it->context);
    if (code != CUDA_SUCCESS) return code;
    if (s.model->streams.passed(*it)) return CUDA_SUCCESS;
    const CUresult error = s.model->streams.error(it->context);
    return error != CUDA_SUCCESS ? error : CUDA_ERROR_NOT_READY;
  });
}

SIMCUDA_ENTRY(cuStreamIsCapturing)(CUstream stream, CUstreamCaptureStatus* status) {
  return answer("cuStreamIsCapturing", Needs::context, During::any_capture, [&](Sim& s) {
    std::shared_ptr<simcuda::Capture> capture;
    return find_capture(s, stream, status, &capture);
  });
}

SIMCUDA_ENTRY(cuStreamGetCaptureInfo_v2)(CUstream stream, CUstreamCaptureStatus* status,
                                         std::uint64_t* id, CUgraph* graph,
                                         const CUgraphNode** dependencies,
                                         size_t* dependency_count) {
  return answer("cuStreamGetCaptureInfo", Needs::context, During::any_capture, [&](Sim& s) {
    // Neither nodes nor the numbers of captures are simulated.
    if (id != nullptr || dependencies != nullptr || dependency_count != nullptr) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    std::shared_ptr<simcuda::Capture> capture;
    const CUresult code = find_capture(s, stream, status, &capture);
    if (code != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return code;
    if (graph != nullptr) *graph = capture->graph;
    return CUDA_SUCCESS;
  });
}

SIMCUDA_ENTRY(cuStreamBeginCapture_v2)(CUstream stream, CUstreamCaptureMode mode) {
  return answer("cuStreamBeginCapture", Needs::context, During::any_capture, [&](Sim& s) {
    if (is_default(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const StreamPtr found = s.model->streams.find(stream, s.context());
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return s.model->graphs.begin(found, mode);
  });
}

SIMCUDA_ENTRY(cuStreamEndCapture)(CUstream stream, CUgraph* graph) {
  return answer("cuStreamEndCapture", Needs::context, During::any_capture, [&](Sim& s) {
    const StreamPtr found = s.model->streams.find(stream, s.context());
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return s.model->graphs.end(found, graph);
  });
}

SIMCUDA_ENTRY(cuUserObjectCreate)(CUuserObject* object, void* pointer, CUhostFn destructor,
                                  unsigned int references, unsigned int flags) {
  return answer("cuUserObjectCreate", Needs::nothing, [&](Sim& s) {
    return s.model->graphs.make_object(object, pointer, destructor, references, flags);
  });
}

SIMCUDA_ENTRY(cuUserObjectRelease)(CUuserObject object, unsigned int references) {
  return answer("cuUserObjectRelease", Needs::nothing,
                [&](Sim& s) { return s.model->graphs.release_object(object, references); });
}

SIMCUDA_ENTRY(cuGraphRetainUserObject)(CUgraph graph, CUuserObject object, unsigned int references,
                                       unsigned int flags) {
  return answer("cuGraphRetainUserObject", Needs::nothing,
                [&](Sim& s) { return s.model->graphs.keep(graph, object, references, flags); });
}

SIMCUDA_ENTRY(cuGraphDestroy)(CUgraph graph) {
  return answer("cuGraphDestroy", Needs::nothing,
                [&](Sim& s) { return s.model->graphs.destroy(graph); });
}

SIMCUDA_ENTRY(cuGraphInstantiateWithFlags)(CUgraphExec* executable, CUgraph graph,
                                           unsigned long long) {
  return answer("cuGraphInstantiate", Needs::context,
                [&](Sim& s) { return s.model->graphs.instantiate(executable, graph); });
}

SIMCUDA_ENTRY(cuGraphExecDestroy)(CUgraphExec executable) {
  return answer("cuGraphExecDestroy", Needs::nothing,
                [&](Sim& s) { return s.model->graphs.destroy(executable); });
}

SIMCUDA_ENTRY(cuGraphLaunch)(CUgraphExec executable, CUstream stream) {
  return answer("cuGraphLaunch", Needs::context, During::any_capture, [&](Sim& s) {
    const simcuda::Graph* const graph = s.model->graphs.find(executable);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (const Work& node : graph->nodes) {
      const CUresult code = simcuda::submit(s, stream, node);
      if (code != CUDA_SUCCESS) return code;
    }
    // Its user objects stay until its last node has run, also where the executable
    // is destroyed before.
    const StreamPtr found = s.model->streams.find(stream, s.context());
    if (!graph->nodes.empty() && found->capture == nullptr && !found->queue.empty()) {
      found->queue.back().then = s.model->graphs.keep_for_launch(*graph);
    }
    return CUDA_SUCCESS;
  });
}
