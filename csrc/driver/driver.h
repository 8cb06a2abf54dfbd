// The contract between the core and the memory of one device: the one seam to the operating system
// and to libcuda. One Driver serves one page pool and one page size.
//
// A refused call is a DriverError. Every operation but `map` is whole or nothing. Unless stated
// otherwise, operations may be called from any thread, but not two at a time on overlapping
// addresses, and wait for nothing on the device. No operation calls Python. In a forked child (I13)
// unmap, free_range and destroy, which destructors use, do nothing, and all others that would make
// a driver call throw.
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
// A CUstream; 0 is the legacy default stream. The host has none but that of its copies.
using Stream = std::uintptr_t;
// Memory of the host beside the pages, as long as it has a holder.
using HostMemory = std::shared_ptr<std::byte>;

// Neighbouring pages: handles[i] is mapped at `at + i * page_size`.
struct PageRun {
  Address at;
  std::span<const Handle> handles;
};

// A copy of the bytes seen through a mapped page into a handle.
struct PageCopy {
  Handle to;
  Address from;
};

// A point in a stream's work. Several page runs may wait for one. Its end, in any thread, gives the
// driver's event back.
class Fence {
 public:
  virtual ~Fence() = default;
};
using FencePtr = std::shared_ptr<const Fence>;

enum class Access : std::uint8_t {
  writable,       // stores reach the handle
  copy_on_write,  // stores do not: the kernel copies the page (host), or the device faults (CUDA)
};

struct Device {
  std::int32_t type;  // as DLPack numbers them: 1 CPU, 2 CUDA
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

// What another process gets a page by.
struct ExportedPage {
  Descriptor descriptor{-1};
  std::array<std::byte, 64> fabric{};
};

// The UUID that a device has in every process; zeros for the host.
using DeviceUuid = std::array<char, 16>;

struct DriverTraits {
  std::string name;         // "host", "cuda"
  Device device;            // what tensors over this memory report to DLPack
  std::size_t page_size;    // bytes; the unit of everything below
  std::size_t granularity;  // the driver's smallest page, bytes
  std::size_t budget_part;  // tenths of the free memory: a pool's default budget
  // h and h + 1 at neighbouring pages merge into one kernel mapping; new handles read as zeros.
  bool adjacent_handles = false;
  // A write to a copy-on-write page copies it, without a fault; and remap never leaves a page
  // unmapped, whatever is refused.
  bool kernel_copies_on_write = false;
  bool asynchronous = false;  // kernels run in streams, beside their callers
  ExportKind exports = ExportKind::none;
  DeviceUuid uuid{};
};

// The pages of a range that are backed: of every `every` pages the first `first`; none by default.
struct Backed {
  std::size_t first = 0;
  std::size_t every = 1;
};

// Out of pages, into pages, or into pages from other memory of the device.
enum class CopyDirection : std::uint8_t { out, in, within };

class Driver {
 public:
  virtual ~Driver() = default;
  const DriverTraits& traits() const { return traits_; }
  CallMeter& meter() { return meter_; }

  // Our own stream, beside those of the callers.
  Stream side_stream() const { return side_stream_; }
  // Our own stream for copies between mapped pages and host memory; on the host, threads.
  Stream copy_stream() const { return copy_stream_; }

  // Reserves `pages` pages of addresses, aligned to the page size. Costs no memory. Reads where
  // nothing is mapped give zeros or fault, by driver; writes there always fault. At the pages
  // `backed` a device on which kernels cannot be given the address of a hole has a page of zeros,
  // read-only and the driver's own, while nothing else is mapped there. That costs calls now and
  // whenever those pages are mapped or unmapped.
  virtual Address reserve(std::size_t pages, Backed backed = {}) = 0;
  // Frees exactly what `reserve` returned. Requires: nothing is mapped in it.
  virtual void free_range(Address range, std::size_t pages) = 0;

  // Makes `n` handles h, h+1, ...; n == 1 unless traits().adjacent_handles, whose handles cost
  // nothing until their memory is touched. Throws DeviceOutOfMemory.
  virtual Handle create(std::size_t n) = 0;
  // Gives the memory of `n` handles back; n as for create. Requires: mapped nowhere. With
  // adjacent_handles the handles stay good and read as zeros again; otherwise they are gone.
  virtual void destroy(Handle first, std::size_t n) = 0;

