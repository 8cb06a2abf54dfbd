#include "base/process.h"

#include <pthread.h>

#include <mutex>

#include "base/errors.h"
#include "base/trace.h"

namespace vtensor {

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      ++fork_depth;
      trace::on = false;
    });
  });
}

void refuse_in_forked_child(const char* operation) {
  if (in_forked_child()) {
    throw Error(
        "[", operation,
        "] this process was forked from the one that has the memory, and cannot reach it: take a "
        "clone() before the fork, or start this process with spawn");
  }
}

}  // namespace vtensor
