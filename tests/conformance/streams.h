// What the tests of streams need beside a driver: streams of a caller, and graphs captured in them.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <string>

#include "conformance/subject.h"
#include "driver/cuda_calls.h"

namespace vtensor::conformance {

// libcuda as the user of a driver calls it, with the primary context current in this thread.
class Caller {
 public:
  explicit Caller(const std::string& library) : api(library) {
    void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded, name));
      REQUIRE_MESSAGE(static_cast<bool>(function), name);
    };
    find(begin_capture, "cuStreamBeginCapture_v2");
    find(end_capture, "cuStreamEndCapture");
    find(destroy_graph, "cuGraphDestroy");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(destroy_executable, "cuGraphExecDestroy");
    find(launch, "cuGraphLaunch");
    CHECK(api.cuInit.function(0) == CUDA_SUCCESS);
    CHECK(api.cuDevicePrimaryCtxRetain.function(&context_, 0) == CUDA_SUCCESS);
    CHECK(api.cuCtxGetCurrent.function(&before_) == CUDA_SUCCESS);
    CHECK(api.cuCtxSetCurrent.function(context_) == CUDA_SUCCESS);
  }
  ~Caller() {
    api.cuCtxSetCurrent.function(before_);
    api.cuDevicePrimaryCtxRelease.function(0);
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  CUgraph end(CUstream stream) const {
    CUgraph graph = nullptr;
    CHECK(end_capture(stream, &graph) == CUDA_SUCCESS);
    return graph;
  }

  CudaApi api;
  CUresult (*begin_capture)(CUstream, CUstreamCaptureMode) = nullptr;
  CUresult (*end_capture)(CUstream, CUgraph*) = nullptr;
  CUresult (*destroy_graph)(CUgraph) = nullptr;
  CUresult (*instantiate)(CUgraphExec*, CUgraph, unsigned long long) = nullptr;
  CUresult (*destroy_executable)(CUgraphExec) = nullptr;
  CUresult (*launch)(CUgraphExec, CUstream) = nullptr;

 private:
  CUcontext context_ = nullptr, before_ = nullptr;
};

class CallerStream {
 public:
  explicit CallerStream(const Caller& caller, unsigned flags = CU_STREAM_NON_BLOCKING)
      : caller_(caller) {
    CHECK(caller_.api.cuStreamCreate.function(&handle, flags) == CUDA_SUCCESS);
  }
  ~CallerStream() { caller_.api.cuStreamDestroy.function(handle); }
  CallerStream(const CallerStream&) = delete;
  CallerStream& operator=(const CallerStream&) = delete;

  Stream stream() const { return reinterpret_cast<Stream>(handle); }
  std::uint64_t number() const { return reinterpret_cast<std::uint64_t>(handle); }

  CUstream handle = nullptr;

 private:
  const Caller& caller_;
};

}  // namespace vtensor::conformance