  // Maps runs of pages, in any number of reserved ranges, one after the other up to the first
  // refusal. Adds to `mapped` the pages that are mapped then, perhaps without access: unmapping
  // them is the caller's. Requires: nothing is mapped there. Throws DeviceOutOfMemory if there is
  // no memory for the mapping itself.
  virtual void map(std::span<const PageRun> runs, Access access, std::size_t& mapped) = 0;
  // Unmaps `n` pages of one range, which stays reserved. Requires: no work, launched or about to
  // be, touches them.
  virtual void unmap(Address at, std::size_t n) = 0;
  // Replaces the handles of mapped pages, all of one access. A private copy of a copy-on-write page
  // is lost. Throws UndoFailed if a refusal leaves neither the old pages nor the new ones.
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
  // Sets to 1 the entry of each of the copy-on-write pages at `at` that a write has copied, or to
  // kMaybeCopied if the system does not say.
  virtual void find_private_copies(Address at, std::span<std::uint8_t> private_copies) = 0;

  // Bytes of the device's memory that are free.
  virtual std::size_t free_memory() = 0;

  // Exports the page with this handle; of ExportKind::file the file, opened for reading, whatever
  // the handle is. Requires: traits().exports is not none. Throws Error if there is no such page.
  virtual ExportedPage export_page(Handle handle) = 0;
  // A handle for a page that another process's driver exported as descriptors or fabric do. The
  // descriptor stays the caller's. `destroy` gives the handle back, not the memory.
  virtual Handle import_page(const ExportedPage& page, ExportKind kind) = 0;

  // Order between the work of streams and the core. On the host the calling threads do all work but
  // copies, so a fence of any other stream is null, which has passed.

  // Launches a copy between mapped pages and host memory in the copying stream, or `within` the
  // device in any, and returns at once. The caller keeps the pages mapped and the memory where it
  // is until a fence made afterwards has passed. Host memory may be any, not only the driver's.
  // On the host a copy `within` is done on return.
  virtual void copy(CopyDirection direction, Address at, void* memory, std::size_t bytes,
                    Stream stream) = 0;
  // A point after all work launched in `stream` so far; null if there is nothing to wait for.
  virtual FencePtr fence(Stream stream) = 0;
  // Whether that work is done. Never blocks.
  virtual bool passed(const Fence& fence) = 0;
  // Makes all work launched in `stream` from now on start after the fence. Never blocks; but the
  // host, whose work the caller does, waits. Throws TimedOut.
  virtual void order(Stream stream, const Fence& fence) = 0;
  // Whether `stream` is being captured into a graph: then the core launches nothing in it. Throws
  // InvalidArgument, in the name of `operation`, if work in the stream, as this thread names it,
  // cannot be ordered with the core.
  virtual bool capturing(const char* operation, Stream stream) = 0;
  // Calls `release(argument)` once, in any thread, when the graph that is being captured in
  // `stream` and all that was made from it are gone. `release` may make no driver call.
  virtual void keep_for_graph(Stream stream, void (*release)(void*), void* argument) = 0;

 protected:
  DriverTraits traits_{};
  Stream side_stream_ = 0, copy_stream_ = 0;
  CallMeter meter_;
};

// Whether the fence passes within `patience` (I12). Requires: no lock is held (I11). On the host
// `order` waits so with the pool's lock, for copies between pages and host memory.
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
  // The file that another driver exported, if not -1: this one owns it, and reads what that one
  // maps. It makes no handles and writes to none.
  int memory = -1;
  // What the driver's mappings are counted against: the process's limit, if null. A test may have
  // one, which lives as long as the driver.
  class MapLimit* limit = nullptr;
};
std::unique_ptr<Driver> make_host_driver(const HostOptions& options);
// Bytes of the host's memory that this process may still take.
std::size_t free_host_memory();

struct CudaOptions {
  int device = 0;
  DeviceUuid uuid{};                     // unless zeros: the device with it, whatever its number
  bool shareable = false;                // other processes may read the memory
  bool rdma = false;                     // network adapters may read and write the memory
  std::size_t page_size = 0;             // 0: the device's recommended granularity, at least 2 MiB
  std::string library = "libcuda.so.1";  // loaded now, not at import
  bool memory_is_host_memory = false;    // a simulated libcuda: tensors are CPU tensors
  std::chrono::milliseconds timeout{60'000};  // of a wait for the device
};
std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options);

}  // namespace vtensor
