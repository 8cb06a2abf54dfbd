// Which pages of this process the kernel has copied at a write (Linux,
// Documentation/admin-guide/mm/pagemap.rst).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "driver/driver.h"

namespace vtensor {

class Pagemap {
 public:
  // Reads an entry for each page of the kernel. If it may, and the kernel has it (Linux 6.7), it
  // uses PAGEMAP_SCAN instead, which skips page tables that are not there.
  explicit Pagemap(bool may_scan = true);
  ~Pagemap();
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

  // Marks those of the pages of `page_size` from `at` on that have memory of no file: a write to a
  // private mapping copied it. False if the kernel does not say.
  bool find_private(Address at, std::size_t page_size, std::span<std::uint8_t> found);

  bool scans() const { return scans_.load(std::memory_order_relaxed); }

 private:
  bool scan(Address at, std::size_t page_size, std::span<std::uint8_t> found);
  bool read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const;

  const int file_;
  std::atomic<bool> scans_;  // until the kernel says that it cannot
};

}  // namespace vtensor
