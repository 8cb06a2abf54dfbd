#include <algorithm>
#include <array>
#include <utility>

#include "base/align.h"
#include "base/make_node.h"
#include "driver/cuda_driver.h"

namespace vtensor {

// Unmaps page after page, because nothing says which are mapped, and frees the ranges.
void CudaDriver::close_mappings() {
  for (const auto& [range, pages] : ranges_) {
    for (std::size_t i = 0; i < pages; ++i) unmap_pages(range + i * traits_.page_size, 1);
    const std::size_t bytes = pages * traits_.page_size;
    cuda_.call_at(cuda_.cuMemAddressFree, range, bytes, range, bytes);
  }
}

Address CudaDriver::reserve_range(std::size_t pages) {
  const auto bytes = checked_multiply(pages, traits_.page_size);
  if (!bytes || *bytes == 0) {
    throw InvalidArgument("[driver.reserve] ", pages, " pages of ", traits_.page_size,
                          " bytes were asked for, which no address range can hold: lower the "
                          "capacity");
  }
  const RelaxedCapture relaxed(cuda_, "reserve");
  // The alignment must be a power of two: the largest that divides the page size.
  const std::size_t alignment = traits_.page_size & (~traits_.page_size + 1);
  CUdeviceptr range = 0;
  auto record = make_node<decltype(ranges_)>();  // allocated before the call
  cuda_.require_at("reserve", cuda_.cuMemAddressReserve, 0, *bytes, &range, *bytes, alignment, 0,
                   0);
  record.key() = range;
  record.mapped() = pages;
  const std::lock_guard lock(ranges_mutex_);
  ranges_.insert(std::move(record));
  return range;
}

Address CudaDriver::reserve(std::size_t pages, Backed backed) {
  const Address range = reserve_range(pages);
  if (backed.first == 0) return range;
  try {
    std::vector<Address> holes;
    for (std::size_t i = 0; i < pages; i += backed.every) {
      for (std::size_t page = i; page < i + backed.first; ++page)
        holes.push_back(range + page * traits_.page_size);
    }
    back_holes(holes);
  } catch (...) {
    try {
      free_range(range, pages);
    } catch (const DriverError&) {
      // The driver's end frees the range.
    }
    throw;
  }
  return range;
}

void CudaDriver::free_range(Address range, std::size_t pages) {
  if (in_forked_child()) return;
  const RelaxedCapture relaxed(cuda_, "free_range");
  const std::size_t bytes = pages * traits_.page_size;
  cuda_.check("free_range", Call::cuMemUnmap, unmap_zeros(holes_in(range, pages, true)));
  // Locked during the call: another thread may reserve the addresses as soon as they are free.
  const std::lock_guard lock(ranges_mutex_);
  cuda_.require_at("free_range", cuda_.cuMemAddressFree, range, bytes, range, bytes);
  ranges_.erase(range);
  holes_.erase(holes_.lower_bound(range), holes_.lower_bound(range + bytes));
}

// Keeps the page of zeros mapped at `pages`, read-only, whenever nothing else is, if this device
// needs that.
void CudaDriver::back_holes(std::span<const Address> pages) {
  const RelaxedCapture relaxed(cuda_, "reserve");
  const PrimaryContext context(cuda_, "reserve");
  CUdeviceptr pointer = 0;
  if (cuda_.call(cuda_.cuPointerGetAttribute, &pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                 pages.front()) == CUDA_SUCCESS) {
    return;  // this device gives kernels addresses that are only reserved
  }
  const std::lock_guard lock(zeros_mutex_);
  // After a refusal the next call continues here.
  if (zeros_ == 0) zeros_ = create(1);
  if (!are_zeros_) copy_pages(std::array{PageCopy{zeros_, kZeros}});
  are_zeros_ = true;
  {
    const std::lock_guard holes(ranges_mutex_);
    for (const Address page : pages) holes_.emplace(page, false);
  }
  cuda_.check("back_holes", Call::cuMemMap, map_zeros(pages));
}

// Backed pages among the `pages` at `at` in which the page of zeros is mapped now (`backed`), or is
// not.
std::vector<Address> CudaDriver::holes_in(Address at, std::size_t pages, bool backed) const {
  std::vector<Address> found;
  const std::lock_guard lock(ranges_mutex_);
  const auto end = holes_.lower_bound(at + pages * traits_.page_size);
  for (auto hole = holes_.lower_bound(at); hole != end; ++hole) {
    if (hole->second == backed) found.push_back(hole->first);
  }
  return found;
}

// Unmaps the page of zeros from all of `holes`, or from none.
CUresult CudaDriver::unmap_zeros(std::span<const Address> holes) {
  for (std::size_t i = 0; i < holes.size(); ++i) {
    const CUresult code = unmap_pages(holes[i], 1);
    if (code != CUDA_SUCCESS) {
      map_zeros(holes.first(i));
      return code;
    }
    const std::lock_guard lock(ranges_mutex_);
    holes_.at(holes[i]) = false;
  }
  return CUDA_SUCCESS;
}

// Maps the page of zeros at as many of `holes` as the driver allows. Returns the last refusal.
CUresult CudaDriver::map_zeros(std::span<const Address> holes) {
  CUresult refused = CUDA_SUCCESS;
  for (const Address hole : holes) {
    CUresult code = map_page(hole, zeros_);
    if (code == CUDA_SUCCESS) {
      code = set_access(hole, 1, Access::copy_on_write, true);
      // If access is refused and unmapping too, the page is mapped all the same.
      if (code == CUDA_SUCCESS || unmap_pages(hole, 1) != CUDA_SUCCESS) {
        const std::lock_guard lock(ranges_mutex_);
        holes_.at(hole) = true;
      }
    }
    if (code != CUDA_SUCCESS) refused = code;
  }
  return refused;
}

bool CudaDriver::begins_range(Address at) const {
  const std::lock_guard lock(ranges_mutex_);
  return ranges_.contains(at);
}

CUresult CudaDriver::map_page(Address at, Handle handle) {
  return cuda_.call_at(cuda_.cuMemMap, at, traits_.page_size, at, traits_.page_size, 0, handle, 0);
}

// Maps the pages of all runs and then gives them access, up to the first refusal. Adds the mapped
// pages to `mapped`. Allocates nothing.
CudaDriver::Refusal CudaDriver::map_runs(std::span<const PageRun> runs, Access access,
                                         std::size_t& mapped) {
  for (const auto& [at, handles] : runs) {
    for (std::size_t i = 0; i < handles.size(); ++i, ++mapped) {
      const CUresult code = map_page(at + i * traits_.page_size, handles[i]);
      if (code != CUDA_SUCCESS) return {code, Call::cuMemMap};
    }
  }
  for (std::size_t next = 0; next < runs.size();) {
    const Address at = runs[next].at;
    std::size_t pages = runs[next++].handles.size();
    // Adjacent runs share one call; no call covers two ranges, even adjacent ones.
    while (next < runs.size() && runs[next].at == at + pages * traits_.page_size &&
           !begins_range(runs[next].at))
      pages += runs[next++].handles.size();
    const CUresult code = pages == 0 ? CUDA_SUCCESS : set_access(at, pages, access);
    if (code != CUDA_SUCCESS) return {code, Call::cuMemSetAccess};
  }
  return {};
}

// Takes many pages, because one call costs more than mapping them all. `never_written`: read-only
// even if leaves_writable_.
CUresult CudaDriver::set_access(Address at, std::size_t pages, Access access, bool never_written) {
  const auto set = [&](CUmemAccess_flags flags) {
    CUmemAccessDesc wanted{};
    wanted.location = cuda_.location;
    wanted.flags = flags;
    const std::size_t bytes = pages * traits_.page_size;
    return cuda_.call_at(cuda_.cuMemSetAccess, at, bytes, at, bytes, &wanted, std::size_t{1});
  };
  if (access == Access::copy_on_write &&
      (never_written || !leaves_writable_.load(std::memory_order_relaxed))) {
    const CUresult code = set(CU_MEM_ACCESS_FLAGS_PROT_READ);
    if (code != CUDA_ERROR_NOT_SUPPORTED && code != CUDA_ERROR_INVALID_VALUE) return code;
    // Either the device has no read-only mappings, or the pages are wrong: then the next call is
    // refused too.
    const CUresult writable = set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (writable == CUDA_SUCCESS) leaves_writable_.store(true, std::memory_order_relaxed);
    return writable;
  }
  return set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

CUresult CudaDriver::unmap_pages(Address at, std::size_t pages) {
  const std::size_t bytes = pages * traits_.page_size;
  return cuda_.call_at(cuda_.cuMemUnmap, at, bytes, at, bytes);
}

void CudaDriver::map_for(const char* operation, std::span<const PageRun> runs, Access access,
                         std::size_t& mapped) {
  if (std::ranges::all_of(runs, [](const PageRun& run) { return run.handles.empty(); })) return;
  const RelaxedCapture relaxed(cuda_, operation);
  std::vector<Address> all_holes;
  for (const auto& [at, handles] : runs) {
    const auto holes = holes_in(at, handles.size(), true);
    all_holes.insert(all_holes.end(), holes.begin(), holes.end());
  }
  cuda_.check(operation, Call::cuMemUnmap, unmap_zeros(all_holes));
  std::size_t done = 0;
  const Refusal refusal = map_runs(runs, access, done);
  mapped += done;
  if (refusal.code == CUDA_SUCCESS) return;
  for (const auto& [at, handles] : runs) {
    const std::size_t n = std::min(done, handles.size());
    done -= n;
    map_zeros(holes_in(at + n * traits_.page_size, handles.size() - n, false));
  }
  cuda_.check(operation, refusal.call, refusal.code);
}

void CudaDriver::unmap_for(const char* operation, Address at, std::size_t pages) {
  const RelaxedCapture relaxed(cuda_, operation);
  const std::vector<Address> holes = holes_in(at, pages, false);  // allocated before the call
  cuda_.check(operation, Call::cuMemUnmap, unmap_pages(at, pages));
  map_zeros(holes);
}

void CudaDriver::remap(Address at, std::span<const Handle> from, Access from_access,
                       std::span<const Handle> to, Access to_access) {
  const bool same = std::ranges::equal(from, to);
  if (from.empty() || (same && from_access == to_access)) return;
  const RelaxedCapture relaxed(cuda_, "remap");
  if (same) {
    return cuda_.check("remap", Call::cuMemSetAccess, set_access(at, to.size(), to_access));
  }
  const PageRun before{at, from}, after{at, to};
  cuda_.check("remap", Call::cuMemUnmap, unmap_pages(at, from.size()));
  std::size_t mapped = 0, again = 0;
  const Refusal refusal = map_runs({&after, 1}, to_access, mapped);
  if (refusal.code == CUDA_SUCCESS) return;
  const bool gone = mapped == 0 || unmap_pages(at, mapped) == CUDA_SUCCESS;
  if (!gone || map_runs({&before, 1}, from_access, again).code != CUDA_SUCCESS)
    throw UndoFailed(cuda_.refusal("remap", refusal.call, refusal.code));
  cuda_.check("remap", refusal.call, refusal.code);
}

}  // namespace vtensor
