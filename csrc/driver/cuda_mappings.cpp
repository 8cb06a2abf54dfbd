#include "driver/cuda_mappings.h"

#include <algorithm>
#include <numeric>

#include "base/align.h"

namespace vtensor {
namespace {

std::vector<std::size_t> indices(std::size_t first, std::size_t count) {
  std::vector<std::size_t> result(count);
  std::iota(result.begin(), result.end(), first);
  return result;
}

}  // namespace

void CudaMappings::open(std::size_t page_size, CUmemLocation location) {
  page_size_ = page_size;
  location_ = location;
}

void CudaMappings::close() {
  while (any()) give_back(ranges_.begin()->first);
}

void CudaMappings::give_back(Address range) {
  const std::size_t pages = ranges_.at(range);
  for (std::size_t i = 0; i < pages; ++i) unmap(range + i * page_size_, 1);
  cuda_.call_at(cuda_.cuMemAddressFree, range, pages * page_size_, range, pages * page_size_);
  abandon(range);
}

Address CudaMappings::reserve(std::size_t pages) {
  const auto bytes = checked_multiply(pages, page_size_);
  if (!bytes || *bytes == 0) {
    throw InvalidArgument(
        "[driver.reserve] " + std::to_string(pages) + " pages of " + std::to_string(page_size_) +
        " bytes were asked for, which no address range can hold: lower the capacity");
  }
  const RelaxedCapture relaxed(cuda_, "reserve");
  // Alignments are powers of two; where the page size is none, its largest such factor.
  const std::size_t alignment = page_size_ & (~page_size_ + 1);
  CUdeviceptr range = 0;
  cuda_.require_at("reserve", cuda_.cuMemAddressReserve, 0, *bytes, &range, *bytes, alignment, 0,
                   0);
  const std::lock_guard lock(records_);
  ranges_.emplace(range, pages);
  return range;
}

void CudaMappings::free_range(Address range, std::size_t pages) {
  const RelaxedCapture relaxed(cuda_, "free_range");
  const std::size_t bytes = pages * page_size_;
  const CUresult code = uncover(holes_in(range, pages, true));
  if (code != CUDA_SUCCESS) throw cuda_.refusal("free_range", Call::cuMemUnmap, code);
  cuda_.require_at("free_range", cuda_.cuMemAddressFree, range, bytes, range, bytes);
  abandon(range);
}

void CudaMappings::abandon(Address range) {
  const std::lock_guard lock(records_);
  const auto found = ranges_.find(range);
  if (found == ranges_.end()) return;
  holes_.erase(holes_.lower_bound(range), holes_.lower_bound(range + found->second * page_size_));
  ranges_.erase(found);
}

void CudaMappings::abandon() {
  const std::lock_guard lock(records_);
  ranges_.clear();
  holes_.clear();
}

void CudaMappings::back_holes(Handle zeros, std::span<const Address> pages) {
  {
    const std::lock_guard lock(records_);
    zeros_ = zeros;
    for (const Address page : pages) holes_.emplace(page, false);
  }
  const CUresult code = cover(pages);
  if (code == CUDA_ERROR_OUT_OF_MEMORY)
    throw DeviceOutOfMemory(cuda_.refusal("back_holes", Call::cuMemMap, code));
  if (code != CUDA_SUCCESS) throw cuda_.refusal("back_holes", Call::cuMemMap, code);
}

// Those of the pages at `at` at which the page of zeros is kept, and stands now or not.
std::vector<Address> CudaMappings::holes_in(Address at, std::size_t pages, bool backed) const {
  std::vector<Address> found;
  const std::lock_guard lock(records_);
  const auto end = holes_.lower_bound(at + pages * page_size_);
  for (auto hole = holes_.lower_bound(at); hole != end; ++hole) {
    if (hole->second == backed) found.push_back(hole->first);
  }
  return found;
}

// Takes the page of zeros away; puts it back where that is refused at one of them.
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

// Puts the page of zeros there as far as the driver lets it; the last refusal.
CUresult CudaMappings::cover(std::span<const Address> holes) {
  CUresult refused = CUDA_SUCCESS;
  for (const Address hole : holes) {
    CUresult code = cuda_.call_at(cuda_.cuMemMap, hole, page_size_, hole, page_size_, 0, zeros_, 0);
    if (code == CUDA_SUCCESS) {
      code = set_access({hole, 0, 1}, Access::copy_on_write);
      // Without access it stands there all the same, unless it can be taken away.
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

std::vector<CudaMappings::Stretch> CudaMappings::stretches_of(std::span<const PageRun> runs) const {
  std::vector<Stretch> stretches;
  stretches.reserve(runs.size());
  std::size_t first = 0;
  for (const PageRun& run : runs) {
    const std::size_t pages = run.handles.size();
    if (pages == 0) continue;
    bool touches = false;
    if (!stretches.empty()) {
      Stretch& last = stretches.back();
      if (last.at + last.pages * page_size_ == run.at) {
        // Ranges may stand next to each other; no call covers two of them.
        const std::lock_guard lock(records_);
        touches = !ranges_.contains(run.at);
      }
      if (touches) last.pages += pages;
    }
    if (!touches) stretches.push_back({run.at, first, pages});
    first += pages;
  }
  return stretches;
}

// Maps pages [first, first + count), counted through the runs; `mapped` is how many it came to.
CUresult CudaMappings::map_pages(std::span<const PageRun> runs, std::size_t first,
                                 std::size_t count, std::size_t* mapped) {
  std::size_t skip = first;
  *mapped = 0;
  for (const PageRun& run : runs) {
    for (std::size_t i = std::min(skip, run.handles.size()); i < run.handles.size(); ++i) {
      if (*mapped == count) return CUDA_SUCCESS;
      const Address at = run.at + i * page_size_;
      const CUresult code =
          cuda_.call_at(cuda_.cuMemMap, at, page_size_, at, page_size_, 0, run.handles[i], 0);
      if (code != CUDA_SUCCESS) return code;
      ++*mapped;
    }
    skip -= std::min(skip, run.handles.size());
  }
  return CUDA_SUCCESS;
}

// One call for a whole stretch: it costs more than all the maps before it.
CUresult CudaMappings::set_access(const Stretch& stretch, Access access) {
  const auto set = [&](CUmemAccess_flags flags) {
    CUmemAccessDesc wanted{};
    wanted.location = location_;
    wanted.flags = flags;
    const std::size_t bytes = stretch.pages * page_size_;
    return cuda_.call_at(cuda_.cuMemSetAccess, stretch.at, bytes, stretch.at, bytes, &wanted,
                         std::size_t{1});
  };
  if (access == Access::copy_on_write && !read_only_refused_.load(std::memory_order_relaxed)) {
    const CUresult code = set(CU_MEM_ACCESS_FLAGS_PROT_READ);
    if (code != CUDA_ERROR_NOT_SUPPORTED && code != CUDA_ERROR_INVALID_VALUE) return code;
    // Either read-only is not known here, or the run itself is wrong: then this is refused as well.
    const CUresult writable = set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (writable == CUDA_SUCCESS) read_only_refused_.store(true, std::memory_order_relaxed);
    return writable;
  }
  return set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

CUresult CudaMappings::unmap(Address at, std::size_t pages) {
  const std::size_t bytes = pages * page_size_;
  return cuda_.call_at(cuda_.cuMemUnmap, at, bytes, at, bytes);
}

// Unmaps the first `pages` pages of the stretches; returns those for which that was refused.
std::vector<std::size_t> CudaMappings::unmap_first(std::span<const Stretch> stretches,
                                                   std::size_t pages) {
  std::vector<std::size_t> stuck;
  for (const Stretch& stretch : stretches) {
    if (stretch.first >= pages) break;
    const std::size_t n = std::min(stretch.pages, pages - stretch.first);
    if (unmap(stretch.at, n) == CUDA_SUCCESS) continue;
    for (std::size_t i = 0; i < n; ++i) stuck.push_back(stretch.first + i);
  }
  return stuck;
}

void CudaMappings::map(const char* operation, std::span<const PageRun> runs, Access access) {
  const std::vector<Stretch> stretches = stretches_of(runs);
  if (stretches.empty()) return;
  const RelaxedCapture relaxed(cuda_, operation);
  const std::size_t pages = stretches.back().first + stretches.back().pages;
  std::vector<Address> covered;
  for (const Stretch& stretch : stretches) {
    const auto holes = holes_in(stretch.at, stretch.pages, true);
    covered.insert(covered.end(), holes.begin(), holes.end());
  }
  CUresult code = uncover(covered);
  if (code != CUDA_SUCCESS) throw cuda_.refusal(operation, Call::cuMemUnmap, code);
  std::size_t mapped = 0;
  Call refused = Call::cuMemMap;
  code = map_pages(runs, 0, pages, &mapped);
  if (code == CUDA_SUCCESS) {
    refused = Call::cuMemSetAccess;
    for (const Stretch& stretch : stretches) {
      code = set_access(stretch, access);
      if (code != CUDA_SUCCESS) break;
    }
  }
  if (code == CUDA_SUCCESS) return;
  const DriverError cause = cuda_.refusal(operation, refused, code);
  std::vector<std::size_t> stuck = unmap_first(stretches, mapped);
  cover(covered);
  if (!stuck.empty()) throw UndoFailed(cause, std::move(stuck));
  // Page tables take memory too.
  if (code == CUDA_ERROR_OUT_OF_MEMORY) throw DeviceOutOfMemory(cause);
  throw cause;
}

void CudaMappings::unmap(const char* operation, std::span<const PageRun> runs, Access access) {
  const std::vector<Stretch> stretches = stretches_of(runs);
  if (stretches.empty()) return;
  const RelaxedCapture relaxed(cuda_, operation);
  CUresult code = CUDA_SUCCESS;
  std::size_t gone = 0;  // stretches
  for (; gone < stretches.size(); ++gone) {
    code = unmap(stretches[gone].at, stretches[gone].pages);
    if (code != CUDA_SUCCESS) break;
  }
  if (code == CUDA_SUCCESS) {
    for (const Stretch& stretch : stretches) cover(holes_in(stretch.at, stretch.pages, false));
    return;
  }
  const DriverError cause = cuda_.refusal(operation, Call::cuMemUnmap, code);
  std::vector<std::size_t> stuck;
  for (const Stretch& stretch : std::span(stretches).first(gone)) {
    std::size_t mapped = 0;
    if (map_pages(runs, stretch.first, stretch.pages, &mapped) == CUDA_SUCCESS &&
        set_access(stretch, access) == CUDA_SUCCESS) {
      continue;
    }
    for (std::size_t i = 0; i < stretch.pages; ++i) stuck.push_back(stretch.first + i);
  }
  if (!stuck.empty()) throw UndoFailed(cause, std::move(stuck));
  throw cause;
}

void CudaMappings::remap(Address at, std::span<const Handle> from, Access from_access,
                         std::span<const Handle> to, Access to_access) {
  const bool same = std::ranges::equal(from, to);
  if (from.empty() || (same && from_access == to_access)) return;
  const RelaxedCapture relaxed(cuda_, "remap");
  if (same) {
    const CUresult code = set_access({at, 0, to.size()}, to_access);
    if (code != CUDA_SUCCESS) throw cuda_.refusal("remap", Call::cuMemSetAccess, code);
    return;
  }
  const CUresult code = unmap(at, from.size());
  if (code != CUDA_SUCCESS) throw cuda_.refusal("remap", Call::cuMemUnmap, code);
  const PageRun before{at, from}, after{at, to};
  try {
    map("remap", {&after, 1}, to_access);
  } catch (const UndoFailed& cause) {
    // What is not stuck is mapped no more.
    throw UndoFailed(cause, indices(0, from.size()));
  } catch (const DriverError& cause) {
    try {
      map("remap", {&before, 1}, from_access);
    } catch (const DriverError&) {
      throw UndoFailed(cause, indices(0, from.size()));
    }
    throw;
  }
}

}  // namespace vtensor
