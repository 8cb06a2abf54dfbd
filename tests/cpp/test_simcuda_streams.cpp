// The simulated libcuda keeps the rules of streams, events, captures and graphs: a test double that
// forgives would hide the driver's mistakes.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "simulation.h"
#include "support.h"

using vtensor::comes_true;
using vtensor::conformance::CallerStream;
using namespace vtensor::cuda;

namespace {

// Two pages, accessible, and a caller's streams.
struct Streams : Simulation {
  CallerStream one{caller}, two{caller}, blocking{caller, CU_STREAM_DEFAULT};
  CUdeviceptr range = reserve(2);
  CUmemGenericAllocationHandle handles[2] = {create(), create()};

  Streams() {
    control.configure("sync_timeout", 50);
    for (const int page : {0, 1}) map_page(page);
  }

  void map_page(int page) {
    const CUdeviceptr at = range + static_cast<std::size_t>(page) * kPage;
    CHECK(map(at, handles[page]) == CUDA_SUCCESS);
    CHECK(set_access(at, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
  }
  CUresult launch(std::uint64_t stream, int writes, std::size_t page = 0) {
    return static_cast<CUresult>(control.launch(stream, range + page * kPage, kPage, writes));
  }
  unsigned char byte(std::size_t page = 0) const {
    return vtensor::cuda::byte(range + page * kPage);
  }
  CUevent make_event() {
    CUevent event = nullptr;
    CHECK(api.cuEventCreate.function(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    return event;
  }
  CUevent record(const CallerStream& stream) {
    const CUevent event = make_event();
    CHECK(api.cuEventRecord.function(event, stream.handle) == CUDA_SUCCESS);
    return event;
  }
};

CUresult set_mode(const vtensor::CudaApi& api, CUstreamCaptureMode mode) {
  return api.cuThreadExchangeStreamCaptureMode.function(&mode);
}

}  // namespace

TEST_CASE("the default stream and blocking ones wait for each other") {
  Streams s;
  s.control.hold(s.blocking.number());
  CHECK(s.launch(s.blocking.number(), 1) == CUDA_SUCCESS);
  const CUevent event = s.make_event();
  CHECK(s.api.cuEventRecord.function(event, nullptr) == CUDA_SUCCESS);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_ERROR_NOT_READY);
  CHECK(s.launch(0, 2) == CUDA_SUCCESS);
  CHECK(s.launch(s.one.number(), 3, 1) == CUDA_SUCCESS);  // non-blocking
  CHECK(s.byte(1) == 3);
  CHECK(s.control.pending(0) == 2);
  s.control.release(s.blocking.number());
  CHECK(s.api.cuEventQuery.function(event) == CUDA_SUCCESS);
  CHECK(s.byte() == 2);

  s.control.hold(0);
  CHECK(s.launch(0, 4) == CUDA_SUCCESS);
  CHECK(s.launch(s.blocking.number(), 5) == CUDA_SUCCESS);
  CHECK(s.control.pending(s.blocking.number()) == 1);
  s.control.release(0);
  CHECK(s.byte() == 5);
}

TEST_CASE("an event is what it was recorded behind last, and a wait what it was at the time") {
  Streams s;
  const CUevent event = s.make_event();
  CHECK(s.api.cuEventQuery.function(event) == CUDA_SUCCESS);  // never recorded
  s.control.hold(s.one.number());
  CHECK(s.launch(s.one.number(), 1) == CUDA_SUCCESS);
  CHECK(s.api.cuEventRecord.function(event, s.one.handle) == CUDA_SUCCESS);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_ERROR_NOT_READY);
  CHECK(s.api.cuStreamWaitEvent.function(s.two.handle, event, 0) == CUDA_SUCCESS);
  CHECK(s.launch(s.two.number(), 2) == CUDA_SUCCESS);
  CHECK(s.api.cuEventRecord.function(event, s.blocking.handle) == CUDA_SUCCESS);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_SUCCESS);
  CHECK(s.control.pending(s.two.number()) == 2);
  CHECK(s.api.cuStreamQuery.function(s.two.handle) == CUDA_ERROR_NOT_READY);
  s.control.release(s.one.number());
  CHECK(s.api.cuStreamQuery.function(s.two.handle) == CUDA_SUCCESS);
  CHECK(s.byte() == 2);
}

TEST_CASE("an event passes late, or never") {
  Streams s;
  const auto passed = [&](CUevent event) {
    const CUresult answer = s.api.cuEventQuery.function(event);
    CHECK((answer == CUDA_SUCCESS || answer == CUDA_ERROR_NOT_READY));
    return answer == CUDA_SUCCESS;
  };
  s.control.late_events(3, 0);
  const CUevent asked = s.record(s.one);
  for (int i = 0; i < 3; ++i) CHECK_FALSE(passed(asked));
  CHECK(passed(asked));

  s.control.late_events(0, 20);
  const auto start = std::chrono::steady_clock::now();
  const CUevent later = s.record(s.one);
  CHECK(comes_true([&] { return passed(later); }));
  CHECK(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(20));

  s.control.late_events(SIMCUDA_ALL_STREAMS, 0);
  const CUevent never = s.record(s.one);
  for (int i = 0; i < 100; ++i) CHECK_FALSE(passed(never));
  s.control.late_events(0, 0);
  CHECK(passed(never));
}

TEST_CASE("an event may be seen late, and holds nothing back") {
  Streams s;
  s.control.unseen_events(2);
  const CUevent event = s.record(s.one);
  CHECK(s.launch(s.one.number(), 1) == CUDA_SUCCESS);
  CHECK(s.byte() == 1);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_ERROR_NOT_READY);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_ERROR_NOT_READY);
  CHECK(s.api.cuEventQuery.function(event) == CUDA_SUCCESS);
}

