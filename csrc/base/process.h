// Whether this process is a fork(2) child of the one that made the pools. Such a child has no
// access to them (I13).
#pragma once

#include <atomic>
#include <cstdint>

namespace vtensor {

// How many forks lie between this process and the first one that called watch_forks(). An object
// that was made at another depth belongs to another process.
inline std::atomic<std::uint32_t> fork_depth{0};

inline bool in_forked_child() noexcept { return fork_depth.load(std::memory_order_relaxed) != 0; }

// From now on a fork increments fork_depth in the child, and ends the trace there. A child forked
// earlier has nothing of its parent, and may make pools of its own.
//
// Fork handlers are registered at load. If the first use of an object registered them, a fork
// meanwhile would leave a child that waits for that use for ever.
void watch_forks() noexcept;

// Throws Error in a forked child, whose operations must not reach the parent's memory.
void refuse_in_forked_child(const char* operation);

// Deletes an object, but not in a forked child: a thread of the parent may have been changing the
// object at the fork, and the resources are the parent's.
struct DeleteUnlessForked {
  template <typename T>
  void operator()(T* object) const {
    if (!in_forked_child()) delete object;
  }
};

}  // namespace vtensor
