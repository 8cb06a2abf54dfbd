#include "driver/host_fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string_view>
#include <system_error>
#include <vector>

#include "base/fault_report.h"
#include "base/process.h"
#include "driver/host_map_limit.h"

namespace vtensor {
namespace {

std::mutex registry_mutex;
// Never destroyed: a process may fork while it exits.
std::vector<ForkedState*>& registry() {
  static std::vector<ForkedState*>& all = *new std::vector<ForkedState*>;
  return all;
}

// Runs in a forked child, perhaps of a threaded process: system calls only. One mapping instead of
// all that were there, which lets go of what the kernel copied for the parent too.
void take_away(const HostReservation& range) {
  if (mmap(reinterpret_cast<void*>(range.base), range.bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED) {
    return;
  }
  constexpr std::string_view message =
      "vtensor: cannot take the parent's tensors from this forked process; it ends here\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  _exit(70);
}

void prepare() {
  registry_mutex.lock();
  for (ForkedState* state : registry()) state->mutex.lock();
  MapLimit::of_process().lock();  // last, as drivers do
}

void resume() {
  MapLimit::of_process().unlock();
  for (ForkedState* state : registry()) state->mutex.unlock();
  registry_mutex.unlock();
}

void resume_in_child() {
  for (ForkedState* state : registry()) {
    if (state->memfd < 0) continue;  // a grandchild: it is done
    for (const auto& [at, range] : state->reservations) take_away(range);
    close(state->memfd);
    state->memfd = -1;
    faults::explain_in_child();
  }
  resume();
}

const int refused = pthread_atfork(prepare, resume, resume_in_child);

}  // namespace

ForkedState::ForkedState() {
  if (refused != 0) throw std::system_error(refused, std::generic_category(), "pthread_atfork");
  watch_forks();
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
