// How much memory a pool on the host may take. Beyond the cgroup's limit the kernel kills instead
// of refusing, so the default budget stays below it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace vtensor {

// The number after `key` in a file of "key number" lines.
std::optional<std::size_t> field_in(const std::string& path, const std::string& key);

// The smaller of MemAvailable and the room in this process's memory cgroup (v2 or v1, with all its
// ancestors), bytes. What cannot be read sets no limit. The roots are those of the file systems.
std::size_t free_host_memory(const std::string& proc, const std::string& cgroups);

}  // namespace vtensor
