// What the kernel tells of this process's pages. Linux, Documentation/admin-guide/mm/pagemap.rst.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "driver/driver.h"

namespace vtensor {

class Pagemap {
 public:
  // By an entry for each page of the kernel, or, where it may and the kernel has it (Linux 6.7), by
  // PAGEMAP_SCAN, which passes over page tables that are not there.
  explicit Pagemap(bool may_scan = true);
  ~Pagemap();
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

  // Marks those of the pages of `page_size` from `at` on in which there is memory that is no
  // file's: their own, after a write to a private mapping. False where the kernel does not tell.
  bool find_private(Address at, std::size_t page_size, std::span<std::uint8_t> found);

  bool scans() const { return scans_.load(std::memory_order_relaxed); }

 private:
  bool scan(Address at, std::size_t page_size, std::span<std::uint8_t> found);
  bool read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const;

  const int file_;
  std::atomic<bool> scans_;  // until the kernel says that it cannot
};

}  // namespace vtensor
