// CudaDriver: zeroing, and copies. Copies between pages run in the side stream.
#include <algorithm>
#include <chrono>
#include <exception>
#include <vector>

#include "driver/cuda_driver.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

constexpr const char* kOperation = "copy_pages";
// One set-access and one wait serve so many pages.
constexpr std::size_t kScratchPages = 32;

}  // namespace

void CudaDriver::zero(Address at, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const RelaxedCapture relaxed(cuda_, "zero");
  const PrimaryContext context(cuda_, "zero");
  refuse_capture("zero", stream);
  cuda_.require_at("zero", cuda_.cuMemsetD8Async, at, bytes, at, 0, bytes, handle_of(stream));
}

void CudaDriver::copy(CopyDirection direction, Address at, void* memory, std::size_t bytes,
                      Stream stream) {
  const RelaxedCapture relaxed(cuda_, "copy");
  const PrimaryContext context(cuda_, "copy");
  const CUstream in = handle_of(stream);
  switch (direction) {
    case CopyDirection::out:
      cuda_.require_at("copy", cuda_.cuMemcpyDtoHAsync, at, bytes, memory, at, bytes, in);
      break;
    case CopyDirection::in:
      cuda_.require_at("copy", cuda_.cuMemcpyHtoDAsync, at, bytes, at, memory, bytes, in);
      break;
    case CopyDirection::within:
      cuda_.require_at("copy", cuda_.cuMemcpyDtoDAsync, at, bytes, at,
                       reinterpret_cast<Address>(memory), bytes, in);
  }
}

// False if a copy may still run: its pages then stay mapped for good.
bool CudaDriver::close_copies() {
  if (launched_ && cuda_.call(cuda_.cuStreamQuery, handle_of(side_stream_)) != CUDA_SUCCESS)
    return false;
  try {
    release_scratch();
    if (scratch_ != 0) free_range(scratch_, kScratchPages);
  } catch (const DriverError&) {
    // close_mappings() unmaps the rest.
  }
  return true;
}

void CudaDriver::copy_pages(std::span<const PageCopy> copies) {
  if (copies.empty()) return;
  const auto deadline = steady_clock::now() + cuda_.timeout;  // counts the wait for the mutex too
  const std::lock_guard lock(scratch_mutex_);
  const RelaxedCapture relaxed(cuda_, kOperation);
  const PrimaryContext context(cuda_, kOperation);
  while (!copies.empty()) {
    const std::size_t n = std::min(copies.size(), kScratchPages);
    copy_some(copies.first(n), deadline);
    copies = copies.subspan(n);
  }
}

void CudaDriver::copy_some(std::span<const PageCopy> copies, Deadline deadline) {
  if (scratch_ == 0) scratch_ = reserve_range(kScratchPages);
  await_launched(copies, deadline);  // copies of an earlier call that gave up
  release_scratch();
  std::vector<Handle> to;
  for (const PageCopy& copy : copies) to.push_back(copy.to);
  const PageRun run{scratch_, to};
  std::exception_ptr refusal;
  try {
    map_for(kOperation, {&run, 1}, Access::writable, mapped_);
    Address at = scratch_;
    for (const PageCopy& copy : copies) {
      const CUstream side = handle_of(side_stream_);
      const std::size_t bytes = traits_.page_size;
      if (copy.from == kZeros) {
        cuda_.require_at(kOperation, cuda_.cuMemsetD8Async, at, bytes, at, 0, bytes, side);
      } else {
        cuda_.require_at(kOperation, cuda_.cuMemcpyDtoDAsync, at, bytes, at, copy.from, bytes,
                         side);
      }
      launched_ = true;
      at += bytes;
    }
  } catch (...) {
    refusal = std::current_exception();
  }
  // Copies launched before a refusal still need their pages.
  await_launched(copies, deadline);
  try {
    release_scratch();
  } catch (const DriverError&) {
    // The next copy tries again.
  }
  if (refusal) std::rethrow_exception(refusal);
}

// Throws TimedOut if launched copies may still run. Tries twice if asking is refused.
void CudaDriver::await_launched(std::span<const PageCopy> copies, Deadline deadline) {
  if (!launched_) return;
  std::string found;
  for (int asked = 0; asked < 2; ++asked) {
    try {
      launched_ =
          !wait_for(*this, record(kOperation, side_stream_), deadline - steady_clock::now());
      if (!launched_) return;
      found = text("the device did not finish within ", cuda_.timeout.count(), " ms");
    } catch (const std::exception& refusal) {
      found = text("what was launched could not be waited for (", refusal.what(), ")");
    }
  }
  throw TimedOut("[driver.copy_pages] ", copies.size(), " pages were to be ",
                 copies[0].from == kZeros ? "zeroed" : "copied", " on cuda:", cuda_.device, ", ",
                 found,
                 ": look for a kernel that does not end in the streams that use these pages; what "
                 "the copies may still write is not used again");
}

void CudaDriver::release_scratch() {
  if (mapped_ == 0) return;
  unmap_for(kOperation, scratch_, mapped_);
  mapped_ = 0;
}

}  // namespace vtensor
