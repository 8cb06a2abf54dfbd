#include "driver/host_fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string_view>
#include <system_error>
#include <vector>

#include "base/process.h"

namespace vtensor {
namespace {

std::mutex registry_mutex;
// Never destroyed: a process may fork while it exits.
std::vector<ForkedState*>& registry() {
  static std::vector<ForkedState*>& all = *new std::vector<ForkedState*>;
  return all;
}

// Runs in a forked child, perhaps of a threaded process: system calls only.
void isolate(const KernelMapping& mapping, int memfd) {
  void* const address = reinterpret_cast<void*>(mapping.begin);
  if (mmap(address, mapping.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
           memfd, static_cast<off_t>(mapping.offset)) != MAP_FAILED) {
    return;
  }
  // No memory is better than the parent's.
  if (mmap(address, mapping.bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED) {
    return;
  }
  constexpr std::string_view message =
      "vtensor: cannot separate this forked process from its parent's tensors; it ends here\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  _exit(70);
}

void prepare() {
  registry_mutex.lock();
  for (ForkedState* state : registry()) state->mutex.lock();
}

void resume() {
  for (ForkedState* state : registry()) state->mutex.unlock();
  registry_mutex.unlock();
}

void resume_in_child() {
  in_forked_child = true;
  for (ForkedState* state : registry()) {
    if (state->memfd < 0) continue;  // a grandchild: the mappings are private already
    state->mirror.for_each([state](const KernelMapping& mapping) {
      // Copy-on-write mappings are private already, and a new one would lose their copied pages.
      if (mapping.kind == MappingKind::writable) isolate(mapping, state->memfd);
    });
    close(state->memfd);
    state->memfd = -1;
  }
  resume();
}

}  // namespace

ForkedState::ForkedState() {
  watch_forks();
  static std::once_flag once;
  std::call_once(once, [] {
    if (const int error = pthread_atfork(prepare, resume, resume_in_child)) {
      throw std::system_error(error, std::generic_category(), "pthread_atfork");
    }
  });
  const std::lock_guard lock(registry_mutex);
  registry().push_back(this);
}

ForkedState::~ForkedState() {
  {
    const std::lock_guard lock(registry_mutex);
    std::erase(registry(), this);
  }
  if (memfd >= 0) close(memfd);
}

}  // namespace vtensor
