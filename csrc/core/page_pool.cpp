#include "core/page_pool.h"

#include <algorithm>
#include <exception>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "core/buffer.h"

namespace vtensor {

std::shared_ptr<PagePool> PagePool::create(std::unique_ptr<Driver> driver, std::size_t budget,
                                           ZeroPolicy policy) {
  const DriverTraits& traits = driver->traits();
  const std::size_t pages = (budget ? budget : traits.available) / traits.page_size;
  if (pages == 0) {
    throw InvalidArgument("[Pool] budget of " + std::to_string(budget ? budget : traits.available) +
                          " bytes holds no page of " + std::to_string(traits.page_size) +
                          " bytes: raise budget= or lower page_size=");
  }
  std::shared_ptr<PagePool> pool(new PagePool(std::move(driver), pages, policy));
  if (pool->traits().parts_on_write) join_forks(pool.get());
  return pool;
}

PagePool::PagePool(std::unique_ptr<Driver> driver, std::size_t budget_pages, ZeroPolicy policy)
    : driver_(std::move(driver)),
      budget_pages_(budget_pages),
      policy_(policy),
      placement_(make_placement(*driver_, kept_)) {}

PagePool::~PagePool() {
  // Buffers and generations hold the pool, so none is left; only kept memory is.
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  if (traits().parts_on_write) leave_forks(this);
  try {
    empty_all();
  } catch (...) {
    // the driver's own end gives back what it refused here
  }
}

void PagePool::require_free(const char* operation, std::size_t pages, std::size_t parted) {
  if (parted_ != 0 && used_ + parted_ + pages > budget_pages_) count_parted();
  const std::size_t in_use = used_ + parted_ - std::min(parted, parted_);
  const std::size_t free = budget_pages_ > in_use ? budget_pages_ - in_use : 0;
  if (pages <= free) return;
  throw OutOfPages("[" + std::string(operation) + "] need " + std::to_string(pages) + " pages of " +
                   std::to_string(page_size()) + " bytes, the pool has " + std::to_string(free) +
                   " of " + std::to_string(budget_pages_) +
                   " free: free tensors or views, or make the pool with a larger budget=");
}

void PagePool::take(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out) {
  const std::size_t begin = out.size();
  std::size_t empty_pages = 0;
  try {
    placement_->pick(home, previous, n, out);
    for (std::size_t i = begin; i < out.size(); ++i) empty_pages += !out[i]->resident;
    make_room(out.size() - begin, empty_pages);
  } catch (...) {
    for (std::size_t i = begin; i < out.size(); ++i) {
      out[i]->references = 0;
      if (out[i]->resident) kept_.push(out[i]);
      placement_->put_back(out[i]);
    }
    out.resize(begin);
    throw;
  }
  if (empty_pages != 0) {
    for (std::size_t i = begin; i < out.size(); ++i) out[i]->resident = true;
  }
  used_ += n;
}

// Gives back kept memory until `taken` more pages fit the budget, of which `fresh` have no memory
// yet.
void PagePool::make_room(std::size_t taken, std::size_t fresh) {
  if (fresh == 0) return;
  while (used_ + parted_ + taken + kept_.size() > budget_pages_ && kept_.oldest())
    empty(kept_.oldest(), 1);
}

// Gives back the memory of `n` kept pages with handles from first->handle on.
void PagePool::empty(Page* first, std::size_t n) {
  driver_->destroy(first->handle, n);
  for (std::size_t i = 0; i < n; ++i) {
    Page* page = n == 1 ? first : first->run->pages[first->handle - first->run->first + i];
    kept_.remove(page);
    page->resident = false;
    page->dirty = false;
    placement_->emptied(page);
  }
}

// Gives back the memory of all kept pages, neighbours in one call; returns how many.
std::size_t PagePool::empty_all() {
  std::vector<Page*> pages;
  for (Page* page = kept_.oldest(); page; page = page->newer) pages.push_back(page);
  std::sort(pages.begin(), pages.end(),
            [](const Page* a, const Page* b) { return a->handle < b->handle; });
  for (std::size_t begin = 0, end; begin < pages.size(); begin = end) {
    end = begin + 1;
    while (end < pages.size() && pages[begin]->run && pages[end]->run == pages[begin]->run &&
           pages[end]->handle == pages[end - 1]->handle + 1) {
      ++end;
    }
    empty(pages[begin], end - begin);
  }
  return pages.size();
}

void PagePool::drop(Page* page) noexcept {
  if (--page->references != 0) return;
  --used_;
  page->dirty = true;
  kept_.push(page);
  placement_->put_back(page);
}

void PagePool::quarantine(Page* page) {
  ++page->references;
  ++quarantined_;
}

std::uint64_t PagePool::add(Buffer* buffer) {
  buffers_.insert(buffer);
  unsettled_.reserve(buffers_.size());  // so that retry_later cannot fail
  return next_buffer_id_++;
}

PoolCounts PagePool::counts() {
  PoolLock lock(shared_from_this());
  reap();
  retry();
  count_parted();
  PoolCounts counts;
  for (Buffer* buffer : buffers_) buffer->add_to(counts);
  counts.parted = parted_;
  counts.budget_pages = budget_pages_;
  counts.used = used_ + parted_;
  counts.kept = kept_.size();
  counts.quarantined = quarantined_;
  counts.lent = lent_.size();
  return counts;
}

void PagePool::prefill(std::size_t pages) {
  if (pages == 0) return;
  {
    PoolLock lock(shared_from_this());
    reap();
    require_free("Pool.prefill", pages);
  }
  const auto buffer =
      Buffer::create(shared_from_this(), {.rows = 1, .item_bytes = page_size(), .capacity = pages});
  try {
    buffer->grow("Pool.prefill", {0, pages}, true);
  } catch (...) {
    buffer->abandon();
    throw;
  }
  PoolLock lock(shared_from_this());
  const std::vector<Page*> made = buffer->contents();
  buffer->leave();
  if (buffer->settle()) {
    retry_later(buffer);
    return;
  }
  if (policy_ == ZeroPolicy::never) return;
  for (Page* page : made) page->dirty = false;  // nobody wrote to them
}

std::size_t PagePool::trim() {
  PoolLock lock(shared_from_this());
  reap();
  retry();
  return empty_all();
}

void PagePool::settle() {
  PoolLock lock(shared_from_this());
  reap();
  if (std::exception_ptr refused = retry()) std::rethrow_exception(refused);
}

void PagePool::check_invariants() {
  PoolLock lock(shared_from_this());
  reap();
  std::unordered_map<const Page*, PageUse> uses;
  for (Buffer* buffer : buffers_) buffer->check(uses);
  std::size_t extra = 0;
  for (const auto& [page, use] : uses) {
    const std::string name = "page " + std::to_string(page->handle);
    if (page->references < use.entries) {
      throw Error("I5: " + name + " has " + std::to_string(use.entries) +
                  " page table entries and counts " + std::to_string(page->references));
    }
    extra += page->references - use.entries;
    if (use.writable && use.reachable > 1) throw Error("I6: " + name + " is shared and writable");
  }
  const std::size_t given_away = quarantined_ + lent_.size();
  if (extra > given_away) throw Error("I5: a page counts more references than it has");
  if (uses.size() > used_ || used_ - uses.size() > given_away) {
    throw Error("I5: " + std::to_string(used_) + " pages are counted used, page tables hold " +
                std::to_string(uses.size()));
  }
  for (const Page* page = kept_.oldest(); page; page = page->newer) {
    if (page->references != 0 || !page->resident || uses.contains(page)) {
      throw Error("I5: kept page " + std::to_string(page->handle) + " is in use");
    }
  }
  if (used_ + kept_.size() > budget_pages_) throw Error("I5: used and kept pages pass the budget");
}

void PagePool::count_parted() {
  parted_ = 0;
  for (Buffer* buffer : buffers_) parted_ += buffer->count_parted();
}

void PagePool::end(Generation* generation) noexcept {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  const std::shared_ptr<PagePool> self = generation->buffer->pool();
  generation->next = ended_.load(std::memory_order_relaxed);
  while (!ended_.compare_exchange_weak(generation->next, generation, std::memory_order_release,
                                       std::memory_order_relaxed)) {
  }
  // Whoever holds the lock looks again after letting it go, as we do.
  while (ended_.load(std::memory_order_acquire) && mutex_.try_lock()) {
    reap();
    mutex_.unlock();
  }
}

void PagePool::retry_later(const std::shared_ptr<Buffer>& buffer) {
  if (std::find(unsettled_.begin(), unsettled_.end(), buffer) == unsettled_.end())
    unsettled_.push_back(buffer);
}

void PagePool::before_fork() {
  mutex_.lock();
  std::vector<Page*> seen;
  for (Buffer* buffer : buffers_) buffer->guard_for_child(seen);
  for (Page* page : seen) share(page);
  if (!seen.empty()) lent_.lend(std::move(seen));
}

void PagePool::after_fork() {
  lent_.seal();
  mutex_.unlock();
}

void PagePool::reap() noexcept {
  while (Page* page = lent_.take_back()) drop(page);
  Generation* generation = ended_.exchange(nullptr, std::memory_order_acquire);
  while (generation) {
    Generation* next = generation->next;
    const std::shared_ptr<Buffer> buffer = generation->buffer;
    if (generation->is_owner) {
      buffer->leave();
    } else {
      buffer->forget(generation);
    }
    delete generation;
    if (buffer->settle()) retry_later(buffer);
    generation = next;
  }
}

std::exception_ptr PagePool::retry() noexcept {
  std::exception_ptr first;
  std::erase_if(unsettled_, [&first](const std::shared_ptr<Buffer>& buffer) {
    std::exception_ptr error = buffer->settle();
    if (error && !first) first = error;
    return !error;
  });
  return first;
}

PoolLock::~PoolLock() {
  if (!lock_) return;
  // A deleter that found the lock taken left its generation to us.
  do {
    if (pool_->ended_.load(std::memory_order_acquire)) pool_->reap();
    lock_.unlock();
  } while (pool_->ended_.load(std::memory_order_acquire) && lock_.try_lock());
}

}  // namespace vtensor
