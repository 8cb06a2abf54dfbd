// Order between streams and the core: fences, the driver's own stream, and stream captures.
//
// A fence is a CUDA event. Events are made once and serve one fence after the other, so that a
// fence costs one cuEventRecord.
#pragma once

#include <chrono>

#include "driver/cuda_calls.h"
#include "driver/driver.h"

namespace vtensor {

inline CUstream handle_of(Stream stream) { return reinterpret_cast<CUstream>(stream); }

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
  // Whether nothing runs on the side stream, asked once by `close`. An unknown answer is "no".
  bool side_is_idle();

  // As in the contract of Driver.
  FencePtr fence(Stream stream);
  bool passed(const Fence& fence);
  void order(Stream stream, const Fence& fence);
  bool capturing(const char* operation, Stream stream);
  void keep_for_graph(Stream stream, void (*release)(void*), void* argument);

  // What follows needs the primary context, and `side_ends` relaxed capture too.
  // Throws if the stream is being captured: what is launched there would not run now.
  void refuse_capture(const char* operation, Stream stream);
  void let_wait(const char* operation, Stream stream, const Fence& fence);
  // Waits for what was launched on the side stream. False if it has not ended by `deadline`.
  bool side_ends(const char* operation, Deadline deadline);

 private:
  void require_own(const char* operation, Stream stream);
  bool is_captured(const char* operation, Stream stream);
  FencePtr record(const char* operation, Stream stream);
  bool query(const char* operation, const Fence& fence);

  CudaCalls& cuda_;
  std::shared_ptr<CudaEvents> events_;
  CUstream side_ = nullptr, copies_ = nullptr;
};

}  // namespace vtensor
