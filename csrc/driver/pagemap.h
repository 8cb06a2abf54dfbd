// What the kernel tells of this process's pages. Linux, Documentation/admin-guide/mm/pagemap.rst.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace vtensor {

class Pagemap {
 public:
  // One for each kernel page.
  using Entry = std::uint64_t;

  // Kept open: opening it takes as long as reading 300 entries. Where that is refused it tells
  // nothing.
  Pagemap() : file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}
  ~Pagemap() {
    if (file_ >= 0) close(file_);
  }
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

  // Of the pages from number `first` on; returns of how many, 0 where the kernel does not tell.
  std::size_t read(std::size_t first, std::span<Entry> entries) const {
    const ssize_t bytes = pread(file_, entries.data(), entries.size_bytes(),
                                static_cast<off_t>(first * sizeof(Entry)));
    return bytes < 0 ? 0 : static_cast<std::size_t>(bytes) / sizeof(Entry);
  }

  // Whether there is memory behind a page that is no file's: its own, after a write to a private
  // mapping.
  static bool is_private(Entry entry) {
    constexpr Entry kOfFile = Entry{1} << 61;
    constexpr Entry kSwapped = Entry{1} << 62;
    constexpr Entry kPresent = Entry{1} << 63;
    return (entry & (kPresent | kSwapped)) && !(entry & kOfFile);
  }

 private:
  const int file_;
};

}  // namespace vtensor
