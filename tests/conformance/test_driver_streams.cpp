// What every driver promises of fences, of its own stream and of captures; on the host, where
// nothing runs behind the caller's back, all fences are null.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "conformance/refusals.h"
#include "conformance/streams.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

DRIVER_TEST("behind a fence the work is done") {
  Bench<T> bench;
  Driver& driver = *bench.driver;
  const auto handles = bench.make_handles(2, 1);
  const Address range = bench.mapped(handles, Access::writable);
  CHECK_FALSE(driver.capturing("test", driver.side_stream()));
  for (const Stream stream : {driver.side_stream(), Stream{0}}) {
    bench.fill(range, 0, 5);
    driver.zero(range, bench.page_size, stream);
    const FencePtr fence = driver.fence(stream);
    if (fence != nullptr) {
      driver.order(driver.side_stream(), *fence);
      CHECK(comes_true([&] { return driver.passed(*fence); }));
      CHECK(driver.passed(*fence));
      driver.order(driver.side_stream(), *fence);  // passed already
    }
    CHECK(bench.holds(range, 0, 0));
    CHECK(bench.holds(range, 1, 2));
  }
  CHECK((driver.fence(0) == nullptr) == !T::is_cuda);
}

DRIVER_TEST("copy_pages copies many pages behind what the side stream waits for") {
  constexpr std::size_t kPages = 70;  // more than are copied at a time
  Bench<T> bench;
  Driver& driver = *bench.driver;
  const auto from = bench.make_handles(kPages, 1), to = bench.make_handles(kPages, 101);
  const Address range = bench.mapped(from, Access::writable);
  driver.zero(range, bench.page_size, 0);
  std::vector<PageCopy> copies;
  for (std::size_t i = 0; i < kPages; ++i) copies.push_back({to[i], range + i * bench.page_size});
  if (const FencePtr zeroed = driver.fence(0)) driver.order(driver.side_stream(), *zeroed);
  driver.copy_pages(copies);
  CHECK(bench.is_marked(to[0], 0));
  for (std::size_t i = 1; i < kPages; ++i) {
    CHECK(bench.is_marked(to[i], static_cast<std::uint8_t>(1 + i)));
  }
  driver.copy_pages({});
}

DRIVER_TEST("fences are made and dropped by many threads, and outlive the driver") {
  T::prepare();
  const std::string before = T::leaks();
  Bench<T> bench;
  std::vector<FencePtr> left(4);
  in_threads(left.size(), [&](std::size_t t) {
    Driver& driver = *bench.driver;
    std::vector<FencePtr> mine;
    for (int i = 0; i < 50; ++i) {
      mine.push_back(driver.fence(driver.side_stream()));
      if (mine.back() != nullptr) {
        driver.order(0, *mine.back());
        driver.passed(*mine.front());
      }
      if (i % 7 == 0) mine.clear();
    }
    left[t] = driver.fence(0);
  });
  // The driver's end beside theirs.
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (FencePtr& fence : left) {
    threads.emplace_back([&go, fence = std::move(fence)]() mutable {
      while (!go) std::this_thread::yield();
      fence.reset();
    });
  }
  go = true;
  bench.driver.reset();
  for (std::thread& thread : threads) thread.join();
  CHECK(T::leaks() == before);
}

