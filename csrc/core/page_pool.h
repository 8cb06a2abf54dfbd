// The owner of all page handles of one device and one page size: budget, reuse, reference counts,
// zeroing policy. Its lock is the one lock of the core: page tables and generations of its buffers
// stand under it too. Driver calls that take long are made without it, by whoever has marked the
// buffer busy.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <vector>

#include "core/caller.h"
#include "core/fork_guard.h"
#include "core/generation.h"
#include "core/look_ahead.h"
#include "core/mapper.h"
#include "core/page.h"
#include "core/placement.h"
#include "core/roster.h"
#include "core/row_shape.h"
#include "driver/driver.h"

namespace vtensor {

enum class ZeroPolicy : std::uint8_t {
  never,
  new_owner,  // a page shows zeros to a buffer that was not the last to have it
  always,     // whenever it is taken
};

inline constexpr std::size_t kParkByBudget = std::numeric_limits<std::size_t>::max();

// Sizes in bytes.
struct PoolOptions {
  std::size_t budget = 0;  // 0: what the driver says is available and no other pool was promised
  ZeroPolicy zero = ZeroPolicy::new_owner;
  // What a tensor may have mapped ahead of need. 0: nothing is done in the background but what
  // somebody prepares, and what has to wait for a fence.
  std::size_t ahead = 0;
  // What freed tensors may leave mapped for the next of the same shape. kParkByBudget: a quarter of
  // the budget.
  std::size_t park = 0;
  std::size_t low = 0;  // free memory that the mapper keeps made
  std::size_t high = std::numeric_limits<std::size_t>::max();  // free memory kept at most
  std::chrono::nanoseconds max_age{0};                         // of free memory; 0: any
  std::size_t reserve = 0;  // of the device's memory, left to others
  std::chrono::nanoseconds patience = std::chrono::seconds(60);  // the bound of every wait (I12)
};

struct PoolCounts {
  std::size_t budget_pages = 0;
  std::size_t used = 0;    // handles in use, and pages that the kernel parted from shared handles
  std::size_t parted = 0;  // of these, the parted
  std::size_t kept = 0;    // free handles whose memory is kept
  std::size_t quarantined = 0;  // of the used, those given up
  std::size_t lent = 0;         // references that forked children keep
  std::size_t shelved = 0;      // references to pages that are kept without a mapping
  std::size_t mapped = 0;       // page table entries
  std::size_t needed = 0;       // of these, what lengths need
  std::size_t ahead = 0;        // what is ready beyond that
  std::size_t parked = 0;       // what freed tensors left for the next one
  std::size_t held = 0;         // what only old generations hold, or waits to be unmapped
  std::size_t orphaned = 0;     // of the held, what belongs to no tensor any more
  std::size_t reserved_pages = 0;
  std::size_t buffers = 0;  // whose tensor is open
};

// Since the pool was made.
struct PoolEvents {
  std::uint64_t growths_ready = 0;    // growths into new pages that found them ready
  std::uint64_t growths_mapped = 0;   // and that had to make driver calls
  std::uint64_t pages_recycled = 0;   // pages taken whose memory was there
  std::uint64_t pages_fresh = 0;      // and was not
  std::uint64_t tensors_adopted = 0;  // tensors that began on a parked tensor's pages
  std::uint64_t tensors_fresh = 0;
};

class PoolLock;

class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  // Throws InvalidArgument where the budget is below one page.
  static std::shared_ptr<PagePool> create(std::unique_ptr<Driver> driver,
                                          const PoolOptions& options);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  Driver& driver() { return *driver_; }
  const DriverTraits& traits() const { return driver_->traits(); }
  std::size_t page_size() const { return traits().page_size; }
  std::size_t budget_pages() const { return budget_pages_.load(std::memory_order_relaxed); }
  const PoolOptions& options() const { return options_; }
  ZeroPolicy zero_policy() const { return options_.zero; }
  bool looks_ahead() const { return options_.ahead != 0; }

  PoolCounts counts();
  PoolEvents events();
  // Throws OutOfPages where more is in use and cannot be given back; nothing is changed then.
  void set_budget(std::size_t bytes);
  // Makes the memory of `pages` free pages present, for rows to come. Throws OutOfPages.
  void prefill(std::size_t pages);
  // Gives parked and free memory back; returns how many pages. What waits to be unmapped goes
  // first.
  std::size_t trim();
  // Returns once nothing is left to do in the background. Throws the driver's error where
  // something cannot be unmapped, and TimedOut.
  void wait_idle(std::chrono::nanoseconds timeout);
  // Gives back, now and in this thread, what is parked or waits to be unmapped: it holds addresses
  // and kernel mappings too. False where there was nothing.
  bool relieve() noexcept;
  // The same, and what is ahead: for want of memory.
  void give_all_back() noexcept;
  // Throws an Error that names the violated invariant.
  void check_invariants();
  // The pool's owner leaves: nothing is parked or mapped ahead from here on, and the mapper ends
  // once what waits for fences is gone.
  void retire() noexcept;
  bool retired() const { return retired_.load(std::memory_order_relaxed); }

