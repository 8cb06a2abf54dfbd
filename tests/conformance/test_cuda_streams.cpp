// Fences, copies and time-outs of the CUDA driver over streams of the simulated libcuda that tests
// hold back.
#include <doctest/doctest.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "base/errors.h"
#include "conformance/streams.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

namespace {

constexpr std::size_t kPageSize = SimulatedCuda::kPageSize;

// Gives the device up soon, which does not give itself up.
struct Hasty : SimulatedCuda {
  static void prepare() {
    SimulatedCuda::prepare();
    control().configure("sync_timeout", 60'000);
  }
  static std::unique_ptr<Driver> open() {
    CudaOptions options = simulated(kPageSize);
    options.timeout = std::chrono::milliseconds(50);
    return make_cuda_driver(options);
  }
};

// A wait that the driver gave up goes on in a thread, until the device has finished.
std::size_t threads_here() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(threads), end(threads)));
}

// Two pages mapped side by side, and two streams of a caller.
template <class T>
struct SceneOf : Bench<T> {
  const SimcudaControl& control = SimulatedCuda::control();
  Caller caller{simcuda_library()};
  CallerStream one{caller}, two{caller};
  std::vector<Handle> handles = this->make_handles(2, 1);
  Address range = this->driver->reserve(2);

  SceneOf() { this->map(range, handles, Access::writable); }
  ~SceneOf() { control.release(SIMCUDA_ALL_STREAMS); }

  // A kernel that stores `value` in a page.
  void launch(const CallerStream& stream, std::size_t page, int value) {
    CHECK(control.launch(stream.number(), range + page * kPageSize, kPageSize, value) ==
          CUDA_SUCCESS);
  }
  // And the stream is held: the kernel runs until that is over.
  void launch_held(const CallerStream& stream, std::size_t page, int value) {
    control.hold(stream.number());
    launch(stream, page, value);
  }
};
using Scene = SceneOf<SimulatedCuda>;

}  // namespace

TEST_CASE("streams of another context are refused, also its default stream") {
  Scene s;
  const auto own = [&](const CallerStream& stream) {
    s.driver->capturing("test", stream.stream());
    s.driver->capturing("test", 0);
  };
  const auto refused = [&](Stream stream) {
    try {
      s.driver->capturing("test", stream);
      FAIL("taken");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).starts_with("[test] stream " + std::to_string(stream)));
      CHECK(std::string(error.what()).find("green context") != std::string::npos);
    }
  };
  own(s.one);
  CUcontext before = nullptr;
  s.caller.api.cuCtxGetCurrent.function(&before);
  s.caller.api.cuCtxSetCurrent.function(reinterpret_cast<CUcontext>(s.control.make_context(0)));
  {
    const CallerStream foreign(s.caller);
    refused(foreign.stream());
    refused(0);
    s.caller.api.cuCtxSetCurrent.function(before);
    refused(foreign.stream());
    own(s.two);
    CHECK_THROWS_AS(s.driver->fence(foreign.stream()), DriverError);
  }
  s.caller.api.cuCtxSetCurrent.function(nullptr);
  own(s.one);
  // Another device's default stream is current where a program changes devices: ours is meant.
  s.control.configure("devices", 2);
  s.caller.api.cuCtxSetCurrent.function(reinterpret_cast<CUcontext>(s.control.make_context(1)));
  own(s.one);
  s.caller.api.cuCtxSetCurrent.function(before);
}

TEST_CASE("a fence passes when its stream's work is done, in no order with other streams") {
  Scene s;
  s.control.hold(s.one.number());
  s.control.hold(s.two.number());
  s.launch(s.one, 0, 7);
  s.launch(s.two, 1, 8);
  const FencePtr first = s.driver->fence(s.one.stream());
  const FencePtr second = s.driver->fence(s.two.stream());
  s.launch(s.one, 0, 9);  // behind the fence: not waited for
  const FencePtr third = s.driver->fence(s.one.stream());
  CHECK_FALSE(s.driver->passed(*first));
  s.control.release(s.two.number());
  CHECK(s.driver->passed(*second));
  CHECK_FALSE(s.driver->passed(*first));
  s.control.step(s.one.number());  // the kernel
  CHECK_FALSE(s.driver->passed(*first));
  s.control.step(s.one.number());  // the event
  CHECK(s.driver->passed(*first));
  CHECK_FALSE(s.driver->passed(*third));
  CHECK(s.control.pending(s.one.number()) == 2);

  // What has passed is not asked for again.
  const std::uint64_t calls = s.calls();
  CHECK(s.driver->passed(*first));
  s.driver->order(s.two.stream(), *first);
  CHECK(s.calls() == calls);
}

TEST_CASE("the driver's own stream and the default stream do not wait for each other") {
  Scene s;
  s.control.hold(0);
  CHECK(s.control.launch(0, s.range, kPageSize, 7) == CUDA_SUCCESS);
  const FencePtr own = s.driver->fence(s.driver->side_stream());
  CHECK(s.driver->passed(*own));
  s.control.release(0);
  s.control.hold(s.driver->side_stream());
  s.driver->zero(s.range + kPageSize, kPageSize, s.driver->side_stream());
  const FencePtr theirs = s.driver->fence(0);
  CHECK(s.driver->passed(*theirs));
  s.control.release(s.driver->side_stream());
}

