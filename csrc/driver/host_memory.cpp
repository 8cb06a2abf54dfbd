#include "driver/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "driver/driver.h"

namespace vtensor {

std::optional<std::size_t> field_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::size_t number;
    if (words >> word && word == key && words >> number) return number;
  }
  return std::nullopt;
}

namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// The number in a file of one number. "max", and a file that cannot be read, give nothing.
std::optional<std::size_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t number;
  if (file >> number) return number;
  return std::nullopt;
}

struct CgroupFiles {
  std::string mount, path;
  const char *limit, *usage, *reclaimable;  // file names, and a key of memory.stat
};

std::size_t room_in(const CgroupFiles& files) {
  std::size_t room = kUnlimited;
  std::string path = files.path;
  while (true) {  // every ancestor's limit holds
    const std::string folder = files.mount + path + "/";
    const auto limit = number_in(folder + files.limit);
    const auto usage = number_in(folder + files.usage);
    if (limit && usage) {
      // The page cache counts as usage, but the kernel drops it before it kills a process.
      const std::size_t cache = field_in(folder + "memory.stat", files.reclaimable).value_or(0);
      const std::size_t used = *usage - std::min(*usage, cache);
      room = std::min(room, *limit - std::min(*limit, used));
    }
    if (path.empty()) return room;
    path.resize(path.rfind('/'));
  }
}

std::size_t room_in_cgroups(const std::string& proc, const std::string& cgroups) {
  std::size_t room = kUnlimited;
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
    std::istringstream fields(line);
    std::string hierarchy, controllers, path;
    std::getline(fields, hierarchy, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (path.empty() || path.front() != '/') continue;
    if (path == "/") path.clear();
    if (controllers.empty()) {
      room =
          std::min(room, room_in({cgroups, path, "memory.max", "memory.current", "inactive_file"}));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      room = std::min(room, room_in({cgroups + "/memory", path, "memory.limit_in_bytes",
                                     "memory.usage_in_bytes", "total_inactive_file"}));
    }
  }
  return room;
}

}  // namespace

std::size_t free_host_memory(const std::string& proc, const std::string& cgroups) {
  const auto kilobytes = field_in(proc + "/meminfo", "MemAvailable:");
  const std::size_t free = kilobytes ? *kilobytes * 1024 : kUnlimited;
  return std::min(free, room_in_cgroups(proc, cgroups));
}

std::size_t free_host_memory() { return free_host_memory("/proc", "/sys/fs/cgroup"); }

}  // namespace vtensor
