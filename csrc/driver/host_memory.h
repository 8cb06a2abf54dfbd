// How much memory a pool on the host may take. Beyond the cgroup's limit the kernel kills the
// process instead of refusing memory, so the default budget stays below the limit.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace vtensor {

// The number after `key` in a file of "key number" lines.
std::optional<std::size_t> field_in(const std::string& path, const std::string& key);

// The smaller of MemAvailable and the room in this process's memory cgroup (v2 or v1, with all its
// ancestors), bytes. A file that cannot be read sets no limit. `proc` and `cgroups` are the roots
// of the file systems.
std::size_t free_host_memory(const std::string& proc, const std::string& cgroups);

}  // namespace vtensor
