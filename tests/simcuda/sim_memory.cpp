#include "sim_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace simcuda {
namespace {

// What fresh allocations hold, so that no test takes them for zeros.
constexpr unsigned char kStale = 0xA5;

// The simulation itself is broken where the kernel refuses: no test can go on.
void expect(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "simcuda (test double): %s: %s\n", what, std::strerror(errno));
  std::abort();
}

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

void make_reserved(Address at, std::size_t size) {
  expect(mmap(pointer(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
              -1, 0) != MAP_FAILED,
         "mmap of a reserved range");
}

}  // namespace

SimMemory::SimMemory() : memfd_(memfd_create("simcuda", MFD_CLOEXEC)) {
  expect(memfd_ >= 0, "memfd_create");
}

SimMemory::~SimMemory() {
  for (const auto& [range, size] : ranges_) munmap(pointer(range), size);
  for (const auto& [handle, allocation] : allocations_) {
    if (allocation.memfd != memfd_) close(allocation.memfd);
  }
  close(memfd_);
}

CUresult SimMemory::reserve(CUdeviceptr* range, std::size_t size, std::size_t alignment,
                            std::size_t granularity) {
  const bool power_of_two = (alignment & (alignment - 1)) == 0;
  if (size == 0 || size % granularity != 0 || !power_of_two) return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max(alignment, granularity);
  const auto reserve_pages = [](Address wish, std::size_t bytes) {
    return mmap(pointer(wish), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                0);
  };
  // Next to another where there is room: the driver must not take the two for one range.
  void* got = reserve_pages(ranges_.empty() ? 0 : ranges_.begin()->first - size, size);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Address aligned = reinterpret_cast<Address>(got);
  if (aligned % alignment != 0) {
    munmap(got, size);
    const std::size_t padded = size + alignment;
    if (padded < size) return CUDA_ERROR_OUT_OF_MEMORY;
    got = reserve_pages(0, padded);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const Address start = reinterpret_cast<Address>(got);
    aligned = (start + alignment - 1) / alignment * alignment;
    if (aligned != start) munmap(got, aligned - start);
    const std::size_t behind = start + padded - (aligned + size);
    if (behind != 0) munmap(pointer(aligned + size), behind);
  }
  ranges_.emplace(aligned, size);
  *range = aligned;
  return CUDA_SUCCESS;
}

CUresult SimMemory::free_range(Address range, std::size_t size) {
  const auto found = ranges_.find(range);
  if (found == ranges_.end() || found->second != size) return CUDA_ERROR_INVALID_VALUE;
  if (is_any_mapped(range, size)) return CUDA_ERROR_INVALID_VALUE;
  expect(munmap(pointer(range), size) == 0, "munmap of a reserved range");
  ranges_.erase(found);
  return CUDA_SUCCESS;
}

CUresult SimMemory::create(CUmemGenericAllocationHandle* handle, std::size_t size, int device,
                           std::uint64_t room, unsigned exported_as, bool rdma) {
  if (size > room) return CUDA_ERROR_OUT_OF_MEMORY;
  Allocation fresh{.size = size,
                   .memfd = memfd_,
                   .offset = end_of_file_,
                   .exported_as = exported_as,
                   .device = device,
                   .rdma = rdma};
  if (exported_as != 0) {
    fresh.memfd = memfd_create("simcuda-page", MFD_CLOEXEC);
    fresh.offset = 0;
    expect(fresh.memfd >= 0, "memfd_create");
  } else {
    end_of_file_ += size;
  }
  expect(ftruncate(fresh.memfd, static_cast<off_t>(fresh.offset + size)) == 0, "ftruncate");
  const std::vector<unsigned char> stale(size, kStale);
  expect(pwrite(fresh.memfd, stale.data(), size, static_cast<off_t>(fresh.offset)) ==
             static_cast<ssize_t>(size),
         "pwrite of stale bytes");
  *handle = next_handle_++;
  allocations_.emplace(*handle, fresh);
  used_[device] += size;
  return CUDA_SUCCESS;
}

int SimMemory::export_file(std::uint64_t handle, unsigned as) const {
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.references == 0) return -1;
  if ((found->second.exported_as & as) == 0) return -1;
  return found->second.memfd;
}

CUresult SimMemory::import_file(CUmemGenericAllocationHandle* handle, int descriptor) {
  struct stat found{};
  char link[64] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  if (fstat(descriptor, &found) != 0 || found.st_size == 0 ||
      readlink(path.c_str(), link, sizeof link - 1) < 0 ||
      std::string(link).find("simcuda-page") == std::string::npos)
    return CUDA_ERROR_INVALID_VALUE;
  const Allocation made{.size = static_cast<std::size_t>(found.st_size),
                        .memfd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0),
                        .imported = true};
  expect(made.memfd >= 0, "dup of an allocation");
  *handle = next_handle_++;
  allocations_.emplace(*handle, made);
  return CUDA_SUCCESS;
}

CUresult SimMemory::take(int device, std::int64_t bytes, std::uint64_t room) {
  if (bytes > 0 && static_cast<std::uint64_t>(bytes) > room) return CUDA_ERROR_OUT_OF_MEMORY;
  used_[device] += static_cast<std::uint64_t>(bytes);
  return CUDA_SUCCESS;
}

CUresult SimMemory::release(std::uint64_t handle) {
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.references == 0) {
    std::fprintf(stderr, "simcuda (test double): cuMemRelease of handle %llu, which is none\n",
                 static_cast<unsigned long long>(handle));
    std::abort();  // the reference calls it undefined
  }
  --found->second.references;
  forget_if_unused(found);
  return CUDA_SUCCESS;
}

