// Order between streams and the core: fences, the driver's own stream, and stream captures.
//
// A fence is a CUDA event. Events are made once and used by one fence after the other, so that a
// fence costs one cuEventRecord.
#pragma once

#include <chrono>

#include "driver/cuda_calls.h"
#include "driver/driver.h"

namespace vtensor {

class CudaEvents;

class CudaStreams {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  explicit CudaStreams(CudaCalls& cuda);
  void open();
  // The driver's end, in relaxed capture and the primary context. Fences may live on.
  void close();

  Stream side() const { return reinterpret_cast<Stream>(side_); }
  Stream copies() const { return reinterpret_cast<Stream>(copies_); }
  // Whether nothing runs on the side stream, as `close`: what cannot be known is "no".
  bool side_is_idle();

  FencePtr fence(Stream stream);
  bool passed(const Fence& fence);
  void order(Stream stream, const Fence& fence);
  // Throws InvalidArgument where the stream is of another context than the primary one.
  void require_own(const char* operation, Stream stream);
  bool capturing(const char* operation, Stream stream);
  // Throws where the stream is being captured: what is launched there would not run now.
  void refuse_capture(const char* operation, Stream stream);
  void keep_for_graph(Stream stream, void (*release)(void*), void* argument);

  // The parts of the above without what every operation begins with. They need the primary context,
  // and `wait` relaxed capture.
  FencePtr record(const char* operation, Stream stream);
  void let_wait(const char* operation, Stream stream, const Fence& fence);
  // False where the fence has not passed by `deadline`.
  bool wait(const char* operation, const Fence& fence, Deadline deadline);

 private:
  bool query(const char* operation, const Fence& fence);

  CudaCalls& cuda_;
  std::shared_ptr<CudaEvents> events_;
  CUstream side_ = nullptr, copies_ = nullptr;
};

}  // namespace vtensor
