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
constexpr Entry kOfFile = Entry{1} << 61, kSwapped = Entry{1} << 62, kPresent = Entry{1} << 63;

}  // namespace

// The file stays open: opening takes as long as reading 300 entries. If opening is refused, so is
// every read.
Pagemap::Pagemap(bool may_scan)
    : file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), scans_(may_scan) {}

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
  for (; scan.start < scan.end; scan.start = scan.walk_end) {
    int n;
    do n = ioctl(file_.get(), kScan, &scan);
    while (n < 0 && errno == EINTR);
    if (n < 0) {
      if (errno == ENOTTY || errno == EINVAL) scans_.store(false, std::memory_order_relaxed);
      return false;
    }
    for (const PageRegion& region : std::span(regions).first(static_cast<std::size_t>(n))) {
      const std::size_t first = (region.start - at) / page_size;
      std::fill_n(&found[first], (region.end - 1 - at) / page_size + 1 - first, std::uint8_t{1});
    }
  }
  return true;
}

bool Pagemap::read(Address at, std::size_t page_size, std::span<std::uint8_t> found) const {
  const auto kernel_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t entries_a_page = page_size / kernel_page;
  const std::size_t total = found.size() * entries_a_page;
  std::array<Entry, 4096> entries;
  for (std::size_t done = 0; done < total;) {
    const std::size_t wanted = std::min(total - done, entries.size()) * sizeof(Entry);
    const ssize_t bytes = pread(file_.get(), entries.data(), wanted,
                                static_cast<off_t>((at / kernel_page + done) * sizeof(Entry)));
    if (bytes <= 0) return false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(bytes) / sizeof(Entry); ++i, ++done)
      if ((entries[i] & (kPresent | kSwapped)) && !(entries[i] & kOfFile))
        found[done / entries_a_page] = 1;
  }
  return true;
}

}  // namespace vtensor
