// The contract between the core and the memory of one device: the one seam to the operating system
// and to libcuda. One Driver serves one page pool and one page size.
//
// A refused call is a DriverError. Every operation but `map` is whole or nothing. Unless stated
// otherwise, operations may be called from any thread, but not two at a time on overlapping
// addresses, and wait for nothing on the device. No operation calls Python. In a forked child (I13)
// unmap, free_range and destroy, which destructors use, do nothing; every other operation that
// would make a driver call throws.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "base/calls.h"
#include "base/descriptor.h"
#include "base/trace.h"

namespace vtensor {

using Address = std::uintptr_t;
using Handle = std::uint64_t;  // the physical memory of one page
// A CUstream; 0 is the legacy default stream. The host has one stream, for copies.
using Stream = std::uintptr_t;
// Host memory outside any pool, freed with its last holder.
using HostMemory = std::shared_ptr<std::byte>;

// Neighbouring pages: handles[i] at `at + i * page_size`.
struct PageRun {
  Address at;
  std::span<const Handle> handles;
};

// A copy of the mapped page at `from` into the handle `to`.
struct PageCopy {
  Handle to;
  Address from;
};

// A point in a stream's work. Several page runs may share a fence. The end of a fence, in any
// thread, gives its event back to the driver.
class Fence {
 public:
  virtual ~Fence() = default;
};
using FencePtr = std::shared_ptr<const Fence>;

enum class Access : std::uint8_t {
  writable,       // stores reach the handle
  copy_on_write,  // the kernel copies the page at a store (host), or the device faults (CUDA)
};

struct Device {
  std::int32_t type;  // by DLPack: 1 CPU, 2 CUDA
  std::int32_t index;

  bool on_host() const { return type == 1; }
  friend bool operator==(const Device&, const Device&) = default;
};

// How other processes get a driver's pages.
enum class ExportKind : std::uint8_t {
  none,
  file,         // one file has all pages: handle h is the page at h * page_size
  descriptors,  // a descriptor for each page
  fabric,       // 64 bytes for each page
};

// A page as another process receives it.
struct ExportedPage {
  Descriptor descriptor{-1};
  std::array<std::byte, 64> fabric{};
};

// The UUID that a device has in every process; zeros for the host.
using DeviceUuid = std::array<char, 16>;

struct DriverTraits {
  std::string name;         // "host", "cuda"
  Device device;            // of tensors over this memory, for DLPack
  std::size_t page_size;    // bytes; the unit of all operations
  std::size_t granularity;  // the driver's smallest page, bytes
  std::size_t budget_part;  // default budget, in tenths of the free memory
  // Handles h and h + 1 at neighbouring pages are one kernel mapping. New handles read as zeros.
  bool adjacent_handles = false;
  // The kernel copies a copy-on-write page at a write, without a fault; and a refused remap leaves
  // no page unmapped.
  bool kernel_copies_on_write = false;
  bool asynchronous = false;  // kernels run in streams, beside their callers
  ExportKind exports = ExportKind::none;
  DeviceUuid uuid{};
};

// The backed pages of a range: the first `first` of every `every` pages; none by default.
struct Backed {
  std::size_t first = 0;
  std::size_t every = 1;
};

// Out of pages into host memory, into pages from there, or into pages from the device's memory.
enum class CopyDirection : std::uint8_t { out, in, within };

class Driver {
 public:
  virtual ~Driver() = default;
  const DriverTraits& traits() const { return traits_; }
  CallMeter& meter() { return meter_; }

  // The core's stream for zeroing and copying pages; the host has none.
  Stream side_stream() const { return side_stream_; }
  // The core's stream for copies between pages and host memory; on the host, threads.
  Stream copy_stream() const { return copy_stream_; }

  // Reserves `pages` pages of addresses, aligned to the page size. Costs no memory. Where nothing
  // is mapped, reads give zeros or fault, by driver, and writes fault. If kernels cannot be given
  // the address of a hole, the driver maps a read-only page of zeros of its own at the pages
  // `backed` while nothing else is mapped there: this costs calls now, and whenever backed pages
  // are mapped or unmapped.
  virtual Address reserve(std::size_t pages, Backed backed = {}) = 0;
  // Frees exactly what `reserve` returned. Requires: nothing is mapped in it.
  virtual void free_range(Address range, std::size_t pages) = 0;

  // Makes `n` handles h, h+1, ...; n == 1 unless traits().adjacent_handles: such handles cost
  // nothing until their memory is touched. Throws DeviceOutOfMemory.
  virtual Handle create(std::size_t n) = 0;
  // Gives the memory of `n` handles back; n as for create. Requires: mapped nowhere. With
  // adjacent_handles the handles stay good and read as zeros again; otherwise they are gone.
  virtual void destroy(Handle first, std::size_t n) = 0;

  // Maps runs of pages, in any number of reserved ranges, one after the other up to the first
  // refusal. Adds to `mapped` the pages that are mapped then, perhaps without access, which the
  // caller unmaps. Requires: nothing is mapped there. Throws DeviceOutOfMemory if there is no
  // memory for the mapping itself.
  virtual void map(std::span<const PageRun> runs, Access access, std::size_t& mapped) = 0;
  // Unmaps `n` pages of one range, which stays reserved. Requires: no work, launched or about to
  // be, touches them.
  virtual void unmap(Address at, std::size_t n) = 0;
  // Replaces the handles of mapped pages, all of one access. Private copies of copy-on-write pages
  // are lost. Throws UndoFailed if a refusal leaves neither the old pages nor the new ones.
  // Requires: as unmap.
  virtual void remap(Address at, std::span<const Handle> from, Access from_access,
                     std::span<const Handle> to, Access to_access) = 0;

