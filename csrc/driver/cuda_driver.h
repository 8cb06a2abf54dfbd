// Pages of an NVIDIA GPU: one cuMemCreate allocation a page, mapped with CUDA's virtual memory
// management. Defined by subject: address ranges and mappings in cuda_mappings.cpp; fences, streams
// and captures in cuda_streams.cpp; zeroing and copies in cuda_copies.cpp; the device and its pages
// in cuda_driver.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "driver/cuda_calls.h"
#include "driver/driver.h"

namespace vtensor {

inline CUstream handle_of(Stream stream) { return reinterpret_cast<CUstream>(stream); }

class CudaEvents;

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const CudaOptions& options) : cuda_(options.library, meter_) {}
  ~CudaDriver() override;
  void open(const CudaOptions& options);

  Address reserve(std::size_t pages, Backed backed) override;
  void free_range(Address range, std::size_t pages) override;
  Handle create(std::size_t n) override;
  void destroy(Handle first, std::size_t n) override;
  void map(std::span<const PageRun> runs, Access access, std::size_t& mapped) override {
    map_for("map", runs, access, mapped);
  }
  void unmap(Address at, std::size_t n) override {
    if (!in_forked_child()) unmap_for("unmap", at, n);
  }
  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access) override;
  void zero(Address at, std::size_t bytes, Stream stream) override;
  void copy_pages(std::span<const PageCopy> copies) override;
  void populate(Address, std::size_t) override {}  // memory comes with cuMemCreate
  // CUDA never copies a page at a write.
  void find_private_copies(Address, std::span<std::uint8_t>) override {}
  std::size_t free_memory() override;
  ExportedPage export_page(Handle handle) override;
  Handle import_page(const ExportedPage& page, ExportKind kind) override;

  void copy(CopyDirection direction, Address at, void* memory, std::size_t bytes,
            Stream stream) override;
  FencePtr fence(Stream stream) override;
  bool passed(const Fence& fence) override;
  void order(Stream stream, const Fence& fence) override;
  bool capturing(const char* operation, Stream stream) override;
  void keep_for_graph(Stream stream, void (*release)(void*), void* argument) override;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  // A refused call and its answer; CUDA_SUCCESS: no call was refused.
  struct Refusal {
    CUresult code = CUDA_SUCCESS;
    Call call = Call::cuMemMap;
  };
  static constexpr Address kZeros = 0;  // as PageCopy::from: zeroes the page

  void find_device(const CudaOptions& options);
  int attribute(CUdevice_attribute which);
  std::size_t granularity(CUmemAllocationGranularity_flags kind);
  void choose_exports();
  bool probe_exports();
  Handle enter(std::set<Handle>::node_type record, Handle handle);
  bool close();

  // Mappings. Their calls need no current context and are ordered with no stream. `operation` is
  // for messages.
  Address reserve_range(std::size_t pages);
  void map_for(const char* operation, std::span<const PageRun> runs, Access access,
               std::size_t& mapped);
  void unmap_for(const char* operation, Address at, std::size_t pages);
  Refusal map_runs(std::span<const PageRun> runs, Access access, std::size_t& mapped);
  bool begins_range(Address at) const;
  CUresult map_page(Address at, Handle handle);
  CUresult set_access(Address at, std::size_t pages, Access access, bool never_written = false);
  CUresult unmap_pages(Address at, std::size_t pages);
  void back_holes(std::span<const Address> pages);
  std::vector<Address> holes_in(Address at, std::size_t pages, bool backed) const;
  CUresult unmap_zeros(std::span<const Address> holes);
  CUresult map_zeros(std::span<const Address> holes);
  void close_mappings();

  // Streams. All but `require_own` need the primary context.
  void open_streams();
  void require_own(const char* operation, Stream stream);
  bool is_captured(const char* operation, Stream stream);
  void refuse_capture(const char* operation, Stream stream);
  FencePtr record(const char* operation, Stream stream);
  void close_streams();

  // Copies between pages. Require: scratch_mutex_ is held.
  void copy_some(std::span<const PageCopy> copies, Deadline deadline);
  void await_launched(std::span<const PageCopy> copies, Deadline deadline);
  void release_scratch();
  bool close_copies();

  CudaCalls cuda_;
  CUmemAllocationProp properties_{};
  // All events, shared with the fences. Null until the streams are open.
  std::shared_ptr<CudaEvents> events_;

  std::mutex handles_mutex_;  // guards the handles
  std::set<Handle> handles_;

  // Copy-on-write pages stay writable, as on devices without read-only mappings: then only the
  // in-place operations of VTensor unshare pages (I6).
  std::atomic<bool> leaves_writable_{false};
  mutable std::mutex ranges_mutex_;        // guards ranges and holes
  std::map<Address, std::size_t> ranges_;  // pages of each, by address
  // Each backed page: whether the page of zeros is mapped there now.
  std::map<Address, bool> holes_;

  std::mutex zeros_mutex_;  // held while the page of zeros is made
  Handle zeros_ = 0;        // the page of zeros, never a pool's (I7); made before holes_ has one
  bool are_zeros_ = false;  // zeros_ has been zeroed

  std::mutex scratch_mutex_;  // guards what follows
  Address scratch_ = 0;       // addresses through which copies are made
  std::size_t mapped_ = 0;    // pages of the scratch range that are mapped, the first ones
  bool launched_ = false;     // launched copies may still run
};

}  // namespace vtensor
