// Host memory from torch, whose allocator keeps page-locked memory for the next request.
#pragma once

#include <cstddef>
#include <memory>

namespace vtensor::bind {

// Allocates host memory. `pinned`: page-locked, so that copies overlap with kernels. Throws
// OutOfPages. May be called and released with or without the GIL.
std::shared_ptr<std::byte> allocate_host_memory(const char* operation, std::size_t bytes,
                                                bool pinned);

}  // namespace vtensor::bind
