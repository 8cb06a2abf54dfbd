// Refuses one allocation of a thread, for tests of one file each: it replaces operator new. The
// allocations of the simulated libcuda and of other libraries do not count.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

extern "C" const char __executable_start, etext;  // of the linker

// Allocations of this thread before one is refused; below 0 none is.
thread_local long allowed = -1;

void* allocate(std::size_t bytes, std::size_t alignment, const void* caller) {
  const bool ours = caller >= &__executable_start && caller < &etext;
  const bool refused = ours && allowed == 0;
  if (ours && allowed >= 0) --allowed;
  void* const at = refused
                       ? nullptr
                       : std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return allocate(bytes, alignof(std::max_align_t), __builtin_return_address(0));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }
