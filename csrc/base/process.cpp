#include "base/process.h"

#include <pthread.h>

#include "base/errors.h"
#include "base/trace.h"

namespace vtensor {
namespace {

std::atomic<bool> watching{false};
[[maybe_unused]] const int refused = pthread_atfork(nullptr, nullptr, []() noexcept {
  if (!watching) return;
  ++fork_depth;
  trace::on = false;
});

}  // namespace

void watch_forks() noexcept { watching = true; }

void refuse_in_forked_child(const char* operation) {
  if (in_forked_child()) {
    throw Error(
        "[", operation,
        "] this process was forked from the one that has the memory, and cannot reach it: take a "
        "clone() before the fork, or start this process with spawn");
  }
}

}  // namespace vtensor
