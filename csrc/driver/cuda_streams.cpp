// CudaDriver: streams and fences. A fence is a CUDA event; an event serves one fence after another,
// so that a fence costs one cuEventRecord.
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/process.h"
#include "driver/cuda_driver.h"

namespace vtensor {

// All events of a driver, shared with the fences, which may outlive it. The driver's end destroys
// all events, also those in fences.
class CudaEvents {
 public:
  // A free event, or else one that `make` makes.
  template <typename Make>
  CUevent take(const Make& make) {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const CUevent event = free_.back();
      free_.pop_back();
      return event;
    }
    // Reserves room now, so that give_back allocates nothing.
    if (free_.capacity() == all_.size()) free_.reserve(2 * all_.size() + 1);
    all_.reserve(free_.capacity());
    return all_.emplace_back(make());
  }
  void give_back(CUevent event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }
  // All events, for the driver's end.
  std::vector<CUevent> release() noexcept {
    const std::lock_guard lock(mutex_);
    return std::exchange(all_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<CUevent> all_, free_;
};

namespace {

class CudaFence final : public Fence {
 public:
  explicit CudaFence(std::shared_ptr<CudaEvents> events) : events_(std::move(events)) {}
  ~CudaFence() override {
    // In a forked child a thread of the parent may hold the lock for ever.
    if (event != nullptr && !in_forked_child()) events_->give_back(event);
  }

  CUevent event = nullptr;
  mutable std::atomic<bool> passed{false};  // seen once, true for ever

 private:
  const std::shared_ptr<CudaEvents> events_;
};

const CudaFence& cuda_fence(const Fence& fence) { return static_cast<const CudaFence&>(fence); }

// The numbers 0, CU_STREAM_LEGACY and this one stand for default streams; others are handles.
constexpr Stream kPerThreadStream = 2;

// What a graph keeps: the call at the end of its user object. `release` is null if keeping it
// failed half way.
struct Kept {
  void (*release)(void*);
  void* argument;
};

void release_kept(void* pointer) {
  const std::unique_ptr<const Kept> kept(static_cast<const Kept*>(pointer));
  if (kept->release != nullptr) kept->release(kept->argument);
}

}  // namespace

void CudaDriver::open_streams() {
  events_ = std::make_shared<CudaEvents>();
  const PrimaryContext context(cuda_, "open");
  // Non-blocking: these streams and the legacy default stream do not wait for each other.
  for (Stream* ours : {&side_stream_, &copy_stream_}) {
    CUstream made = nullptr;  // the call may write a value and be refused
    cuda_.require("open", cuda_.cuStreamCreate, &made, CU_STREAM_NON_BLOCKING);
    *ours = reinterpret_cast<Stream>(made);
  }
}

// Requires: relaxed capture. Fences may live on.
void CudaDriver::close_streams() {
  // CUDA frees events and streams that are still in use later.
  if (events_ == nullptr) return;
  for (const CUevent event : events_->release()) cuda_.call(cuda_.cuEventDestroy, event);
  for (const Stream ours : {side_stream_, copy_stream_}) {
    if (ours != 0) cuda_.call(cuda_.cuStreamDestroy, handle_of(ours));
  }
}

FencePtr CudaDriver::fence(Stream stream) {
  const RelaxedCapture relaxed(cuda_, "fence");
  const PrimaryContext context(cuda_, "fence");
  refuse_capture("fence", stream);
  FencePtr fence = record("fence", stream);
  // Another thread may have begun a capture in between: then the event belongs to the graph, and
  // querying it would invalidate the capture.
  refuse_capture("fence", stream);
  return fence;
}

FencePtr CudaDriver::record(const char* operation, Stream stream) {
  const auto fence =
      std::make_shared<CudaFence>(events_);  // first: no event is lost without memory
  fence->event = events_->take([&] {
    CUevent made = nullptr;
    cuda_.require(operation, cuda_.cuEventCreate, &made, CU_EVENT_DISABLE_TIMING);
    return made;
  });
  cuda_.require(operation, cuda_.cuEventRecord, fence->event, handle_of(stream));
  return fence;
}

bool CudaDriver::passed(const Fence& fence) {
  if (cuda_fence(fence).passed.load(std::memory_order_acquire)) return true;
  const RelaxedCapture relaxed(cuda_, "passed");
  const CUresult code = cuda_.call(cuda_.cuEventQuery, cuda_fence(fence).event);
  if (code == CUDA_ERROR_NOT_READY) return false;
  cuda_.check("passed", Call::cuEventQuery, code);
  cuda_fence(fence).passed.store(true, std::memory_order_release);
  return true;
}

void CudaDriver::order(Stream stream, const Fence& fence) {
  if (cuda_fence(fence).passed.load(std::memory_order_acquire)) return;
  const PrimaryContext context(cuda_, "order");
  refuse_capture("order", stream);
  cuda_.require("order", cuda_.cuStreamWaitEvent, handle_of(stream), cuda_fence(fence).event,
                CU_EVENT_WAIT_DEFAULT);
}

// An event can be recorded only in streams of its context, and the core records with the primary
// context current. A default stream belongs to the current context; if that context is another
// device's, torch means this device's default stream.
void CudaDriver::require_own(const char* operation, Stream stream) {
  CUcontext context = nullptr;
  const CUresult code = cuda_.call(cuda_.cuStreamGetCtx, handle_of(stream), &context);
  // A bad stream is refused at its use.
  if (code != CUDA_SUCCESS || context == cuda_.context) return;
  CUdevice device = cuda_.device;
  const bool is_default = stream <= kPerThreadStream;
  if (is_default && cuda_.call(cuda_.cuCtxGetDevice, &device) != CUDA_SUCCESS) return;
  if (device != cuda_.device) return;
  throw InvalidArgument("[", operation, "] stream ", stream,
                        " is of another context than the primary one of cuda:", cuda_.device,
                        ", as those of a green context are: use a stream that was made while "
                        "the primary context, which is PyTorch's, was current");
}

bool CudaDriver::capturing(const char* operation, Stream stream) {
  require_own(operation, stream);
  const PrimaryContext context(cuda_, "capturing");
  return is_captured("capturing", stream);
}

bool CudaDriver::is_captured(const char* operation, Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult code = cuda_.call(cuda_.cuStreamIsCapturing, handle_of(stream), &status);
  // `stream` is the legacy default stream, and a stream that waits for it is captured: work in the
  // default stream would end the capture.
  if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  cuda_.check(operation, Call::cuStreamIsCapturing, code);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Work launched in a stream that is being captured would not run now.
void CudaDriver::refuse_capture(const char* operation, Stream stream) {
  if (!is_captured(operation, stream)) return;
  throw DriverError("cuStreamIsCapturing", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                    cuda_.name_of(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED), "[driver.", operation,
                    "] work in a stream was asked for that is being captured into a CUDA "
                    "graph: do this before the capture or after it");
}

void CudaDriver::keep_for_graph(Stream stream, void (*release)(void*), void* argument) {
  const char* const operation = "keep_for_graph";
  const RelaxedCapture relaxed(cuda_, operation);
  const PrimaryContext context(cuda_, operation);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  cuda_.require(operation, cuda_.cuStreamGetCaptureInfo, handle_of(stream), &status, nullptr,
                &graph, nullptr, nullptr);
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    throw InvalidArgument(
        "[driver.keep_for_graph] a stream was named that is not being captured, or whose capture "
        "was invalidated: call it between the begin and the end of a capture");
  }
  auto kept = std::make_unique<Kept>(release, argument);
  CUuserObject object = nullptr;
  cuda_.require(operation, cuda_.cuUserObjectCreate, &object, kept.get(), &release_kept, 1u,
                CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  Kept* const owned = kept.release();
  const CUresult code =
      cuda_.call(cuda_.cuGraphRetainUserObject, graph, object, 1u, CU_GRAPH_USER_OBJECT_MOVE);
  if (code == CUDA_SUCCESS) return;
  // The operation has failed, so the object's end must not call `release`. If releasing the object
  // is refused, the object is left over and calls nothing.
  owned->release = nullptr;
  if (cuda_.insist(cuda_.cuUserObjectRelease, object, 1u) != CUDA_SUCCESS) delete owned;
  throw cuda_.refusal(operation, Call::cuGraphRetainUserObject, code);
}

}  // namespace vtensor
