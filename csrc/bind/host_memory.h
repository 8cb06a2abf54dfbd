// Memory of the host, from torch, whose allocator keeps page-locked memory for the next request.
#pragma once

#include <cstddef>
#include <memory>

namespace vtensor::bind {

// `pinned`: page-locked, so that copies run beside kernels. Throws OutOfPages. May be called, and
// let go, with the GIL or without.
std::shared_ptr<std::byte> allocate_host_memory(const char* operation, std::size_t bytes,
                                                bool pinned);

}  // namespace vtensor::bind
