// The owner of all page handles of one device and one page size: budget, reuse, reference counts,
// zeroing policy. Its lock is the one lock of the core: page tables and generations of its buffers
// stand under it too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "core/fork_guard.h"
#include "core/generation.h"
#include "core/page.h"
#include "core/placement.h"
#include "driver/driver.h"

namespace vtensor {

enum class ZeroPolicy : std::uint8_t {
  never,
  new_owner,  // a page shows zeros to a buffer that was not the last to have it
  always,     // whenever it is taken
};

struct PoolCounts {
  std::size_t budget_pages = 0;
  std::size_t used = 0;    // handles in use, and pages that the kernel parted from shared handles
  std::size_t parted = 0;  // of these, the parted
  std::size_t kept = 0;    // free handles whose memory is kept
  std::size_t quarantined = 0;  // of the used, those given up
  std::size_t lent = 0;         // references that forked children keep
  std::size_t mapped = 0;       // page table entries
  std::size_t needed = 0;       // of these, what lengths need
  std::size_t held = 0;         // what only old generations hold, or waits to be unmapped
  std::size_t orphaned = 0;     // of the held, what belongs to no tensor any more
  std::size_t reserved_pages = 0;
  std::size_t buffers = 0;  // whose tensor is open
};

class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  // `budget` in bytes; 0 takes what the driver says is available. Throws InvalidArgument below one
  // page.
  static std::shared_ptr<PagePool> create(std::unique_ptr<Driver> driver, std::size_t budget,
                                          ZeroPolicy policy);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  Driver& driver() { return *driver_; }
  const DriverTraits& traits() const { return driver_->traits(); }
  std::size_t page_size() const { return traits().page_size; }
  std::size_t budget_pages() const { return budget_pages_; }
  ZeroPolicy zero_policy() const { return policy_; }

  PoolCounts counts();
  // Makes the memory of `pages` free pages present, for rows to come. Throws OutOfPages.
  void prefill(std::size_t pages);
  // Gives the memory of free pages back; returns how many. What waits to be unmapped goes first.
  std::size_t trim();
  // Unmaps what waits for it. Throws the driver's error where that is refused again.
  void settle();
  // Throws an Error that names the violated invariant.
  void check_invariants();

  // Told by whoever drops the last reference to a generation. Never blocks, never throws (I11).
  void end(Generation* generation) noexcept;

  // Around fork(2), on a driver that parts pages at a write. The lock is held in between.
  void before_fork();
  void after_fork();

  // Everything below requires the lock (see PoolLock).

  // Throws OutOfPages where fewer than `pages` pages are free, not counting `parted` pages that the
  // kernel parted and that these are to replace.
  void require_free(const char* operation, std::size_t pages, std::size_t parted = 0);
  RowHome open_home(std::size_t pages) { return placement_->open_home(pages); }
  void close_home(RowHome& home) { placement_->close_home(home); }
  // Adds to `out` free pages for `n` slots after `previous`, each with one reference. Requires:
  // require_free(n). Throws where the driver refuses; nothing is taken then.
  void take(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out);
  void share(Page* page) { ++page->references; }
  void drop(Page* page) noexcept;
  // The page is counted and reported, and never used again.
  void quarantine(Page* page);
  bool must_zero(const Page& page, std::uint64_t owner) const {
    if (!page.dirty || policy_ == ZeroPolicy::never) return false;
    return policy_ == ZeroPolicy::always || owner == kNobody || page.last_owner != owner;
  }

  std::uint64_t add(Buffer* buffer);
  void remove(Buffer* buffer) { buffers_.erase(buffer); }
  // `buffer` still has pages or its range to give back: it is kept and tried again later.
  void retry_later(const std::shared_ptr<Buffer>& buffer);
  // Gives back what ended generations held. What the driver refuses is left to `retry`.
  void reap() noexcept;

 private:
  friend class PoolLock;
  PagePool(std::unique_ptr<Driver> driver, std::size_t budget_pages, ZeroPolicy policy);
  // Retries what was refused. Returns the first refusal.
  std::exception_ptr retry() noexcept;
  void count_parted();
  void make_room(std::size_t taken, std::size_t fresh);
  void empty(Page* first, std::size_t n);
  std::size_t empty_all();

  const std::unique_ptr<Driver> driver_;
  const std::size_t budget_pages_;
  const ZeroPolicy policy_;

  std::mutex mutex_;
  KeptPages kept_;
  const std::unique_ptr<Placement> placement_;
  std::size_t used_ = 0;
  std::size_t parted_ = 0;  // as last counted
  std::size_t quarantined_ = 0;
  std::uint64_t next_buffer_id_ = 1;
  std::unordered_set<Buffer*> buffers_;
  std::vector<std::shared_ptr<Buffer>> unsettled_;
  LentPages lent_;

  std::atomic<Generation*> ended_{nullptr};
};

// Holds a pool's lock, and the pool. Generations that end meanwhile are reaped before it lets go.
class PoolLock {
 public:
  explicit PoolLock(const std::shared_ptr<PagePool>& pool) : pool_(pool), lock_(pool->mutex_) {}
  PoolLock(const std::shared_ptr<PagePool>& pool, std::try_to_lock_t how)
      : pool_(pool), lock_(pool->mutex_, how) {}
  ~PoolLock();
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

 private:
  std::shared_ptr<PagePool> pool_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace vtensor