CUDA_DRIVER_TEST("nothing is launched in a stream that is being captured") {
  Bench<T> bench;
  Driver& driver = *bench.driver;
  const Caller caller(T::library());
  const CallerStream captured(caller);
  const auto handles = bench.make_handles(1, 1);
  const Address range = bench.mapped(handles, Access::writable);
  const FencePtr fence = driver.fence(driver.side_stream());
  REQUIRE(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CHECK(driver.capturing("test", captured.stream()));
  CHECK_FALSE(driver.capturing("test", driver.side_stream()));
  CHECK_THROWS_AS(driver.zero(range, 1, captured.stream()), DriverError);
  CHECK_THROWS_AS(driver.fence(captured.stream()), DriverError);
  CHECK_THROWS_AS(driver.order(captured.stream(), *fence), DriverError);
  // The capture has not noticed.
  CHECK(caller.destroy_graph(caller.end(captured.handle)) == CUDA_SUCCESS);
  CHECK_FALSE(driver.capturing("test", captured.stream()));
  CHECK(bench.holds(range, 0, 1));
}

CUDA_DRIVER_TEST("a blocking stream's capture keeps the default stream to itself") {
  Bench<T> bench;
  const Caller caller(T::library());
  const CallerStream captured(caller, CU_STREAM_DEFAULT);
  REQUIRE(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
  CHECK(bench.driver->capturing("test", 0));
  CHECK_THROWS_AS(bench.driver->fence(0), DriverError);
  CHECK(caller.destroy_graph(caller.end(captured.handle)) == CUDA_SUCCESS);
  CHECK_FALSE(bench.driver->capturing("test", 0));
}

CUDA_DRIVER_TEST("beside a capture in global mode the driver works, and does not harm it") {
  for (const bool in_worker : {false, true}) {
    CAPTURE(in_worker);
    Bench<T> bench;
    const Caller caller(T::library());
    const CallerStream captured(caller);
    REQUIRE(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    Handle handles[2];
    const auto work = [&] {
      Driver& driver = *bench.driver;
      if (in_worker) thread_role = ThreadRole::mapper;
      const Address range = driver.reserve(1);
      for (Handle& handle : handles) handle = driver.create(1);
      bench.map(range, {handles, 1}, Access::writable);
      driver.zero(range, bench.page_size, driver.side_stream());
      const FencePtr fence = driver.fence(driver.side_stream());
      driver.order(driver.side_stream(), *fence);
      CHECK(comes_true([&] { return driver.passed(*fence); }));
      const PageCopy copy{handles[1], range};
      driver.copy_pages({&copy, 1});
      char byte = 1;
      driver.copy(CopyDirection::out, range, &byte, 1, driver.copy_stream());
      driver.copy(CopyDirection::in, range, &byte, 1, driver.copy_stream());
      await_work(driver, driver.copy_stream());
      CHECK(byte == 0);
      driver.remap(range, {handles, 1}, Access::writable, {handles, 1}, Access::copy_on_write);
      bench.unmap(range, 1);
      driver.free_range(range, 1);
      CHECK(driver.free_memory() > 0);
      driver.destroy(handles[0], 1);
      const std::unique_ptr<Driver> other = T::open();  // its end gives back a handle and an event
      other->create(1);
      other->fence(other->side_stream());
    };
    in_worker ? std::thread(work).join() : work();
    CHECK(caller.destroy_graph(caller.end(captured.handle)) == CUDA_SUCCESS);
    CHECK(bench.is_marked(handles[1], 0));
  }
}

CUDA_DRIVER_TEST("what a graph keeps is released once, after all that was made from it") {
  Bench<T> bench;
  const Caller caller(T::library());
  const CallerStream captured(caller);
  std::atomic<int> released{0};
  const auto release = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
  CHECK_THROWS_AS(bench.driver->keep_for_graph(captured.stream(), release, &released),
                  InvalidArgument);
  REQUIRE(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  bench.driver->keep_for_graph(captured.stream(), release, &released);
  const CUgraph graph = caller.end(captured.handle);
  CUgraphExec executable = nullptr;
  CHECK(caller.instantiate(&executable, graph, 0) == CUDA_SUCCESS);
  CHECK(caller.destroy_graph(graph) == CUDA_SUCCESS);
  CHECK(caller.launch(executable, captured.handle) == CUDA_SUCCESS);
  await_work(*bench.driver, captured.stream());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(released == 0);
  bench.driver.reset();  // needed no longer
  CHECK(caller.destroy_executable(executable) == CUDA_SUCCESS);
  CHECK(comes_true([&] { return released == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(released == 1);
}

namespace {

// A capture in progress, and what is to be kept for its graph.
template <class T>
struct CaptureScene : Bench<T> {
  Caller caller{T::library()};
  CallerStream captured{caller};
  std::atomic<int> released{0};

  CaptureScene() {
    CHECK(caller.begin_capture(captured.handle, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  }
};

template <class T>
struct FenceScene : Bench<T> {
  FencePtr fence = this->driver->fence(0);
};

}  // namespace

CUDA_DRIVER_TEST("a refused keep_for_graph keeps nothing") {  // I8
  const auto release = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
  refuse_each_call<T, CaptureScene<T>>(
      [](CaptureScene<T>&) {},
      [&](CaptureScene<T>& s) {
        s.driver->keep_for_graph(s.captured.stream(), release, &s.released);
      },
      [&](CaptureScene<T>& s, Outcome outcome) {
        CHECK(outcome != Outcome::broken);
        CHECK(s.released == 0);
        CHECK(s.caller.destroy_graph(s.caller.end(s.captured.handle)) == CUDA_SUCCESS);
        const int wanted = outcome == Outcome::done ? 1 : 0;
        CHECK(comes_true([&] { return s.released == wanted; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(s.released == wanted);
      });
}

CUDA_DRIVER_TEST("refused fences and orders leave the driver as it was") {
  const auto works = [](FenceScene<T>& s, Outcome outcome) {
    CHECK(outcome != Outcome::broken);
    const FencePtr fence = s.driver->fence(s.driver->side_stream());
    CHECK(comes_true([&] { return s.driver->passed(*fence); }));
  };
  const auto each = [&](auto operation) {
    refuse_each_call<T, FenceScene<T>>([](FenceScene<T>&) {}, operation, works);
  };
  each([](FenceScene<T>& s) { s.driver->fence(0); });
  each([](FenceScene<T>& s) { s.driver->passed(*s.fence); });
  each([](FenceScene<T>& s) { s.driver->order(s.driver->side_stream(), *s.fence); });
  each([](FenceScene<T>& s) { s.driver->capturing("test", 0); });
  each([](FenceScene<T>& s) { s.driver->free_memory(); });
  each([](FenceScene<T>& s) {
    // A worker, which changes its thread for good.
    std::exception_ptr raised;
    std::thread([&] {
      try {
        thread_role = ThreadRole::mapper;
        s.driver->fence(s.driver->side_stream());
      } catch (...) {
        raised = std::current_exception();
      }
    }).join();
    if (raised) std::rethrow_exception(raised);
  });
}
