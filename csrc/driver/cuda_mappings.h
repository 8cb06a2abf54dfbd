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
  void open(std::size_t page_size, CUmemLocation location);
  // The driver's end: gives all ranges back.
  void close();

  // As in the contract of Driver. Messages have the name of the operation.
  Address reserve(std::size_t pages);
  void free_range(Address range, std::size_t pages);
  void map(const char* operation, std::span<const PageRun> runs, Access access,
           std::size_t& mapped);
  void unmap(const char* operation, Address at, std::size_t pages);
  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access);

  // Maps `zeros` at each of these pages, copy-on-write, whenever nothing else is mapped there.
  void back_holes(Handle zeros, std::span<const Address> pages);

  // Frees a range whose mappings are not known: tries to unmap every page.
  void give_back(Address range);
  // Leaves a range, or all, with its mappings to the process for good.
  void abandon(Address range) { take_records(range); }
  void abandon();
  bool any() const;

 private:
  // Pages that one call may cover: runs that touch, in one range.
  struct Stretch {
    Address at;
    std::vector<Handle> handles;

    std::size_t pages() const { return handles.size(); }
  };
  // What is known of ranges: their pages by address, and the pages at which the page of zeros is
  // mapped in holes; whether it is now.
  using Ranges = std::map<Address, std::size_t>;
  using Holes = std::map<Address, bool>;
  struct Records {
    Ranges ranges;
    Holes holes;
  };
  Records take_records(Address range);
  std::vector<Stretch> stretches_of(std::span<const PageRun> runs) const;
  struct Refusal {
    CUresult code = CUDA_SUCCESS;  // if so, there was none
    Call call = Call::cuMemMap;
    std::size_t mapped = 0;  // pages from the first on
  };
  // Maps pages and gives them access. Allocates nothing.
  Refusal map_whole(const Stretch& stretch, Access access);
  CUresult map_page(Address at, Handle handle);
  CUresult map_stretch(const Stretch& stretch, std::size_t& mapped);
  CUresult set_access(Address at, std::size_t pages, Access access);
  CUresult unmap(Address at, std::size_t pages);
  std::vector<Address> holes_in(Address at, std::size_t pages, bool backed) const;
  CUresult uncover(std::span<const Address> holes);
  CUresult cover(std::span<const Address> holes);

  CudaCalls& cuda_;
  std::size_t page_size_ = 0;
  CUmemLocation location_{};
  // Some devices have no read-only mappings: then copy-on-write pages are left writable, and only
  // the in-place operations of VTensor unshare pages (I6).
  std::atomic<bool> read_only_refused_{false};

  mutable std::mutex records_;  // guards what follows
  Ranges ranges_;
  Holes holes_;
  Handle zeros_ = 0;
};

}  // namespace vtensor
