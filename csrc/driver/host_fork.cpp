#include "driver/host_fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string_view>
#include <system_error>

#include "base/process.h"

namespace vtensor {
namespace {

std::mutex registry_mutex;
ForkedState* registry = nullptr;

// Runs in a forked child, perhaps of a threaded process: system calls only.
void isolate(const KernelMapping& mapping, int memfd) {
  void* const address = reinterpret_cast<void*>(mapping.begin);
  if (mmap(address, mapping.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
           memfd, static_cast<off_t>(mapping.offset)) != MAP_FAILED) {
    return;
  }
  // Rather no memory than the parent's.
  if (mmap(address, mapping.bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED) {
    return;
  }
  constexpr std::string_view message =
      "vtensor: cannot part this forked process from its parent's tensors; it ends here\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  _exit(70);
}

}  // namespace

struct ForkHandlers {
  static void prepare() {
    registry_mutex.lock();
    for (ForkedState* s = registry; s; s = s->next_) s->mutex.lock();
  }

  static void parent() {
    for (ForkedState* s = registry; s; s = s->next_) s->mutex.unlock();
    registry_mutex.unlock();
  }

  static void child() {
    in_forked_child.store(true, std::memory_order_relaxed);
    for (ForkedState* s = registry; s; s = s->next_) {
      if (s->memfd >= 0) {  // else a grandchild, whose mappings are private already
        s->mirror.for_each([s](const KernelMapping& mapping) {
          // copy-on-write mappings are private already, and a new one would lose what is copied in
          // it.
          if (mapping.kind == MappingKind::writable) isolate(mapping, s->memfd);
        });
        close(s->memfd);
        s->memfd = -1;
      }
      s->mutex.unlock();
    }
    registry_mutex.unlock();
  }

  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      if (const int error = pthread_atfork(prepare, parent, child)) {
        throw std::system_error(error, std::generic_category(), "pthread_atfork");
      }
    });
  }

  static void add(ForkedState& state) {
    const std::lock_guard lock(registry_mutex);
    state.next_ = registry;
    if (registry) registry->previous_ = &state;
    registry = &state;
  }

  static void remove(ForkedState& state) {
    const std::lock_guard lock(registry_mutex);
    (state.previous_ ? state.previous_->next_ : registry) = state.next_;
    if (state.next_) state.next_->previous_ = state.previous_;
  }
};

ForkedState::ForkedState() {
  watch_forks();
  ForkHandlers::install();
  ForkHandlers::add(*this);
}

ForkedState::~ForkedState() {
  ForkHandlers::remove(*this);
  if (memfd >= 0) close(memfd);
}

}  // namespace vtensor
