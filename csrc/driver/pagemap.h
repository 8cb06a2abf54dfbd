// Which pages of this process the kernel has copied at a write (Linux,
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
  // `may_scan`: uses PAGEMAP_SCAN where the kernel has it (Linux 6.7). Beside reading an entry for
  // each page of the kernel, that skips page tables that are not there: a range that nothing has
  // touched since its pages were remapped costs nothing.
  explicit Pagemap(bool may_scan = true);

  // Marks pages of `page_size` from `at` on that have memory of no file: a write to a private
  // mapping copied it. False if the kernel does not say.
  bool find_private(Address at, std::size_t page_size, std::span<std::uint8_t> found);

  bool scans() const { return scans_.load(std::memory_order_relaxed); }

 private:
  bool scan(Address at, std::size_t page_size, std::span<std::uint8_t> found);
  bool read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const;

  const Descriptor file_;
  std::atomic<bool> scans_;  // until the kernel says that it cannot
};

}  // namespace vtensor
