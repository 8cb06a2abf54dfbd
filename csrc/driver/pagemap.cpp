#include "driver/pagemap.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace vtensor {

namespace {

// As in linux/fs.h since 6.7, for older headers.
struct PageRegion {
  std::uint64_t start, end, categories;
};
struct ScanArguments {
  std::uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
      category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);
constexpr std::uint64_t kIsFile = 1 << 2, kIsPresent = 1 << 3, kIsSwapped = 1 << 4;

using Entry = std::uint64_t;  // of one kernel page

bool is_private(Entry entry) {
  constexpr Entry kOfFile = Entry{1} << 61;
  constexpr Entry kSwapped = Entry{1} << 62;
  constexpr Entry kPresent = Entry{1} << 63;
  return (entry & (kPresent | kSwapped)) && !(entry & kOfFile);
}

}  // namespace

// Kept open: opening it takes as long as reading 300 entries. If that is refused, every read is
// too.
Pagemap::Pagemap(bool may_scan)
    : file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), scans_(may_scan) {}

Pagemap::~Pagemap() {
  if (file_ >= 0) close(file_);
}

bool Pagemap::find_private(Address at, std::size_t page_size, std::span<std::uint8_t> found) {
  return (scans() && scan(at, page_size, found)) || read(at, page_size, found);
}

bool Pagemap::scan(Address at, std::size_t page_size, std::span<std::uint8_t> found) {
  std::array<PageRegion, 64> regions;
  ScanArguments scan{.size = sizeof(scan),
                     .flags = 0,
                     .start = at,
                     .end = at + found.size() * page_size,
                     .walk_end = 0,
                     .vec = reinterpret_cast<std::uintptr_t>(regions.data()),
                     .vec_len = regions.size(),
                     .max_pages = 0,
                     .category_inverted = kIsFile,
                     .category_mask = kIsFile,
                     .category_anyof_mask = kIsPresent | kIsSwapped,
                     .return_mask = kIsPresent};
  while (scan.start < scan.end) {
    const int n = ioctl(file_, kScan, &scan);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      if (errno == ENOTTY || errno == EINVAL) scans_.store(false, std::memory_order_relaxed);
      return false;
    }
    for (const PageRegion& region : std::span(regions).first(static_cast<std::size_t>(n))) {
      const std::size_t first = (region.start - at) / page_size;
      const std::size_t last = (region.end - 1 - at) / page_size;
      std::fill(found.begin() + static_cast<std::ptrdiff_t>(first),
                found.begin() + static_cast<std::ptrdiff_t>(last + 1), std::uint8_t{1});
    }
    scan.start = scan.walk_end;
  }
  return true;
}

bool Pagemap::read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const {
  const auto kernel_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t entries_a_page = page_size / kernel_page;
  const std::size_t total = found.size() * entries_a_page;
  const std::size_t first = at / kernel_page;
  std::array<Entry, 4096> entries;
  std::size_t done = 0;
  while (done < total) {
    const std::span<Entry> wanted =
        std::span(entries).first(std::min(total - done, entries.size()));
    const ssize_t bytes = pread(file_, wanted.data(), wanted.size_bytes(),
                                static_cast<off_t>((first + done) * sizeof(Entry)));
    if (bytes <= 0) return false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(bytes) / sizeof(Entry); ++i, ++done) {
      if (is_private(entries[i])) found[done / entries_a_page] = 1;
    }
  }
  return true;
}

}  // namespace vtensor
