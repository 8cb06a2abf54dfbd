#include "driver/host_map_limit.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <string>

#include "base/errors.h"

namespace vtensor {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::ptrdiff_t>::max();
constexpr std::ptrdiff_t kFewestBetweenSamples = 64;

std::size_t read_limit() {
  const int fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kNoLimit;
  std::array<char, 32> text{};
  const ssize_t n = read(fd, text.data(), text.size() - 1);
  close(fd);
  return n > 0 ? std::strtoull(text.data(), nullptr, 10) : kNoLimit;
}

std::size_t count_lines_of_maps() {
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::array<char, 16384> text;
  std::size_t lines = 0;
  for (ssize_t n; (n = read(fd, text.data(), text.size())) > 0;) {
    lines += static_cast<std::size_t>(std::count(text.data(), text.data() + n, '\n'));
  }
  close(fd);
  return lines;
}

}  // namespace

MapLimit::Source MapLimit::kernel() { return {read_limit, count_lines_of_maps}; }

MapLimit& MapLimit::of_process() {
  static MapLimit limit(kernel());
  return limit;
}

void MapLimit::sample(std::ptrdiff_t more) {
  const std::lock_guard lock(sampling_);
  const std::size_t limit = std::min(source_.limit(), kNoLimit);
  const std::size_t count = source_.count();
  const std::size_t headroom = std::min<std::size_t>(512, limit / 16);
  const auto room =
      static_cast<std::ptrdiff_t>(limit - headroom) - static_cast<std::ptrdiff_t>(count);
  if (more > room) {
    throw DriverError(
        "mmap", ENOMEM, "ENOMEM",
        "[host map] need " + std::to_string(more) + " kernel mappings, the process has " +
            std::to_string(count) + " of " + std::to_string(limit) +
            " (vm.max_map_count), of which " + std::to_string(headroom) +
            " are kept back: make a pool with a larger page_size=, or raise the limit "
            "with sysctl vm.max_map_count");
  }
  const std::ptrdiff_t ahead = std::max({more, room / 2, std::min(room, kFewestBetweenSamples)});
  const std::ptrdiff_t ours = ours_.load(std::memory_order_relaxed);
  known_good_.store(ahead < std::numeric_limits<std::ptrdiff_t>::max() - ours
                        ? ours + ahead
                        : std::numeric_limits<std::ptrdiff_t>::max(),
                    std::memory_order_relaxed);
}

}  // namespace vtensor
