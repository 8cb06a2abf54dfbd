// Address ranges of a CUDA device and what is mapped in them. The calls need no current context and
// are ordered with no stream.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "driver/cuda_calls.h"
#include "driver/driver.h"

namespace vtensor {

class CudaMappings {
 public:
  explicit CudaMappings(CudaCalls& cuda) : cuda_(cuda) {}
  // The driver's end: gives all ranges back, whatever is mapped there.
  void close();

  // As in the contract of Driver. Messages have the name of the operation.
  Address reserve(std::size_t pages);
  void free_range(Address range, std::size_t pages);
  void map(const char* operation, std::span<const PageRun> runs, Access access,
           std::size_t& mapped);
  void unmap(const char* operation, Address at, std::size_t pages);
  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access);

  // Copy-on-write pages are left writable from now on, as they are on devices that have no
  // read-only mappings: then only the in-place operations of VTensor unshare pages (I6). Driver 580
  // refuses to map memory for RDMA again (CUDA_ERROR_UNKNOWN) once a mapping of it became the only
  // writable one after its first mapping went.
  void leave_writable() { leaves_writable_.store(true, std::memory_order_relaxed); }

  // Maps `zeros` at each of these pages, copy-on-write, whenever nothing else is mapped there.
  void back_holes(Handle zeros, std::span<const Address> pages);

  bool any() const;

 private:
  // The call that was refused, if `code` says that one was.
  struct Refusal {
    CUresult code = CUDA_SUCCESS;
    Call call = Call::cuMemMap;
  };
  Refusal map_runs(std::span<const PageRun> runs, Access access, std::size_t& mapped);
  bool begins_range(Address at) const;
  CUresult map_page(Address at, Handle handle);
  CUresult set_access(Address at, std::size_t pages, Access access, bool never_written = false);
  CUresult unmap(Address at, std::size_t pages);
  std::vector<Address> holes_in(Address at, std::size_t pages, bool backed) const;
  CUresult uncover(std::span<const Address> holes);
  CUresult cover(std::span<const Address> holes);

  CudaCalls& cuda_;
  std::atomic<bool> leaves_writable_{false};

  mutable std::mutex records_;             // guards what follows
  std::map<Address, std::size_t> ranges_;  // their pages by address
  // The pages at which the page of zeros is kept while nothing else is mapped there; whether it is
  // mapped now.
  std::map<Address, bool> holes_;
  Handle zeros_ = 0;
};

}  // namespace vtensor
