// Copies between pages, and their zeroing, on the driver's own stream, after the fences of what
// wrote them.
#pragma once

#include <array>
#include <mutex>

#include "driver/cuda_mappings.h"
#include "driver/cuda_streams.h"

namespace vtensor {

class CudaCopies {
 public:
  CudaCopies(CudaCalls& cuda, CudaMappings& mappings, CudaStreams& streams)
      : cuda_(cuda), mappings_(mappings), streams_(streams) {}
  // The driver's end. False if a copy still runs: what it writes stays mapped for good.
  bool close();

  void copy(std::span<const PageCopy> copies, std::span<const FencePtr> after);
  // Zeroes a page that is mapped nowhere.
  void zero(Handle page) { copy(std::array{PageCopy{page, kZeros}}, {}); }

 private:
  static constexpr Address kZeros = 0;  // instead of an address to copy from
  using Deadline = CudaStreams::Deadline;

  void copy_some(std::span<const PageCopy> copies, Deadline deadline);
  void await_launched(std::span<const PageCopy> copies, Deadline deadline);
  void release_scratch();

  CudaCalls& cuda_;
  CudaMappings& mappings_;
  CudaStreams& streams_;

  std::mutex mutex_;        // guards what follows
  Address scratch_ = 0;     // addresses at which copies are made
  std::size_t mapped_ = 0;  // pages of it, from the first on
  bool launched_ = false;   // copies were, and may still run
};

}  // namespace vtensor
