// Whether this process is a fork(2) child of the one that made the pools (I13).
#pragma once

#include <atomic>

namespace vtensor {

// Set in the child by the host driver's fork handler and by `watch_forks`; never cleared.
inline std::atomic<bool> in_forked_child{false};

// Installs the handler that sets `in_forked_child`; safe to call more than once.
void watch_forks();

// Throws Error where this is a forked child: operations there must not reach the parent's memory.
void refuse_in_forked_child(const char* operation);

}  // namespace vtensor
