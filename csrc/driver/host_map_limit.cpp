#include "driver/host_map_limit.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "base/errors.h"
#include "driver/host_memory.h"

namespace vtensor {
namespace {

constexpr std::size_t kNoLimit = std::size_t{1} << 40;
constexpr std::size_t kFewestBetweenCounts = 64;
constexpr std::size_t kBallast = 4;  // mappings

std::size_t kernel_page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Allocates nothing, because no mapping may be left.
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

// The limit on bytes that `bytes` more would pass; empty if none.
std::string passed_by(std::size_t bytes) {
  struct OfBytes {
    __rlimit_resource resource;
    const char *used, *what, *remedy;
  };
  constexpr OfBytes kLimits[] = {
      {RLIMIT_DATA, "VmData:",
       "bytes of private memory that may be written to, as shared pages may, of at most ",
       " (RLIMIT_DATA): raise the limit with ulimit -d, or share fewer pages"},
      {RLIMIT_AS, "VmSize:", "bytes of addresses, of at most ",
       " (RLIMIT_AS): raise the limit with ulimit -v, or lower the capacity"},
  };
  for (const auto& [resource, name, what, remedy] : kLimits) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    const std::size_t used = field_in("/proc/self/status", name).value_or(0) * 1024;  // kB
    if (used + bytes <= limit.rlim_cur) continue;
    return text("the process has ", used, " ", what, limit.rlim_cur, remedy);
  }
  return {};
}

}  // namespace

MapLimit::Source MapLimit::kernel() { return {read_limit, count_lines_of_maps}; }

MapLimit& MapLimit::of_process() {
  static MapLimit limit(kernel());
  return limit;
}

bool MapLimit::throw_off_ballast() {
  const std::lock_guard lock(mutex_);
  if (!ballast_) return false;
  // The inner mappings first: the outer two may have merged with neighbours, and the kernel may
  // refuse to split a mapping.
  const std::size_t unit = kernel_page();
  munmap(ballast_ + unit, (kBallast - 2) * unit);
  munmap(ballast_, unit);
  munmap(ballast_ + (kBallast - 1) * unit, unit);
  ballast_ = nullptr;
  left_.store(0, std::memory_order_relaxed);
  return true;
}

void MapLimit::take_ballast() {
  const std::size_t unit = kernel_page();
  void* const start =
      mmap(nullptr, kBallast * unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return;
  ballast_ = static_cast<char*>(start);
  // A refusal only makes the ballast lighter.
  for (std::size_t i = 1; i < kBallast; i += 2) mprotect(ballast_ + i * unit, unit, PROT_READ);
}

std::string MapLimit::advice(std::size_t bytes) const {
  const std::size_t count = source_.count();
  if (count + kBallast < source_.limit()) {
    if (std::string passed = passed_by(bytes); !passed.empty()) return passed;
  }
  return text("the process has ", count, " kernel mappings of at most ", source_.limit(),
              " (vm.max_map_count): make a pool of larger pages, close tensors, or raise the limit "
              "with sysctl vm.max_map_count");
}

void MapLimit::check_now(std::size_t more) {
  const std::lock_guard lock(mutex_);
  const std::size_t limit = std::min(source_.limit(), kNoLimit), count = source_.count();
  const std::size_t headroom = std::min<std::size_t>(512, limit / 16);
  const std::size_t used = count + headroom;
  const std::size_t room = limit - std::min(limit, used);
  if (more > room) {
    throw DriverError("mmap", ENOMEM, "ENOMEM", "[host map] need ", more,
                      " kernel mappings more, with ", headroom, " to be left free; ", advice());
  }
  if (!ballast_ && room > 2 * kBallast + more) take_ballast();
  // What cannot be read now, as where no descriptor is left, is looked at again soon.
  const std::size_t known = count == 0 || limit == kNoLimit ? 0 : room;
  const std::size_t ahead = std::max({more, known / 2, std::min(room, kFewestBetweenCounts)});
  left_.store(static_cast<std::ptrdiff_t>(ahead - more), std::memory_order_relaxed);
}

}  // namespace vtensor