TEST_CASE("order holds a stream's later work back until the fence has passed") {
  Scene s;
  s.launch_held(s.one, 0, 7);
  const FencePtr fence = s.driver->fence(s.one.stream());
  s.launch(s.two, 1, 4);  // before the order: free to run
  s.driver->order(s.two.stream(), *fence);
  s.launch(s.two, 0, 8);
  s.control.run();
  CHECK(HostPages::holds(s.range + kPageSize, kPageSize, 4));
  CHECK(HostPages::holds(s.range, kPageSize, 1));
  s.control.release(s.one.number());
  CHECK(s.holds(s.range, 0, 8));
}

TEST_CASE("events are used again, and what waited for one still does") {
  Scene s;
  s.launch_held(s.one, 0, 7);
  FencePtr fence = s.driver->fence(s.one.stream());
  s.driver->order(s.two.stream(), *fence);
  s.launch(s.two, 0, 8);
  const std::uint64_t made = s.calls(Call::cuEventCreate);
  fence.reset();
  const FencePtr other = s.driver->fence(s.driver->side_stream());  // takes its event
  CHECK(s.calls(Call::cuEventCreate) == made);
  CHECK(s.driver->passed(*other));
  CHECK(s.control.pending(s.two.number()) != 0);
  const FencePtr third = s.driver->fence(s.driver->side_stream());
  CHECK(s.calls(Call::cuEventCreate) == made + 1);
  s.control.release(s.one.number());
  CHECK(s.holds(s.range, 0, 8));
}

TEST_CASE("zero waits for its turn in the stream, and for nothing itself") {
  Scene s;
  s.launch_held(s.one, 0, 7);
  s.driver->zero(s.range, kPageSize, s.one.stream());
  s.control.run();
  CHECK(HostPages::holds(s.range, kPageSize, 1));
  CHECK(s.calls(Call::cuCtxSynchronize) == 0);
  s.control.release(s.one.number());
  CHECK(s.holds(s.range, 0, 0));
}

TEST_CASE("a copy within the device waits for its turn in the stream") {
  Scene s;
  s.launch_held(s.one, 0, 7);
  s.driver->copy(CopyDirection::within, s.range + kPageSize, reinterpret_cast<void*>(s.range),
                 kPageSize, s.one.stream());
  s.control.run();
  CHECK(HostPages::holds(s.range + kPageSize, kPageSize, 2));
  s.control.release(s.one.number());
  CHECK(s.holds(s.range, 1, 7));
}

TEST_CASE("copies go in groups: a set-access, an event and an unmap each, no synchronising") {
  Scene s;
  const auto to = s.make_handles(70, 1);
  std::vector<PageCopy> copies;
  for (const Handle handle : to) copies.push_back({handle, s.range});
  const Call counted[] = {Call::cuMemSetAccess, Call::cuMemUnmap, Call::cuEventRecord,
                          Call::cuMemcpyDtoDAsync, Call::cuCtxSynchronize};
  std::vector<std::uint64_t> counts;
  for (const Call call : counted) counts.push_back(s.calls(call));
  s.driver->copy_pages(copies);
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = s.calls(counted[i]) - counts[i];
  CHECK(counts == std::vector<std::uint64_t>{3, 3, 3, 70, 0});
}

