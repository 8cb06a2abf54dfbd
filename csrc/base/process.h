// Whether this process is a fork(2) child of the one that made the pools (I13).
#pragma once

#include <atomic>

namespace vtensor {

// Set in a child by the handler of `watch_forks` or of a host driver; never cleared.
inline std::atomic<bool> in_forked_child{false};

// Installs the handler that sets `in_forked_child` and ends the trace there. May be called again.
void watch_forks();

// Throws Error in a forked child, whose operations must not reach the parent's memory.
void refuse_in_forked_child(const char* operation);

}  // namespace vtensor
