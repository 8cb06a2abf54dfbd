#include "driver/cuda_copies.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <vector>

namespace vtensor {
namespace {

constexpr const char* kOperation = "copy_pages";
// So many pages share one set-access and one wait; their addresses cost nothing.
constexpr std::size_t kScratchPages = 32;

}  // namespace

bool CudaCopies::close() {
  if (launched_ && !streams_.side_is_idle()) return false;
  try {
    release_scratch();
    if (scratch_ != 0) mappings_.free_range(scratch_, kScratchPages);
  } catch (const DriverError&) {
    // Left to the end of the mappings.
  }
  return true;
}

void CudaCopies::copy(std::span<const PageCopy> copies, std::span<const FencePtr> after) {
  if (copies.empty()) return;
  const std::lock_guard lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + cuda_.timeout;
  const RelaxedCapture relaxed(cuda_, kOperation);
  const PrimaryContext context(cuda_, kOperation);
  for (const FencePtr& fence : after) {
    if (fence != nullptr) streams_.let_wait(kOperation, streams_.side(), *fence);
  }
  while (!copies.empty()) {
    const std::size_t n = std::min(copies.size(), kScratchPages);
    copy_some(copies.first(n), deadline);
    copies = copies.subspan(n);
  }
}

void CudaCopies::copy_some(std::span<const PageCopy> copies, Deadline deadline) {
  if (scratch_ == 0) scratch_ = mappings_.reserve(kScratchPages);
  await_launched(copies, deadline);  // by an earlier call that gave up
  release_scratch();
  std::vector<Handle> to;
  for (const PageCopy& copy : copies) to.push_back(copy.to);
  const PageRun run{scratch_, to};
  std::exception_ptr refusal;
  try {
    mappings_.map(kOperation, {&run, 1}, Access::writable, mapped_);
    Address at = scratch_;
    for (const PageCopy& copy : copies) {
      const CUstream side = handle_of(streams_.side());
      const std::size_t bytes = cuda_.page_size;
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
  // Copies that were launched before a refusal must not find their pages unmapped.
  await_launched(copies, deadline);
  try {
    release_scratch();
  } catch (const DriverError&) {
    // The next copy tries again.
  }
  if (refusal) std::rethrow_exception(refusal);
}

// Throws TimedOut if what was launched may still run. Asks again if that is refused.
void CudaCopies::await_launched(std::span<const PageCopy> copies, Deadline deadline) {
  if (!launched_) return;
  std::string found;
  for (int asked = 0; asked < 2; ++asked) {
    try {
      launched_ = !streams_.side_ends(kOperation, deadline);
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

void CudaCopies::release_scratch() {
  if (mapped_ == 0) return;
  mappings_.unmap(kOperation, scratch_, mapped_);
  mapped_ = 0;
}

}  // namespace vtensor