  // Of the mapper, for those who may outlive the pool.
  Mapper::Waker waker() const { return mapper_.waker(); }

  // Told by whoever drops the last reference to a generation. Never blocks, never throws (I11).
  void end(Generation* generation) noexcept;
  // The same, and makes no driver call whatever the options: for the callbacks of a driver.
  void end_later(Generation* generation) noexcept;
  // The same where the lock is held: reaped before it is let go.
  void end_locked(Generation* generation) noexcept { push(generation); }
  // So that `end_later` finds the mapper running. Throws std::system_error.
  void ensure_mapper();

  // Around fork(2), on a driver that parts pages at a write. The lock is held in between.
  void before_fork();
  void after_fork();

  // Everything below requires the lock (see PoolLock).

  // Returns with `pages` pages free, not counting `parted` pages that the kernel parted and that
  // these are to replace, and with their memory made where the driver takes long for that. Takes
  // back what is parked or ahead elsewhere; lets the lock go meanwhile, and to wait for fences.
  // True where it did: others may have taken pages, or given some back. Throws OutOfPages,
  // DeviceOutOfMemory.
  bool require_ready(PoolLock& lock, const char* operation, std::size_t pages,
                     std::size_t parted = 0);
  // Has the memory of `pages` free pages made, where the driver takes long for that. True where it
  // let the lock go.
  bool make_ready(PoolLock& lock, std::size_t pages);
  // Keeps `pages` of those that require_ready found for the same operation, which is about to let
  // the lock go; given back by promise(-pages).
  void promise(std::ptrdiff_t pages) { promised_ += static_cast<std::size_t>(pages); }
  RowHome open_home(std::size_t pages) { return placement_->open_home(pages); }
  void close_home(RowHome& home) { placement_->close_home(home); }
  // Adds to `out` free pages for `n` slots after `previous`, each with one reference. Requires:
  // require_free(n). Throws where the driver refuses; nothing is taken then.
  void take(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out);
  void share(Page* page) { ++page->references; }
  // `aged`: it has been free for as long as the pool keeps memory.
  void drop(Page* page, bool aged = false) noexcept;
  // Pages are put on a shelf, or taken off: their references have no page table entry.
  void shelve(std::ptrdiff_t pages) { shelved_ += static_cast<std::size_t>(pages); }
  // The page is counted and reported, and never used again.
  void quarantine(Page* page);
  bool must_zero(const Page& page, std::uint64_t owner) const {
    if (!page.dirty || options_.zero == ZeroPolicy::never) return false;
    return options_.zero == ZeroPolicy::always || owner == kNobody || page.last_owner != owner;
  }
  // Pages that the budget leaves, without taking anything back.
  std::size_t unused_pages() const;
  // The same, as far as the device's memory leaves the reserve alone. Throws what the driver does.
  std::size_t spare_pages() const;

  std::uint64_t add(Buffer* buffer);
  void remove(Buffer* buffer) { buffers_.erase(buffer); }
  std::uint64_t next_id() { return next_buffer_id_++; }
  // `buffer` has pages or its range to give back: it is kept until it has.
  void settle_later(const std::shared_ptr<Buffer>& buffer);
  // `buffer` wants pages ahead: the mapper looks at it when it is next awake.
  void want(const std::shared_ptr<Buffer>& buffer);
  void unwant(const std::shared_ptr<Buffer>& buffer) noexcept;
  // The same, because the mapper has made them ready.
  void served(const std::shared_ptr<Buffer>& buffer) noexcept;
  // Behind all others that want pages.
  void want_last(const std::shared_ptr<Buffer>& buffer) noexcept;
  // How long the mapper takes is looked at, from now until nothing is wanted; not where a caller
  // has named an amount besides, which may be any.
  void time_mapper() noexcept;
  void time_nothing() noexcept { untimed_ = true; }
  Horizon horizon() const { return horizon_; }
  // The mapper is to hear of what is wanted once it is awake, or somebody waits for it.
  void tell_mapper_later() noexcept { untold_ = true; }
  // The mapper is woken once the lock is free, and started where it does not run.
  void call_mapper() noexcept;
  // Gives back what ended generations held, or has the mapper do it.
  void reap() noexcept;

  // Whether a freed buffer with `pages` pages may stay mapped, after older ones have made room.
  bool may_park(std::size_t pages);
  void park(const std::shared_ptr<Buffer>& buffer, std::size_t pages);
  // A parked buffer of exactly this shape, the last one freed; null where there is none.
  std::shared_ptr<Buffer> find_parked(const RowShape& shape);
  void unpark(Buffer& buffer, std::size_t pages);

  // Lets the lock go until `done`, told by `changed`, or for as long as the patience lasts; then
  // throws TimedOut: "[operation] timed out after 60 s: what".
  void await(PoolLock& lock, const char* operation, const char* what,
             const std::function<bool()>& done);
  void changed() { changed_.notify_all(); }
  // Lets the lock go until somebody says `changed`, or `until`.
  void wait_changed(PoolLock& lock, std::chrono::steady_clock::time_point until);
  // Lets the lock go until nobody makes driver calls without it; the mapper begins no more
  // meanwhile. Throws TimedOut.
  void await_quiet(PoolLock& lock, const char* operation);
  // Settles what waits for it. Returns the first refusal.
  std::exception_ptr settle_all(PoolLock& lock) noexcept;
  // Keeps free memory between the pool's marks; returns when to look again.
  std::chrono::steady_clock::time_point tend_kept(PoolLock& lock);
  PoolEvents counted;  // what happened so far

