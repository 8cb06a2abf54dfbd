// Finds the private pages that the kernel made at writes (Linux,
// Documentation/admin-guide/mm/pagemap.rst).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/descriptor.h"
#include "driver/driver.h"

namespace vtensor {

class Pagemap {
 public:
  // `may_scan`: uses PAGEMAP_SCAN where the kernel has it (Linux 6.7). Reading takes an entry for
  // each kernel page; PAGEMAP_SCAN skips page tables that are not there, so a range that nothing
  // has touched since it was remapped costs nothing.
  explicit Pagemap(bool may_scan = true);

  // Marks the pages of `page_size` from `at` on in which a write to a private mapping made a copy:
  // memory of no file. False if the kernel does not say.
  bool find_private(Address at, std::size_t page_size, std::span<std::uint8_t> found);

  bool scans() const { return scans_.load(std::memory_order_relaxed); }

 private:
  bool scan(Address at, std::size_t page_size, std::span<std::uint8_t> found);
  bool read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const;

  const Descriptor file_;
  std::atomic<bool> scans_;  // false once the kernel refuses
};

}  // namespace vtensor
