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

  // As in the contract of Driver. The name of the operation is for messages.
  Address reserve(std::size_t pages);
  void free_range(Address range, std::size_t pages);
  void map(const char* operation, std::span<const PageRun> runs, Access access);
  void unmap(const char* operation, std::span<const PageRun> runs, Access access);
  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access);

  // Has `zeros` stand at each of these pages, copy-on-write, wherever nothing else is mapped.
  void back_holes(Handle zeros, std::span<const Address> pages);

  // Frees a range in which it is unknown what is mapped: every page is tried.
  void give_back(Address range);
  // Leaves a range, or all, and what is mapped there to the process for good.
  void abandon(Address range);
  void abandon();
  bool any() const;

 private:
  // Pages that one call may cover: runs that touch, in one range.
  struct Stretch {
    Address at;
    std::size_t first;  // its first page, counted through the runs
    std::size_t pages;
  };
  std::vector<Stretch> stretches_of(std::span<const PageRun> runs) const;
  CUresult map_pages(std::span<const PageRun> runs, std::size_t first, std::size_t count,
                     std::size_t* mapped);
  CUresult set_access(const Stretch& stretch, Access access);
  std::vector<Address> holes_in(Address at, std::size_t pages, bool backed) const;
  CUresult uncover(std::span<const Address> holes);
  CUresult cover(std::span<const Address> holes);
  CUresult unmap(Address at, std::size_t pages);
  std::vector<std::size_t> unmap_first(std::span<const Stretch> stretches, std::size_t pages);

  CudaCalls& cuda_;
  std::size_t page_size_ = 0;
  CUmemLocation location_{};
  // Some devices know no read-only mappings: what is copy-on-write is then left writable, and only
  // the in-place operations of VTensor unshare pages (I6: "where the device allows it").
  std::atomic<bool> read_only_refused_{false};

  mutable std::mutex records_;             // guards what follows
  std::map<Address, std::size_t> ranges_;  // pages by address
  // Pages at which `zeros_` stands where nothing else does, and whether it does now.
  std::map<Address, bool> holes_;
  Handle zeros_ = 0;
};

}  // namespace vtensor
