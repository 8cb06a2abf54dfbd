// Whether this process is a fork(2) child of the one that made the pools. Such a child has no
// access to them (I13).
#pragma once

#include <atomic>
#include <cstdint>

namespace vtensor {

// How many forks lie between this process and the first one that watched: what was made at another
// count is another process's. Counted by the handler of `watch_forks`.
inline std::atomic<std::uint32_t> fork_depth{0};

inline bool in_forked_child() noexcept { return fork_depth.load(std::memory_order_relaxed) != 0; }

// Installs the handler that counts forks and ends the trace there. May be called again.
void watch_forks();

// Throws Error in a forked child, whose operations must not reach the parent's memory.
void refuse_in_forked_child(const char* operation);

// Deletes an object, but not in a forked child: there it shows what a thread of the parent was
// changing at the fork, and what it has to give back is the parent's.
struct DeleteUnlessForked {
  template <typename T>
  void operator()(T* object) const {
    if (!in_forked_child()) delete object;
  }
};

}  // namespace vtensor