  // Zeroes [at, at + bytes), which is mapped writable, in the order of the stream's work. On the
  // host it is done on return.
  virtual void zero(Address at, std::size_t bytes, Stream stream) = 0;
  // Copies pages on the side stream; done on return. Each `to` is mapped nowhere; with
  // kernel_copies_on_write it may also be the handle mapped copy-on-write at `from` alone. Throws
  // TimedOut if the device does not finish.
  virtual void copy_pages(std::span<const PageCopy> copies) = 0;
  // Makes the memory of `n` pages, mapped writable at `at`, present now instead of at first touch.
  virtual void populate(Address at, std::size_t n) = 0;
  static constexpr std::uint8_t kMaybeCopied = 2;
  // Sets the entry of each copy-on-write page at `at`: 1 if a write has copied the page,
  // kMaybeCopied if the system does not say, 0 if not.
  virtual void find_private_copies(Address at, std::span<std::uint8_t> private_copies) = 0;

  // Bytes of the device's memory that are free.
  virtual std::size_t free_memory() = 0;

  // Exports the page with this handle; if traits().exports is ExportKind::file, the file of all
  // pages, opened for reading. Requires: traits().exports is not none. Throws Error if there is no
  // such page.
  virtual ExportedPage export_page(Handle handle) = 0;
  // A handle for a page that another process's driver exported as descriptors or fabric. The caller
  // keeps the descriptor. `destroy` gives back the handle, not the memory.
  virtual Handle import_page(const ExportedPage& page, ExportKind kind) = 0;

  // Order between the work of streams and the core. On the host the calling threads do all work but
  // copies, so the fence of any stream but copy_stream() is null: it has passed.

  // Launches a copy and returns at once: between mapped pages and host memory in copy_stream(), or
  // `within` the device in any stream. The caller keeps the pages mapped and the memory allocated
  // until a fence made afterwards has passed. Any host memory will do. On the host a copy `within`
  // is done on return.
  virtual void copy(CopyDirection direction, Address at, void* memory, std::size_t bytes,
                    Stream stream) = 0;
  // A point after all work launched in `stream` so far; null if there is nothing to wait for.
  virtual FencePtr fence(Stream stream) = 0;
  // Whether the work before the fence is done. Never blocks.
  virtual bool passed(const Fence& fence) = 0;
  // Makes all work launched in `stream` from now on start after the fence. Never blocks on a
  // device. On the host, where the caller does the work, waits, and throws TimedOut.
  virtual void order(Stream stream, const Fence& fence) = 0;
  // Whether `stream` is being captured into a graph: then the core launches nothing in it. Throws
  // InvalidArgument, in the name of `operation`, if the core cannot order work with the stream: it
  // belongs to another context.
  virtual bool capturing(const char* operation, Stream stream) = 0;
  // Calls `release(argument)` once, in any thread, when the graph that is being captured in
  // `stream`, and all executables made from it, are gone. `release` may make no driver call.
  virtual void keep_for_graph(Stream stream, void (*release)(void*), void* argument) = 0;

 protected:
  DriverTraits traits_{};
  Stream side_stream_ = 0, copy_stream_ = 0;
  CallMeter meter_;
};

// Whether the fence passes within `patience` (I12). Requires: no lock is held (I11). But on the
// host `order` waits with the pool's lock, for copies between pages and host memory.
inline bool wait_for(Driver& driver, const Fence& fence, std::chrono::nanoseconds patience) {
  if (driver.passed(fence)) return true;
  const trace::Span span(trace::What::wait, 0, 0);
  const auto until = std::chrono::steady_clock::now() + patience;
  // Asks often at first, because most fences pass in microseconds.
  std::chrono::microseconds pause{5};
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(pause);
    if (driver.passed(fence)) return true;
    pause = std::min(2 * pause, std::chrono::microseconds(100));
  }
  return false;
}
inline bool wait_for(Driver& driver, const FencePtr& fence, std::chrono::nanoseconds patience) {
  return !fence || wait_for(driver, *fence, patience);
}

struct HostOptions {
  std::size_t page_size = 0;  // 0: the default, 64 KiB
  bool strict_holes = false;  // unmapped addresses fault on reads too; for tests of over-reads
  bool shareable = false;     // other processes may read the memory
  // The file that another driver exported, if not -1: this driver owns it, maps it read-only, and
  // makes no handles.
  int memory = -1;
  // Counts the driver's mappings; null: the process's own. A test's limit outlives the driver.
  class MapLimit* limit = nullptr;
};
std::unique_ptr<Driver> make_host_driver(const HostOptions& options);
// Bytes of the host's memory that this process may still take.
std::size_t free_host_memory();

struct CudaOptions {
  int device = 0;
  DeviceUuid uuid{};                     // unless zeros: takes the device of this UUID
  bool shareable = false;                // other processes may read the memory
  bool rdma = false;                     // network adapters may read and write the memory
  std::size_t page_size = 0;             // 0: the device's recommended granularity, at least 2 MiB
  std::string library = "libcuda.so.1";  // loaded now, not at import
  bool memory_is_host_memory = false;    // a simulated libcuda: tensors are CPU tensors
  std::chrono::milliseconds timeout{60'000};  // of a wait for the device
};
std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options);

}  // namespace vtensor
