#include "driver/cuda_mappings.h"

#include <algorithm>
#include <utility>

#include "base/align.h"
#include "base/make_node.h"

namespace vtensor {

void CudaMappings::close() {
  for (const auto& [range, pages] : ranges_) {
    for (std::size_t i = 0; i < pages; ++i) unmap(range + i * cuda_.page_size, 1);
    const std::size_t bytes = pages * cuda_.page_size;
    cuda_.call_at(cuda_.cuMemAddressFree, range, bytes, range, bytes);
  }
}

Address CudaMappings::reserve(std::size_t pages) {
  const auto bytes = checked_multiply(pages, cuda_.page_size);
  if (!bytes || *bytes == 0) {
    throw InvalidArgument("[driver.reserve] ", pages, " pages of ", cuda_.page_size,
                          " bytes were asked for, which no address range can hold: lower the "
                          "capacity");
  }
  const RelaxedCapture relaxed(cuda_, "reserve");
  // Alignments are powers of two: the largest that divides the page size.
  const std::size_t alignment = cuda_.page_size & (~cuda_.page_size + 1);
  CUdeviceptr range = 0;
  auto record = make_node<decltype(ranges_)>();  // allocated before the call
  cuda_.require_at("reserve", cuda_.cuMemAddressReserve, 0, *bytes, &range, *bytes, alignment, 0,
                   0);
  record.key() = range;
  record.mapped() = pages;
  const std::lock_guard lock(records_);
  ranges_.insert(std::move(record));
  return range;
}

void CudaMappings::free_range(Address range, std::size_t pages) {
  const RelaxedCapture relaxed(cuda_, "free_range");
  const std::size_t bytes = pages * cuda_.page_size;
  cuda_.check("free_range", Call::cuMemUnmap, uncover(holes_in(range, pages, true)));
  // Also during the call: another thread may reserve the addresses as soon as they are free.
  const std::lock_guard lock(records_);
  cuda_.require_at("free_range", cuda_.cuMemAddressFree, range, bytes, range, bytes);
  ranges_.erase(range);
  holes_.erase(holes_.lower_bound(range), holes_.lower_bound(range + bytes));
}

void CudaMappings::back_holes(Handle zeros, std::span<const Address> pages) {
  {
    const std::lock_guard lock(records_);
    zeros_ = zeros;
    for (const Address page : pages) holes_.emplace(page, false);
  }
  cuda_.check("back_holes", Call::cuMemMap, cover(pages));
}

// Those of the pages at `at` at which the page of zeros is kept, and is mapped now (`backed`) or
// not.
std::vector<Address> CudaMappings::holes_in(Address at, std::size_t pages, bool backed) const {
  std::vector<Address> found;
  const std::lock_guard lock(records_);
  const auto end = holes_.lower_bound(at + pages * cuda_.page_size);
  for (auto hole = holes_.lower_bound(at); hole != end; ++hole) {
    if (hole->second == backed) found.push_back(hole->first);
  }
  return found;
}

// Unmaps the page of zeros at all of these holes, or at none.
CUresult CudaMappings::uncover(std::span<const Address> holes) {
  for (std::size_t i = 0; i < holes.size(); ++i) {
    const CUresult code = unmap(holes[i], 1);
    if (code != CUDA_SUCCESS) {
      cover(holes.first(i));
      return code;
    }
    const std::lock_guard lock(records_);
    holes_.at(holes[i]) = false;
  }
  return CUDA_SUCCESS;
}

// Maps the page of zeros at as many of these holes as the driver lets it. Returns the last refusal.
CUresult CudaMappings::cover(std::span<const Address> holes) {
  CUresult refused = CUDA_SUCCESS;
  for (const Address hole : holes) {
    CUresult code = map_page(hole, zeros_);
    if (code == CUDA_SUCCESS) {
      code = set_access(hole, 1, Access::copy_on_write, true);
      // Without access it is mapped all the same, unless it can be unmapped.
      if (code == CUDA_SUCCESS || unmap(hole, 1) != CUDA_SUCCESS) {
        const std::lock_guard lock(records_);
        holes_.at(hole) = true;
      }
    }
    if (code != CUDA_SUCCESS) refused = code;
  }
  return refused;
}

bool CudaMappings::any() const {
  const std::lock_guard lock(records_);
  return !ranges_.empty();
}

bool CudaMappings::begins_range(Address at) const {
  const std::lock_guard lock(records_);
  return ranges_.contains(at);
}

CUresult CudaMappings::map_page(Address at, Handle handle) {
  return cuda_.call_at(cuda_.cuMemMap, at, cuda_.page_size, at, cuda_.page_size, 0, handle, 0);
}

// Maps the pages of all runs, and then gives them access, up to the first refusal. Adds to `mapped`
// the pages that are mapped then. Allocates nothing.
CudaMappings::Refusal CudaMappings::map_runs(std::span<const PageRun> runs, Access access,
                                             std::size_t& mapped) {
  for (const auto& [at, handles] : runs) {
    for (std::size_t i = 0; i < handles.size(); ++i, ++mapped) {
      const CUresult code = map_page(at + i * cuda_.page_size, handles[i]);
      if (code != CUDA_SUCCESS) return {code, Call::cuMemMap};
    }
  }
  for (std::size_t next = 0; next < runs.size();) {
    const Address at = runs[next].at;
    std::size_t pages = runs[next++].handles.size();
    // One call for runs that touch. Ranges may touch too, and no call covers two of them.
    while (next < runs.size() && runs[next].at == at + pages * cuda_.page_size &&
           !begins_range(runs[next].at))
      pages += runs[next++].handles.size();
    const CUresult code = pages == 0 ? CUDA_SUCCESS : set_access(at, pages, access);
    if (code != CUDA_SUCCESS) return {code, Call::cuMemSetAccess};
  }
  return {};
}

// One call for many pages: it costs more than mapping all of them. `never_written`: read-only also
// where shared pages are left writable.
CUresult CudaMappings::set_access(Address at, std::size_t pages, Access access,
                                  bool never_written) {
  const auto set = [&](CUmemAccess_flags flags) {
    CUmemAccessDesc wanted{};
    wanted.location = cuda_.location;
    wanted.flags = flags;
    const std::size_t bytes = pages * cuda_.page_size;
    return cuda_.call_at(cuda_.cuMemSetAccess, at, bytes, at, bytes, &wanted, std::size_t{1});
  };
  if (access == Access::copy_on_write &&
      (never_written || !leaves_writable_.load(std::memory_order_relaxed))) {
    const CUresult code = set(CU_MEM_ACCESS_FLAGS_PROT_READ);
    if (code != CUDA_ERROR_NOT_SUPPORTED && code != CUDA_ERROR_INVALID_VALUE) return code;
    // Either the device has no read-only mappings, or the pages are wrong: then this is refused
    // too.
    const CUresult writable = set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (writable == CUDA_SUCCESS) leaves_writable_.store(true, std::memory_order_relaxed);
    return writable;
  }
  return set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

CUresult CudaMappings::unmap(Address at, std::size_t pages) {
  const std::size_t bytes = pages * cuda_.page_size;
  return cuda_.call_at(cuda_.cuMemUnmap, at, bytes, at, bytes);
}

void CudaMappings::map(const char* operation, std::span<const PageRun> runs, Access access,
                       std::size_t& mapped) {
  if (std::ranges::all_of(runs, [](const PageRun& run) { return run.handles.empty(); })) return;
  const RelaxedCapture relaxed(cuda_, operation);
  std::vector<Address> covered;
  for (const auto& [at, handles] : runs) {
    const auto holes = holes_in(at, handles.size(), true);
    covered.insert(covered.end(), holes.begin(), holes.end());
  }
  cuda_.check(operation, Call::cuMemUnmap, uncover(covered));
  std::size_t done = 0;
  const Refusal refusal = map_runs(runs, access, done);
  mapped += done;
  if (refusal.code == CUDA_SUCCESS) return;
  for (const auto& [at, handles] : runs) {
    const std::size_t n = std::min(done, handles.size());
    done -= n;
    cover(holes_in(at + n * cuda_.page_size, handles.size() - n, false));
  }
  cuda_.check(operation, refusal.call, refusal.code);
}

void CudaMappings::unmap(const char* operation, Address at, std::size_t pages) {
  const RelaxedCapture relaxed(cuda_, operation);
  const std::vector<Address> holes = holes_in(at, pages, false);  // allocated before the call
  cuda_.check(operation, Call::cuMemUnmap, unmap(at, pages));
  cover(holes);
}

void CudaMappings::remap(Address at, std::span<const Handle> from, Access from_access,
                         std::span<const Handle> to, Access to_access) {
  const bool same = std::ranges::equal(from, to);
  if (from.empty() || (same && from_access == to_access)) return;
  const RelaxedCapture relaxed(cuda_, "remap");
  if (same) {
    return cuda_.check("remap", Call::cuMemSetAccess, set_access(at, to.size(), to_access));
  }
  const PageRun before{at, from}, after{at, to};
  cuda_.check("remap", Call::cuMemUnmap, unmap(at, from.size()));
  std::size_t mapped = 0, again = 0;
  const Refusal refusal = map_runs({&after, 1}, to_access, mapped);
  if (refusal.code == CUDA_SUCCESS) return;
  const bool gone = mapped == 0 || unmap(at, mapped) == CUDA_SUCCESS;
  if (!gone || map_runs({&before, 1}, from_access, again).code != CUDA_SUCCESS)
    throw UndoFailed(cuda_.refusal("remap", refusal.call, refusal.code));
  cuda_.check("remap", refusal.call, refusal.code);
}

}  // namespace vtensor
