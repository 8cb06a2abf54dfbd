#include "policy/fork_guard.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/process.h"
#include "policy/page_pool.h"

namespace vtensor {

LentPages::~LentPages() {
  for (const Loan& loan : loans_) {
    if (loan.read_end >= 0) close(loan.read_end);
    if (loan.write_end >= 0) close(loan.write_end);
  }
}

std::size_t LentPages::size() const {
  std::size_t pages = 0;
  for (const Loan& loan : loans_) pages += loan.pages.size();
  return pages;
}

void LentPages::lend(std::vector<Page*> pages) {
  int ends[2] = {-1, -1};
  if (pipe2(ends, O_CLOEXEC) != 0) ends[0] = ends[1] = -1;
  loans_.push_back({ends[0], ends[1], std::move(pages)});
}

void LentPages::seal() {
  for (Loan& loan : loans_) {
    if (loan.write_end >= 0) close(std::exchange(loan.write_end, -1));
  }
}

Page* LentPages::take_back() noexcept {
  for (Loan& loan : loans_) {
    pollfd end{loan.read_end, 0, 0};  // a negative one is never ready
    if (poll(&end, 1, 0) != 1 || !(end.revents & POLLHUP)) continue;
    Page* page = loan.pages.back();
    loan.pages.pop_back();
    if (loan.pages.empty()) {
      close(loan.read_end);
      std::swap(loan, loans_.back());
      loans_.pop_back();
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