CUresult SimMemory::retain(Address at, CUmemGenericAllocationHandle* handle) {
  const Mapping* const mapping = mapping_at(at);
  if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *handle = mapping->handle;
  ++allocations_.at(*handle).references;
  return CUDA_SUCCESS;
}

void SimMemory::forget_if_unused(std::map<std::uint64_t, Allocation>::iterator allocation) {
  const Allocation& it = allocation->second;
  if (it.references != 0 || it.mappings != 0) return;
  if (it.memfd != memfd_) {
    close(it.memfd);
  } else {
    expect(fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(it.offset), static_cast<off_t>(it.size)) == 0,
           "fallocate");
  }
  if (!it.imported) used_[it.device] -= it.size;
  allocations_.erase(allocation);
}

CUresult SimMemory::map(Address at, std::size_t size, std::size_t offset, std::uint64_t handle) {
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (offset != 0 || size != found->second.size) return CUDA_ERROR_NOT_SUPPORTED;
  if (found->second.is_spoiled) return CUDA_ERROR_UNKNOWN;
  if (!inside_one_range(at, size) || is_any_mapped(at, size)) return CUDA_ERROR_INVALID_VALUE;
  // Not accessible before cuMemSetAccess.
  expect(mmap(pointer(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.memfd,
              static_cast<off_t>(found->second.offset)) != MAP_FAILED,
         "mmap of an allocation");
  if (found->second.mappings == 0) found->second.first = next_mapping_;
  mappings_.emplace(at, Mapping{.size = size, .handle = handle, .number = next_mapping_++});
  ++found->second.mappings;
  return CUDA_SUCCESS;
}

CUresult SimMemory::unmap(Address at, std::size_t size) {
  const auto whole = whole_mappings(at, size);
  if (whole.empty()) return CUDA_ERROR_INVALID_VALUE;
  make_reserved(at, size);
  for (const auto& [begin, mapping] : whole) {
    const auto allocation = allocations_.find(mapping.handle);
    if (mapping.number == allocation->second.first) allocation->second.first = 0;
    if (mapping.access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) --allocation->second.writable;
    if (--allocation->second.mappings == 0) allocation->second.is_spoiled = false;
    forget_if_unused(allocation);
  }
  mappings_.erase(whole.begin(), whole.end());
  return CUDA_SUCCESS;
}

CUresult SimMemory::set_access(Address at, std::size_t size, CUmemAccess_flags access) {
  const auto whole = whole_mappings(at, size);
  if (whole.empty()) return CUDA_ERROR_INVALID_VALUE;
  if (!std::ranges::all_of(whole, [&](auto& one) { return change_access(one.second, access); }))
    return CUDA_ERROR_UNKNOWN;
  const int protection = access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                         : access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                      : PROT_NONE;
  expect(mprotect(pointer(at), size, protection) == 0, "mprotect");
  return CUDA_SUCCESS;
}

// False where it is refused, as by driver 580 on an H200 (benchmarks/results): once a mapping of
// memory that is made for RDMA becomes the only writable one while its first mapping is gone, later
// mappings and accesses are refused.
bool SimMemory::change_access(Mapping& mapping, CUmemAccess_flags access) {
  if (mapping.access == access) return true;
  Allocation& allocation = allocations_.at(mapping.handle);
  if (allocation.is_spoiled) return false;
  if (mapping.access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) --allocation.writable;
  if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    allocation.is_spoiled = allocation.rdma && allocation.writable == 0 && allocation.first == 0;
    ++allocation.writable;
  }
  mapping.access = access;
  return true;
}

std::ranges::subrange<SimMemory::Mappings::iterator> SimMemory::whole_mappings(Address at,
                                                                               std::size_t size) {
  if (size == 0 || !inside_one_range(at, size)) return {};
  const auto first = mappings_.find(at);
  auto last = first;
  Address covered = at;
  for (; last != mappings_.end() && last->first == covered && covered < at + size; ++last)
    covered += last->second.size;
  return {first, covered == at + size ? last : first};
}

bool SimMemory::inside_one_range(Address at, std::size_t size) const {
  auto it = ranges_.upper_bound(at);
  if (it == ranges_.begin()) return false;
  --it;
  return at - it->first <= it->second && size <= it->second - (at - it->first);
}

SimMemory::Mappings::const_iterator SimMemory::from(Address at) const {
  const auto next = mappings_.upper_bound(at);
  if (next == mappings_.begin()) return next;
  const auto before = std::prev(next);
  return before->first + before->second.size > at ? before : next;
}

bool SimMemory::is_any_mapped(Address at, std::size_t size) const {
  const auto first = from(at);
  return first != mappings_.end() && first->first < at + size;
}

bool SimMemory::allows(Address at, std::size_t size, CUmemAccess_flags access) const {
  Address covered = at;
  for (auto it = from(at); covered < at + size; ++it) {
    if (it == mappings_.end() || it->first > covered) return false;
    if ((it->second.access & access) != access) return false;
    covered = it->first + it->second.size;
  }
  return true;
}

std::vector<std::uint64_t> SimMemory::mappings_of(Address at, std::size_t size) const {
  std::vector<std::uint64_t> numbers;
  for (auto it = from(at); it != mappings_.end() && it->first < at + size; ++it)
    numbers.push_back(it->second.number);
  return numbers;
}

const SimMemory::Mapping* SimMemory::mapping_at(Address at) const {
  const auto found = from(at);
  return found == mappings_.end() || found->first > at ? nullptr : &found->second;
}

std::uint64_t SimMemory::used(int device) const {
  const auto found = used_.find(device);
  return found == used_.end() ? 0 : found->second;
}

std::size_t SimMemory::handles() const {
  return static_cast<std::size_t>(std::ranges::count_if(
      allocations_, [](const auto& entry) { return entry.second.references != 0; }));
}

}  // namespace simcuda
