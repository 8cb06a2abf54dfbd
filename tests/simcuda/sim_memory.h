// The memory of the simulated libcuda (a test double): allocations in one memfd, those that other
// processes may get in one each, reserved address ranges, and the mappings between them, under the
// rules of the real driver as we believe them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <ranges>
#include <vector>

#include "cuda_abi.h"

namespace simcuda {

using namespace vtensor::cuda;  // CUresult and the like

using Address = std::uintptr_t;

class SimMemory {
 public:
  struct Mapping {
    std::size_t size = 0;
    std::uint64_t handle = 0;
    CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    std::uint64_t number = 0;
  };

  SimMemory();
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  // What is made is written where that succeeded.
  CUresult reserve(CUdeviceptr* range, std::size_t size, std::size_t alignment,
                   std::size_t granularity);
  CUresult free_range(Address range, std::size_t size);
  // `room`: bytes that the device may still hand out; `exported_as`: handle types, a mask.
  CUresult create(CUmemGenericAllocationHandle* handle, std::size_t size, int device,
                  std::uint64_t room, unsigned exported_as, bool rdma);
  // The allocation's own memfd; -1 if it was not made to be exported so.
  int export_file(std::uint64_t handle, unsigned as) const;
  // An allocation that another process, or this one, exported.
  CUresult import_file(CUmemGenericAllocationHandle* handle, int descriptor);
  CUresult release(std::uint64_t handle);
  // One more reference to what is mapped there, which wants a release of its own.
  CUresult retain(Address at, CUmemGenericAllocationHandle* handle);
  // What others than our callers take of the device, or, below 0, give back.
  CUresult take(int device, std::int64_t bytes, std::uint64_t room);
  CUresult map(Address at, std::size_t size, std::size_t offset, std::uint64_t handle);
  CUresult unmap(Address at, std::size_t size);
  CUresult set_access(Address at, std::size_t size, CUmemAccess_flags access);

  // Whether all of [at, at + size) is mapped with that access.
  bool allows(Address at, std::size_t size, CUmemAccess_flags access) const;
  // The mappings in [at, at + size), each a number that never comes back.
  std::vector<std::uint64_t> mappings_of(Address at, std::size_t size) const;

  std::uint64_t used(int device) const;
  std::size_t handles() const;
  std::size_t mappings() const { return mappings_.size(); }
  std::size_t ranges() const { return ranges_.size(); }
  bool is_reserved(Address at) const { return inside_one_range(at, 1); }
  // Null where nothing is mapped.
  const Mapping* mapping_at(Address at) const;

 private:
  struct Allocation {
    std::size_t size = 0;
    int memfd = -1;
    std::size_t offset = 0;  // in the memfd
    unsigned exported_as = 0;
    bool imported = false;
    int device = 0;
    std::size_t mappings = 0;
    unsigned references = 1;
    bool rdma = false;
    std::uint64_t first = 0;   // the mapping made while there was no other; 0 once it is gone
    std::size_t writable = 0;  // mappings
    bool is_spoiled = false;   // refuses mappings, and access to them, while one is left
  };
  using Mappings = std::map<Address, Mapping>;

  // The mapping that has the address, or the first one behind it.
  Mappings::const_iterator from(Address at) const;
  bool is_any_mapped(Address at, std::size_t size) const;

  // The mappings that make up exactly [at, at + size); empty where none do.
  std::ranges::subrange<Mappings::iterator> whole_mappings(Address at, std::size_t size);
  bool inside_one_range(Address at, std::size_t size) const;
  bool change_access(Mapping& mapping, CUmemAccess_flags access);
  void forget_if_unused(std::map<std::uint64_t, Allocation>::iterator allocation);

  int memfd_;
  std::size_t end_of_file_ = 0;
  std::uint64_t next_handle_ = 1;
  std::map<std::uint64_t, Allocation> allocations_;
  std::map<int, std::uint64_t> used_;  // bytes by device
  std::map<Address, std::size_t> ranges_;
  Mappings mappings_;
  std::uint64_t next_mapping_ = 1;
};

}  // namespace simcuda