TEST_CASE("a copy that does not finish times out, and what it may write is set aside") {  // I12
  SceneOf<Hasty> s;
  const Handle to = s.driver->create(1), next = s.driver->create(1);
  s.launch_held(s.one, 0, 7);
  s.driver->order(s.driver->side_stream(), *s.driver->fence(s.one.stream()));
  const std::uint64_t mappings = s.control.leaks().mappings;
  const auto start = std::chrono::steady_clock::now();
  const PageCopy copy{to, s.range};
  try {
    s.driver->copy_pages({&copy, 1});
    FAIL("the copy returned");
  } catch (const TimedOut& error) {
    CHECK(std::string(error.what()).find("did not finish within 50 ms") != std::string::npos);
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  CHECK(s.control.leaks().mappings == mappings + 1);  // not unmapped under the copy

  // The stream is still taken, so that this one times out too, and launches nothing.
  const PageCopy another{next, s.range + kPageSize};
  CHECK_THROWS_AS(s.driver->copy_pages({&another, 1}), TimedOut);
  CHECK(s.control.leaks().mappings == mappings + 1);

  s.control.release(s.one.number());
  const Handle last = s.driver->create(1);
  copy_page(*s.driver, last, s.range);
  CHECK(s.is_marked(last, 7));
  CHECK(s.is_marked(to, 7));  // late, and in no other's way
  CHECK(s.control.leaks().mappings == mappings);
  CHECK(s.control.illegal_accesses() == 0);
}

TEST_CASE("the driver's end gives back what a late copy had, or leaves it to a copy that runs on") {
  for (const bool is_over : {true, false}) {
    CAPTURE(is_over);
    const SimcudaControl& control = SimulatedCuda::control();
    const std::size_t threads = threads_here();
    SimcudaLeaks leaks;
    {
      Bench<Hasty> bench;
      const std::uint64_t stream = control.make_stream(0);
      const auto handles = bench.make_handles(2, 1);
      const Address range = bench.driver->reserve(1);
      bench.map(range, {&handles[0], 1}, Access::writable);
      control.hold(stream);
      bench.driver->order(bench.driver->side_stream(), *bench.driver->fence(stream));
      const PageCopy copy{handles[1], range};
      CHECK_THROWS_AS(bench.driver->copy_pages({&copy, 1}), TimedOut);
      if (is_over) {
        control.release(stream);
        const FencePtr fence = bench.driver->fence(bench.driver->side_stream());
        CHECK(bench.driver->passed(*fence));  // what reads the source
        bench.unmap(range, 1);
        bench.driver->free_range(range, 1);
      }
      const auto start = std::chrono::steady_clock::now();
      bench.driver.reset();
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
      leaks = control.leaks();
      control.release(stream);
      control.destroy_stream(stream);
    }
    CHECK(comes_true([&] { return threads_here() <= threads; }));
    CHECK(control.illegal_accesses() == 0);
    CHECK(leaks.handles == 0);
    CHECK(leaks.mappings == (is_over ? 0 : 2));  // the caller's range is still there, too
    CHECK(leaks.ranges == (is_over ? 0 : 2));
    CHECK(leaks.contexts == (is_over ? 0 : 1));
    CHECK(leaks.events == 0);
  }
}

TEST_CASE("the driver's end waits within a bound, and leaves what the device may use") {  // I12
  SceneOf<Hasty> s;
  const std::size_t threads = threads_here();
  s.launch_held(s.one, 0, 7);
  const auto start = std::chrono::steady_clock::now();
  s.driver.reset();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  CHECK(s.control.leaks().mappings == 2);
  CHECK(s.control.leaks().contexts == 2);  // the caller's, and the one that the kernel needs
  CHECK(s.control.leaks().handles == 0);   // the mappings hold their memory
  s.control.release(s.one.number());
  CHECK(s.holds(s.range, 0, 7));
  CHECK(s.control.illegal_accesses() == 0);
  CHECK(comes_true([&] { return threads_here() <= threads; }));
}

TEST_CASE("a clean end does not wait for the device") {
  Scene s;
  s.control.hold(s.one.number());
  CHECK(s.control.launch(s.one.number(), s.range, 0, 0) == CUDA_SUCCESS);
  copy_page(*s.driver, s.driver->create(1), s.range);
  s.unmap(s.range, s.handles.size());
  s.driver->free_range(s.range, 2);
  const std::uint64_t before = s.control.calls("cuCtxSynchronize");
  s.driver.reset();
  CHECK(s.control.calls("cuCtxSynchronize") == before);
  CHECK(s.control.leaks().ranges == 0);
}

TEST_CASE("a worker's query is one call, and leaves the thread relaxed") {
  Scene s;
  s.control.hold(s.one.number());
  const FencePtr fence = s.driver->fence(s.one.stream());
  std::thread([&] {
    thread_role = ThreadRole::mapper;
    CHECK_FALSE(s.driver->passed(*fence));
    s.driver->fence(s.two.stream());
    const std::uint64_t calls = s.calls();
    CHECK_FALSE(s.driver->passed(*fence));
    CHECK(s.calls() == calls + 1);
    const std::uint64_t fenced = s.calls();
    s.driver->fence(s.two.stream());  // the event; whether it is captured, before and after
    CHECK(s.calls() == fenced + 3);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CHECK(s.caller.api.cuThreadExchangeStreamCaptureMode.function(&mode) == CUDA_SUCCESS);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  }).join();
  // One whose context was refused is not in it.
  std::thread([&] {
    thread_role = ThreadRole::mapper;
    s.driver->meter().fail_after(2);  // the capture mode, the context that is current, another one
    CHECK_THROWS_AS(s.driver->fence(s.two.stream()), DriverError);
    CHECK(s.driver->meter().refused(Call::cuCtxSetCurrent) == 1);
    s.driver->fence(s.two.stream());
  }).join();
  // Others keep the mode they had.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  CHECK(s.caller.api.cuThreadExchangeStreamCaptureMode.function(&mode) == CUDA_SUCCESS);
  CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  s.driver->passed(*fence);
  mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  CHECK(s.caller.api.cuThreadExchangeStreamCaptureMode.function(&mode) == CUDA_SUCCESS);
  CHECK(mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

TEST_CASE("a forked child drops fences without a driver call, whatever locks were held") {  // I13
  Scene s;
  FencePtr fence = s.driver->fence(s.one.stream());
  CHECK(in_child([&] {
          fence.reset();
          s.driver.reset();
          return 0;
        }) == 0);
  CHECK(s.driver->passed(*fence));
}
