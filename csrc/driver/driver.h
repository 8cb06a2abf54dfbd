// The contract between the core and the memory of one device: the one seam to the operating system
// and to libcuda. One Driver serves one page pool and one page size.
//
// Every operation is whole or nothing: where a call is refused, the driver undoes what the
// operation did so far and throws DriverError; where the undoing is refused too it throws
// UndoFailed, which names the pages whose mapping is no longer known. Unless stated, operations may
// be called from any thread, but not two at a time on overlapping addresses, and wait for nothing
// on the device. No operation calls Python. In a forked child (I13) unmap, free_range and destroy,
// which destructors use, do nothing, and everything else throws.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/calls.h"

namespace vtensor {

using Address = std::uintptr_t;
using Handle = std::uint64_t;  // the physical memory of one page
using Stream =
    std::uintptr_t;  // a CUstream; 0 is the legacy default stream. The host has no streams.

// Neighbouring pages: handles[i] stands at `at + i * page_size`.
struct PageRun {
  Address at;
  std::span<const Handle> handles;
};

// The bytes seen through a mapped page, to be copied into a handle.
struct PageCopy {
  Handle to;
  Address from;
};

// A point in a stream's work. Shared, because several page runs may wait for one; its end gives the
// driver's event back, from any thread.
class Fence {
 public:
  virtual ~Fence() = default;
};
using FencePtr = std::shared_ptr<const Fence>;

enum class Access : std::uint8_t {
  writable,       // stores reach the handle
  copy_on_write,  // stores never reach the handle: copied by the kernel (host), refused by the
                  // device (CUDA)
};

struct Device {
  std::int32_t type;  // as DLPack numbers them: 1 CPU, 2 CUDA
  std::int32_t index;

  bool on_host() const { return type == 1; }
  friend bool operator==(const Device&, const Device&) = default;
};

struct DriverTraits {
  std::string name;               // "host", "cuda"
  Device device;                  // what tensors over this memory report to DLPack
  std::size_t page_size;          // bytes; the unit of everything below
  std::size_t granularity;        // the driver's smallest page, bytes
  std::size_t available;          // bytes a pool may take by default, where it is the only one
  bool adjacent_handles = false;  // h and h + 1 at neighbouring pages merge into one kernel mapping
  bool created_zero = false;      // memory behind a handle reads as zeros until first written
  bool kernel_copies_on_write =
      false;  // a write to a copy-on-write page unshares it silently, instead of faulting
  bool asynchronous = false;        // kernels run in streams, behind their callers' backs
  bool remaps_in_one_step = false;  // remap never leaves a page unmapped, whatever is refused
};

class Driver {
 public:
  virtual ~Driver() = default;
  virtual const DriverTraits& traits() const = 0;
  CallMeter& meter() { return meter_; }

  // Reserves `pages` pages of addresses, aligned to the page size. Costs no memory. What is not
  // mapped in it reads as zeros or faults, by driver; writes to it always fault.
  virtual Address reserve(std::size_t pages) = 0;
  // Frees exactly what `reserve` returned. Requires: nothing is mapped in it.
  virtual void free_range(Address range, std::size_t pages) = 0;

  // Makes `n` handles h, h+1, ...; n == 1 unless traits().adjacent_handles, where handles cost
  // nothing until their memory is touched. Throws DeviceOutOfMemory.
  virtual Handle create(std::size_t n) = 0;
  // Gives the memory of `n` handles back. Requires: mapped nowhere. With adjacent_handles the
  // numbers stay good and read as zeros again; otherwise they are gone.
  virtual void destroy(Handle first, std::size_t n) = 0;

  // Maps runs of pages, in any number of reserved ranges. Requires: nothing is mapped there.
  // UndoFailed counts the pages through all runs in their order. Throws DeviceOutOfMemory where
  // mapping takes memory that is not there.
  virtual void map(std::span<const PageRun> runs, Access access) = 0;
  // Unmaps mapped pages: all of them, whatever the access. The ranges stay reserved. The handles
  // and `access` are what is mapped there, for undoing. Requires: no work, launched or about to be,
  // touches them.
  virtual void unmap(std::span<const PageRun> runs, Access access) = 0;
  // Keeps a page of zeros, read-only and the driver's own, at each of these pages of reserved
  // ranges wherever nothing is mapped there, until their range is freed: where kernels are given no
  // address of a hole, though they touch nothing there. Costs calls whenever they are mapped or
  // unmapped. Nothing where holes may be given. Throws as `create` and `map`.
  virtual void back_holes(std::span<const Address> pages) = 0;
  // Replaces what stands behind mapped pages, all of one access. A copy-on-write page that was
  // copied loses its copied content. Requires: as unmap.
  virtual void remap(Address at, std::span<const Handle> from, Access from_access,
                     std::span<const Handle> to, Access to_access) = 0;