 private:
  friend class PoolLock;
  friend class Unlocked;
  friend class Mapper;
  PagePool(std::unique_ptr<Driver> driver, std::size_t budget_pages, const PoolOptions& options);
  // Makes a pool that those made later count with. Throws as `create`.
  static std::shared_ptr<PagePool> enlist(std::unique_ptr<Driver> driver,
                                          const PoolOptions& options);
  // Bytes that it may take and has not.
  std::size_t promised_bytes();
  std::size_t in_pages(std::size_t bytes) const { return bytes / page_size(); }
  std::size_t free_pages(std::size_t pages, std::size_t parted);
  // Gives up what is parked, or ahead of some tensor; false where there is neither.
  bool give_up_spare(PoolLock& lock);
  class WantsQuiet;
  // One step of taking back for a request of that time; false where nothing is left that would make
  // up for `missing` pages.
  bool take_back(PoolLock& lock, std::chrono::steady_clock::time_point since, std::size_t missing);
  void start_mapper();
  void count_parted();
  void stock(PoolLock& lock, std::size_t pages);
  void keep(Page* page, bool aged = false) noexcept;
  void make_room(std::size_t taken, std::size_t fresh);
  // Gives back the memory of the `n` oldest kept pages; where each has a handle of its own, without
  // the lock.
  void release(PoolLock& lock, std::size_t n);
  void empty(Page* first, std::size_t n);
  std::size_t empty_all();
  bool unpark_oldest();
  bool unpark_all() noexcept;
  // True where it let the lock go.
  bool require_free(PoolLock& lock, const char* operation, std::size_t pages, std::size_t parted);
  bool idle() const;
  void push(Generation* generation) noexcept;
  bool any_ended() noexcept;

  const std::unique_ptr<Driver> driver_;
  std::atomic<std::size_t> budget_pages_;
  PoolOptions options_;
  std::size_t low_, high_;  // marks of kept pages

  std::mutex mutex_;
  std::condition_variable changed_;
  KeptPages kept_;
  const std::unique_ptr<Placement> placement_;
  std::size_t used_ = 0;
  std::size_t promised_ = 0;   // to operations that have let the lock go before they take them
  std::size_t just_made_ = 0;  // of the kept pages, those made for a growth under way
  std::size_t parted_ = 0;     // as last counted
  std::size_t quarantined_ = 0;
  std::size_t shelved_ = 0;
  std::size_t parked_ = 0;        // pages of parked buffers
  std::size_t in_flight_ = 0;     // operations that make driver calls without the lock
  std::size_t quiet_wanted_ = 0;  // waits for the end of those
  std::uint64_t next_buffer_id_ = 1;
  std::unordered_set<Buffer*> buffers_;
  Roster unsettled_;  // have something to give back
  Roster wanting_;    // want pages ahead, who comes next first
  std::optional<std::chrono::steady_clock::time_point> timed_from_;
  bool untimed_ = false;
  Horizon horizon_;
  Roster idle_;                               // parked, oldest first
  std::map<RowShape, Roster> idle_by_shape_;  // the same, newest first
  Roster unclean_;                            // of these, those that may be to be zeroed
  bool wake_mapper_ = false;                  // once the lock is free
  bool untold_ = false;                       // of some that wants pages
  std::atomic<bool> retired_{false};          // its owner has left
  std::exception_ptr mapper_error_;           // why its thread cannot work
  LentPages lent_;

  std::atomic<Generation*> ended_{nullptr};
  Mapper mapper_;
};

// Holds a pool's lock, and the pool. Generations that end meanwhile are reaped before it lets go.
class PoolLock {
 public:
  explicit PoolLock(const std::shared_ptr<PagePool>& pool) : pool_(pool), lock_(pool->mutex_) {}
  PoolLock(const std::shared_ptr<PagePool>& pool, std::try_to_lock_t how)
      : pool_(pool), lock_(pool->mutex_, how) {}
  ~PoolLock() { let_go(); }
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

  void let_go() noexcept;
  void take_again() { lock_.lock(); }

 private:
  friend class PagePool;
  friend class Unlocked;
  std::shared_ptr<PagePool> pool_;
  std::unique_lock<std::mutex> lock_;
};

// For its length the lock is let go, for driver calls, which may take as long as the device is
// busy. Who needs quiet waits for its end, as fork(2) does. What the calls change is claimed
// before.
class Unlocked {
 public:
  explicit Unlocked(PoolLock& lock) : lock_(lock) {
    ++lock_.pool_->in_flight_;
    lock_.let_go();
  }
  ~Unlocked() {
    lock_.take_again();
    --lock_.pool_->in_flight_;
    lock_.pool_->changed();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PoolLock& lock_;
};

}  // namespace vtensor
