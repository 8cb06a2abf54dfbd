// The contract between the core and the memory of one device: the one seam to the operating system
// and to libcuda. One Driver serves one page pool and one page size.
//
// Every operation is whole or nothing: where a call is refused, the driver undoes what the
// operation did so far and throws DriverError; where the undoing is refused too it throws
// UndoFailed, which names the pages whose mapping is no longer known. Unless stated, operations may
// be called from any thread, but not two at a time on overlapping addresses. No operation calls
// Python. In a forked child (I13) unmap, free_range and destroy, which destructors use, do nothing,
// and everything else throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/calls.h"

namespace vtensor {

using Address = std::uintptr_t;
using Handle = std::uint64_t;  // the physical memory of one page

enum class Access : std::uint8_t {
  writable,  // stores reach the handle
  guarded,   // stores never reach the handle: parted by the kernel (host), refused by the device
             // (CUDA)
};

struct Device {
  std::int32_t type;  // as DLPack numbers them: 1 CPU, 2 CUDA
  std::int32_t index;
};

struct DriverTraits {
  std::string name;               // "host", "cuda"
  Device device;                  // what tensors over this memory report to DLPack
  std::size_t page_size;          // bytes; the unit of everything below
  std::size_t granularity;        // the driver's smallest page, bytes
  std::size_t available;          // bytes a pool may take by default
  bool adjacent_handles = false;  // h and h + 1 at neighbouring pages merge into one kernel mapping
  bool created_zero = false;      // memory behind a handle reads as zeros until first written
  bool parts_on_write = false;  // a write to a guarded page parts it silently, instead of faulting
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

  // Maps handles[i] at `at + i * page_size`. Requires: inside one reserved range, nothing mapped
  // there.
  virtual void map(Address at, std::span<const Handle> handles, Access access) = 0;
  // Unmaps `n` mapped pages: all of them, whatever the access. The range stays reserved. `handles`
  // and `access` are what is mapped there, for undoing. Requires: no work, launched or about to be,
  // touches them.
  virtual void unmap(Address at, std::span<const Handle> handles, Access access) = 0;
  // Replaces what stands behind mapped pages, all of one access. A guarded page that was parted
  // loses its parted content. Requires: as unmap.
  virtual void remap(Address at, std::span<const Handle> from, Access from_access,
                     std::span<const Handle> to, Access to_access) = 0;

  // Content. Requires: [at, at + bytes) is mapped writable; complete on return.
  virtual void zero(Address at, std::size_t bytes) = 0;
  // Copies what is seen through the mapped page at `from` into `to`, which is mapped nowhere;
  // complete on return. With parts_on_write, `to` may also be the handle mapped guarded at `from`
  // alone.
  virtual void copy_page(Handle to, Address from) = 0;
  // Has the memory of `n` pages, mapped writable at `at`, made present now instead of at first
  // touch.
  virtual void populate(Address at, std::size_t n) = 0;
  // Sets parted[i] for each of the guarded pages at `at` that a write has parted from its handle.
  virtual void find_parted(Address at, std::span<std::uint8_t> parted) = 0;

  // Returns once no work launched so far can touch this device's memory.
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
};
std::unique_ptr<Driver> make_cuda_driver(const CudaOptions& options);

}  // namespace vtensor
