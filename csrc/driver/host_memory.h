// How much memory a pool on the host may take. Beyond the cgroup's limit the kernel kills instead
// of refusing, so the default budget stays below it.
#pragma once

#include <cstddef>
#include <string>

namespace vtensor {

// 80% of the smaller of MemAvailable and the room in this process's memory cgroup (v2 or v1, with
// all its ancestors), bytes. What cannot be read is left out. The roots are for tests.
std::size_t available_host_memory(const std::string& proc = "/proc",
                                  const std::string& cgroups = "/sys/fs/cgroup");

}  // namespace vtensor
