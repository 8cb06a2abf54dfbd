// How much memory a pool on the host may take. Beyond the cgroup's limit the kernel kills instead
// of refusing, so the default budget stays below it.
#pragma once

#include <cstddef>
#include <string>

namespace vtensor {

// The smaller of MemAvailable and the room in this process's memory cgroup (v2 or v1, with all its
// ancestors), bytes. What cannot be read is left out. The roots are for tests.
std::size_t free_host_memory(const std::string& proc = "/proc",
                             const std::string& cgroups = "/sys/fs/cgroup");

// What a pool takes by default.
inline std::size_t default_host_budget() { return free_host_memory() / 5 * 4; }

}  // namespace vtensor
