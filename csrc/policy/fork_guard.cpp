#include "policy/fork_guard.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "base/process.h"
#include "policy/page_pool.h"

namespace vtensor {

PagesInChildren::~PagesInChildren() {
  for (const Child& child : children_) {
    if (child.read_end >= 0) close(child.read_end);
    if (child.write_end >= 0) close(child.write_end);
  }
}

std::size_t PagesInChildren::size() const {
  std::size_t pages = 0;
  for (const Child& child : children_) pages += child.pages.size();
  return pages;
}

void PagesInChildren::add(std::vector<Page*> pages) {
  int ends[2] = {-1, -1};
  if (pipe2(ends, O_CLOEXEC) != 0) ends[0] = ends[1] = -1;
  children_.push_back({ends[0], ends[1], std::move(pages)});
}

void PagesInChildren::seal() {
  for (Child& child : children_) {
    if (child.write_end >= 0) close(std::exchange(child.write_end, -1));
  }
}

Page* PagesInChildren::take_back() noexcept {
  for (Child& child : children_) {
    pollfd end{child.read_end, 0, 0};  // a negative one is never ready
    if (poll(&end, 1, 0) != 1 || !(end.revents & POLLHUP)) continue;
    Page* page = child.pages.back();
    child.pages.pop_back();
    if (child.pages.empty()) {
      close(child.read_end);
      std::swap(child, children_.back());
      children_.pop_back();
    }
    return page;
  }
  return nullptr;
}

namespace {

std::mutex registry_mutex;

// Never destroyed: the last reference to a pool may go in its mapper while the process ends.
std::vector<PagePool*>& registry() {
  static auto& pools = *new std::vector<PagePool*>;
  return pools;
}

void prepare() {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  registry_mutex.lock();
  for (PagePool* pool : registry()) pool->before_fork();
}

void parent() {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  for (PagePool* pool : registry()) pool->after_fork();
  registry_mutex.unlock();
}

}  // namespace

void join_forks(PagePool* pool) {
  static std::once_flag once;
  // The child needs no handler: its operations are refused before they reach a lock.
  std::call_once(once, [] { pthread_atfork(prepare, parent, nullptr); });
  const std::lock_guard lock(registry_mutex);
  registry().push_back(pool);
}

void leave_forks(PagePool* pool) {
  const std::lock_guard lock(registry_mutex);
  std::erase(registry(), pool);
}

}  // namespace vtensor
