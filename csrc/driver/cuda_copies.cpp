#include "driver/cuda_copies.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>

namespace vtensor {
namespace {

constexpr const char* kOperation = "copy_pages";
// So many pages share one set-access and one wait; their addresses cost nothing.
constexpr std::size_t kScratchPages = 32;

}  // namespace

void CudaCopies::open(std::size_t page_size, std::chrono::milliseconds timeout) {
  page_size_ = page_size;
  timeout_ = timeout;
}

bool CudaCopies::close() {
  if (scratch_ != 0) {
    try_release_scratch();
    if (mapped_ == 0) {
      try {
        mappings_.free_range(scratch_, kScratchPages);
      } catch (const DriverError&) {
        // Left to the end of the mappings.
      }
    }
  }
  if (unfinished_.empty()) return true;
  const bool over = streams_.side_is_idle();
  for (const Address range : unfinished_) {
    over ? mappings_.give_back(range) : mappings_.abandon(range);
  }
  return over;
}

void CudaCopies::copy(std::span<const PageCopy> copies, std::span<const FencePtr> after) {
  if (copies.empty()) return;
  const std::lock_guard lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
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

void CudaCopies::copy_some(std::span<const PageCopy> copies, CudaStreams::Deadline deadline) {
  if (scratch_ == 0) scratch_ = mappings_.reserve(kScratchPages);
  release_scratch();  // of an earlier copy, if that was refused
  unfinished_.reserve(unfinished_.size() + 1);
  std::vector<Handle> to;
  for (const PageCopy& copy : copies) to.push_back(copy.to);
  const PageRun run{scratch_, to};
  try {
    mappings_.map(kOperation, {&run, 1}, Access::writable, mapped_);
  } catch (...) {
    try_release_scratch();
    throw;
  }

  bool over = false;
  std::string found = text("the device did not finish within ", timeout_.count(), " ms");
  std::size_t launched = 0;
  try {
    for (; launched < copies.size(); ++launched) {
      const Address at = scratch_ + launched * page_size_, from = copies[launched].from;
      const CUstream side = handle_of(streams_.side());
      if (from == kZeros) {
        cuda_.require_at(kOperation, cuda_.cuMemsetD8Async, at, page_size_, at, 0, page_size_,
                         side);
      } else {
        cuda_.require_at(kOperation, cuda_.cuMemcpyDtoDAsync, at, page_size_, at, from, page_size_,
                         side);
      }
    }
    over = streams_.side_ends(kOperation, deadline);
  } catch (const DriverError& refusal) {
    // Copies that were launched before the refusal must not find their pages unmapped.
    if (launched == 0 || is_over(deadline)) {
      try_release_scratch();
      throw;
    }
    found = text(refusal.call, " answered ", refusal.name,
                 ", and what was launched before it could not be waited for");
  } catch (const std::bad_alloc&) {
    if (launched == 0 || is_over(deadline)) {
      try_release_scratch();
      throw;
    }
    found = "the host has no memory to wait with";  // no longer than what was there
  }
  if (!over) {
    unfinished_.push_back(scratch_);  // has room
    scratch_ = 0;
    mapped_ = 0;
    throw TimedOut("[driver.copy_pages] ", copies.size(), " pages were to be ",
                   copies[0].from == kZeros ? "zeroed" : "copied", " on cuda:", cuda_.device, ", ",
                   found,
                   ": look for a kernel that does not end in the streams that use these "
                   "pages; what the copies may still write is not used again");
  }
  try_release_scratch();
}

// Whether nothing launched so far on the side stream runs any more; a refusal says no. Waits.
bool CudaCopies::is_over(CudaStreams::Deadline deadline) {
  try {
    return streams_.side_ends(kOperation, deadline);
  } catch (const std::exception&) {
    return false;
  }
}

void CudaCopies::release_scratch() {
  if (mapped_ == 0) return;
  mappings_.unmap(kOperation, scratch_, mapped_);
  mapped_ = 0;
}

void CudaCopies::try_release_scratch() {
  try {
    release_scratch();
  } catch (const DriverError&) {
    // The next copy tries again.
  }
}

}  // namespace vtensor