  // Zeroes what is mapped writable in [at, at + bytes), in the order of the stream's work. On the
  // host, complete on return.
  virtual void zero(Address at, std::size_t bytes, Stream stream) = 0;
  // Copies pages on the side stream, after the fences; complete on return. Each `to` is mapped
  // nowhere; with kernel_copies_on_write it may also be the handle mapped copy-on-write at `from`
  // alone. Throws TimedOut where the device does not finish.
  virtual void copy_pages(std::span<const PageCopy> copies, std::span<const FencePtr> after) = 0;
  // Has the memory of `n` pages, mapped writable at `at`, made present now instead of at first
  // touch.
  virtual void populate(Address at, std::size_t n) = 0;
  // Has the memory behind `n` handles made present now, mapped or not.
  virtual void fill(Handle first, std::size_t n) = 0;
  // Sets copied[i] for each of the copy-on-write pages at `at` that a write has copied from its
  // handle.
  virtual void find_private_copies(Address at, std::span<std::uint8_t> private_copies) = 0;

  // Bytes of the device's memory that no process has taken.
  virtual std::size_t free_memory() = 0;

  // Order between what streams do and what the core does. On the host all work but copies is done
  // by the threads that call, so there a fence of another stream is null, which has passed.

  // Our own stream, beside those of the callers.
  virtual Stream side_stream() = 0;
  // Our own stream for copies between mapped pages and memory of the host; on the host, threads.
  virtual Stream copy_stream() = 0;
  // Launch one there, and return at once. The caller keeps the pages mapped, and the host's memory
  // where it is, until a fence made afterwards has passed. That memory need not be the driver's.
  virtual void copy_out(void* to, Address from, std::size_t bytes) = 0;
  virtual void copy_in(Address to, const void* from, std::size_t bytes) = 0;
  // A point behind all work launched in `stream` so far; null where there is nothing to wait for.
  virtual FencePtr fence(Stream stream) = 0;
  // Whether that work is done. Never blocks.
  virtual bool passed(const Fence& fence) = 0;
  // What is launched in `stream` from now on starts only after the fence. Never blocks; but on the
  // host, where the caller is what works there, it waits. Throws TimedOut.
  virtual void order(Stream stream, const Fence& fence) = 0;
  // Throws InvalidArgument where work in `stream`, as this thread names it, cannot be ordered with
  // what the core does.
  virtual void require_own(const char* operation, Stream stream) = 0;
  // Whether `stream` is being captured into a graph: then nothing of ours may be launched in it.
  virtual bool capturing(Stream stream) = 0;
  // Calls `release(argument)` once, when the graph being captured in `stream`, and everything made
  // from it, is gone; from any thread, and `release` may make no driver call.
  virtual void keep_for_graph(Stream stream, void (*release)(void*), void* argument) = 0;
  // Called first by a thread that works for the core alone: captures by others do not refuse its
  // calls.
  virtual void enter_worker() = 0;
  // Returns once no work launched so far can touch this device's memory: for the driver's end.
  // Throws TimedOut where the device does not finish.
  virtual void quiesce() = 0;

 protected:
  CallMeter meter_;
};

struct HostOptions {
  std::size_t page_size = 0;  // 0: the default, 64 KiB
  bool strict_holes = false;  // unmapped addresses fault on reads too; for over-read tests
};
std::unique_ptr<Driver> make_host_driver(const HostOptions& options);

struct CudaOptions {
  int device = 0;
  std::size_t page_size = 0;             // 0: the device's recommended granularity, at least 2 MiB
  std::string library = "libcuda.so.1";  // loaded now, not at import
  bool memory_is_host_memory = false;  // a simulated libcuda: tensors are handed out as CPU tensors
  std::chrono::milliseconds timeout{60'000};  // after which a wait gives the device up
};
std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options);

}  // namespace vtensor