TEST_CASE("synchronising waits for what another thread releases, and never for ever") {
  Streams s;
  s.control.hold(s.one.number());
  CHECK(s.launch(s.one.number(), 1) == CUDA_SUCCESS);
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_ERROR_LAUNCH_TIMEOUT);
  s.control.configure("sync_timeout", 10'000);
  std::thread releases([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    s.control.release(s.one.number());
  });
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_SUCCESS);
  releases.join();
  CHECK(s.byte() == 1);
  // Events that only want to be queried more often are waited out; others are not.
  s.control.late_events(1000, 0);
  s.record(s.one);
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_SUCCESS);
  s.control.late_events(SIMCUDA_ALL_STREAMS, 0);
  s.record(s.one);
  s.control.configure("sync_timeout", 5);
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_ERROR_LAUNCH_TIMEOUT);
}

TEST_CASE("an event is recorded in streams of its own context, and waited for by all") {
  Streams s;
  const auto other = reinterpret_cast<CUcontext>(s.control.make_context(0));
  CUcontext own = nullptr, found = nullptr;
  CHECK(s.api.cuCtxGetCurrent.function(&own) == CUDA_SUCCESS);
  CHECK(s.api.cuCtxSetCurrent.function(other) == CUDA_SUCCESS);
  const auto foreign = reinterpret_cast<CUstream>(s.control.make_stream(0));
  CHECK(s.api.cuStreamGetCtx.function(nullptr, &found) == CUDA_SUCCESS);
  CHECK(found == other);
  CHECK(s.api.cuCtxSetCurrent.function(own) == CUDA_SUCCESS);
  CHECK(s.api.cuStreamGetCtx.function(foreign, &found) == CUDA_SUCCESS);
  CHECK(found == other);
  CHECK(s.api.cuStreamGetCtx.function(s.one.handle, &found) == CUDA_SUCCESS);
  CHECK(found == own);
  const CUevent event = s.make_event();
  CHECK(s.api.cuEventRecord.function(event, foreign) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(s.api.cuEventRecord.function(event, s.one.handle) == CUDA_SUCCESS);
  CHECK(s.api.cuStreamWaitEvent.function(foreign, event, 0) == CUDA_SUCCESS);
  // The default stream of a context is its own, too.
  s.control.hold(0);
  CHECK(s.launch(0, 1) == CUDA_SUCCESS);
  CHECK(s.api.cuCtxSetCurrent.function(other) == CUDA_SUCCESS);
  CHECK(s.launch(0, 2, 1) == CUDA_SUCCESS);
  CHECK(s.byte(1) == 2);
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_SUCCESS);
  CHECK(s.api.cuCtxSetCurrent.function(nullptr) == CUDA_SUCCESS);
  CHECK(s.api.cuStreamGetCtx.function(nullptr, &found) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(s.api.cuCtxSetCurrent.function(own) == CUDA_SUCCESS);
  s.control.release(0);
}

TEST_CASE("a mapping that is replaced under a running kernel is an illegal access") {
  Streams s;
  s.control.hold(s.one.number());
  CHECK(s.launch(s.one.number(), 0) == CUDA_SUCCESS);
  CHECK(s.api.cuMemUnmap.function(s.range, kPage) == CUDA_SUCCESS);
  CHECK(s.control.illegal_accesses() == 1);
  s.map_page(0);  // accessible again, and another mapping
  s.control.release(s.one.number());
  CHECK(s.control.illegal_accesses() == 2);
  CHECK(s.api.cuStreamQuery.function(s.two.handle) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_CASE("access taken away under a running kernel is an illegal access, mapping beside it none") {
  Streams s;
  s.control.hold(s.one.number());
  CHECK(s.launch(s.one.number(), 7) == CUDA_SUCCESS);
  CHECK(s.api.cuMemUnmap.function(s.range + kPage, kPage) == CUDA_SUCCESS);
  s.map_page(1);
  CHECK(s.control.illegal_accesses() == 0);
  CHECK(s.set_access(s.range, 1, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_SUCCESS);
  CHECK(s.control.illegal_accesses() == 1);
  s.control.release(s.one.number());
  CHECK(s.control.illegal_accesses() == 2);
  CHECK(s.api.cuCtxSynchronize.function() == CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_CASE("beside a global capture unsafe calls are refused, and end it") {
  // Ended, where anything was refused.
  const auto ends_with = [](Streams& s, CUresult wanted) {
    CUgraph graph = nullptr;
    CHECK(s.caller.end_capture(s.one.handle, &graph) == wanted);
    if (graph != nullptr) CHECK(s.caller.destroy_graph(graph) == CUDA_SUCCESS);
  };
  Streams s;
  const CUevent event = s.record(s.two);
  for (const CUstreamCaptureMode capture :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CU_STREAM_CAPTURE_MODE_RELAXED}) {
    for (const CUstreamCaptureMode thread :
         {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
          CU_STREAM_CAPTURE_MODE_RELAXED}) {
      for (const bool elsewhere : {false, true}) {
        CAPTURE(static_cast<int>(capture));
        CAPTURE(static_cast<int>(thread));
        CAPTURE(elsewhere);
        const bool refused = thread != CU_STREAM_CAPTURE_MODE_RELAXED &&
                             (elsewhere ? capture == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                              thread == CU_STREAM_CAPTURE_MODE_GLOBAL
                                        : capture != CU_STREAM_CAPTURE_MODE_RELAXED);
        REQUIRE(s.caller.begin_capture(s.one.handle, capture) == CUDA_SUCCESS);
        const auto ask = [&] {
          CHECK(set_mode(s.api, thread) == CUDA_SUCCESS);
          CHECK(s.api.cuEventQuery.function(event) ==
                (refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS));
          CHECK(set_mode(s.api, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
        };
        elsewhere ? std::thread(ask).join() : ask();
        ends_with(s, refused ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
      }
    }
  }
  // What launches is safe.
  REQUIRE(s.caller.begin_capture(s.one.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CHECK(s.launch(s.two.number(), 3) == CUDA_SUCCESS);
  CHECK(s.api.cuEventRecord.function(event, s.two.handle) == CUDA_SUCCESS);
  CHECK(s.byte() == 3);
  ends_with(s, CUDA_SUCCESS);
}

TEST_CASE("captured streams and events cannot be asked, nor be waited on from outside") {
  Streams s;
  const CUevent outside = s.record(s.two), inside = s.make_event();
  CHECK(set_mode(s.api, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
  const auto breaks = [&](CUresult answer, auto call) {
    REQUIRE(s.caller.begin_capture(s.one.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    CHECK(s.api.cuEventRecord.function(inside, s.one.handle) == CUDA_SUCCESS);
    CHECK(call() == answer);
    CHECK(s.launch(s.one.number(), 1) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CUgraph graph = nullptr;
    CHECK(s.caller.end_capture(s.one.handle, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(graph == nullptr);
  };
  breaks(CUDA_ERROR_CAPTURED_EVENT, [&] { return s.api.cuEventQuery.function(inside); });
  breaks(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
         [&] { return s.api.cuStreamQuery.function(s.one.handle); });
  breaks(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return s.api.cuCtxSynchronize.function(); });
  breaks(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
         [&] { return s.api.cuStreamWaitEvent.function(s.one.handle, outside, 0); });
  set_mode(s.api, CU_STREAM_CAPTURE_MODE_GLOBAL);

  // While a blocking stream captures, the default stream must not be used.
  REQUIRE(s.caller.begin_capture(s.blocking.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CHECK(s.api.cuStreamIsCapturing.function(nullptr, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(s.api.cuStreamIsCapturing.function(s.blocking.handle, &status) == CUDA_SUCCESS);
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(s.launch(0, 1) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(s.api.cuStreamIsCapturing.function(s.blocking.handle, &status) == CUDA_SUCCESS);
  CHECK(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  CUgraph graph = nullptr;
  CHECK(s.caller.end_capture(s.blocking.handle, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(s.caller.begin_capture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL) ==
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

TEST_CASE("user objects end in a thread of the driver's, where no call is allowed") {
  Streams s;
  struct Seen {
    const vtensor::CudaApi& api;
    std::atomic<int> answer;
    std::thread::id thread;
  } seen{s.api, -1, {}};
  CUuserObject object = nullptr;
  const auto destructor = [](void* pointer) {
    auto& it = *static_cast<Seen*>(pointer);
    CUcontext context = nullptr;
    it.thread = std::this_thread::get_id();
    it.answer = it.api.cuCtxGetCurrent.function(&context);
  };
  CHECK(s.api.cuUserObjectCreate.function(&object, &seen, destructor, 1,
                                          CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) == CUDA_SUCCESS);
  CHECK(s.api.cuUserObjectRelease.function(object, 1) == CUDA_SUCCESS);
  CHECK(comes_true([&] { return seen.answer != -1; }));
  CHECK(seen.answer == CUDA_ERROR_NOT_PERMITTED);
  CHECK(seen.thread != std::this_thread::get_id());
}
