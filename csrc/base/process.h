// Whether this process is a fork(2) child of the one that made the pools. Such a child has no
// access to them (I13).
#pragma once

#include <atomic>
#include <cstdint>

namespace vtensor {

// How many forks lie between this process and the first one that watched: what was made at another
// count is another process's.
inline std::atomic<std::uint32_t> fork_depth{0};

inline bool in_forked_child() noexcept { return fork_depth.load(std::memory_order_relaxed) != 0; }

// From now on forks count, and end the trace in the child. A child that is forked before this has
// nothing of its parent, and may make pools of its own.
//
// Handlers of fork(2) are registered at load. A fork while the first use of something registers its
// handlers would leave a child that waits for that use.
void watch_forks() noexcept;

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
