// The pages of one device and one page size: budget, reference counts, and the memory of free
// pages, which is kept for their next owners.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/align.h"
#include "driver/driver.h"
#include "vmm/ledger.h"
#include "vmm/page.h"
#include "vmm/placement.h"
#include "vmm/pool_lock.h"
#include "vmm/pool_options.h"

namespace vtensor {

struct PageUse;

class PageStore {
 public:
  // `when_due` asks for a call of release_excess() soon; `ledger` is null if the budget is the
  // pool's own.
  PageStore(Driver& driver, const PoolOptions& options, Ledger* ledger,
            std::function<void()> when_due);
  ~PageStore();
  PageStore& operator=(PageStore&&) = delete;

  // The bound of each wait in the pool (I12).
  std::chrono::nanoseconds patience() const { return options_.patience; }

  // -- the budget, in pages

  std::size_t in_pages(std::size_t bytes) const { return bytes / driver_.traits().page_size; }
  std::size_t budget() const { return budget_.load(std::memory_order_relaxed); }
  void set_budget(std::size_t pages) { budget_ = pages; }
  // Handles in use.
  std::size_t used() const VT_LOCKED { return used_; }
  // Pages whose memory the driver is making or taking back, without the lock. No other count
  // includes them, and they count against the budget.
  std::size_t under_way() const VT_LOCKED { return under_way_; }
  // In use, copied at writes as last counted, or promised.
  std::size_t in_use() const VT_LOCKED { return used_ + private_copies_ + promised_; }
  // Pages that the pool's own budget leaves. `private_copies`: private copies that are about to be
  // replaced, and so are not counted.
  std::size_t left(std::size_t private_copies = 0) const VT_LOCKED;
  // The smaller of `left` and what the other pools of a shared budget leave.
  std::size_t unused(std::size_t private_copies = 0) const VT_LOCKED;
  // Pages for look-ahead: `unused`, less the device's reserve and what other pools ask for. Throws
  // as the driver.
  std::size_t available() const VT_LOCKED;
  // Charges as many of `pages` as are available; returns how many.
  std::size_t charge_available(std::size_t pages) VT_LOCKED;
  // Releasable pages, and pages that the device could make beside the reserve. Throws as the
  // driver.
  std::size_t beside_reserve() const VT_LOCKED;
  // Private copies that the kernel made at writes, as last counted.
  std::size_t private_copies() const VT_LOCKED { return private_copies_; }
  void set_private_copies(std::size_t pages) VT_LOCKED;
  // Keeps `pages` for an operation that is about to release the lock; undone by promise(-pages).
  void promise(std::ptrdiff_t pages) VT_LOCKED;

  // -- a shared budget; without one nothing is charged

  Ledger* ledger() const VT_LOCKED { return ledger_; }
  // Charges `pages` more pages in use, beside the promised ones, or beside `spare` free pages with
  // memory if these are more. If the budget has less left, charges nothing and returns false.
  // Throws what Ledger::charge does.
  bool charge(std::size_t pages, std::size_t spare = 0) VT_LOCKED;
  // Bytes that `charge(pages)` would charge.
  std::size_t bytes_to_charge(std::size_t pages) const VT_LOCKED;
  void give_back_charge() noexcept VT_LOCKED;

  // -- handles in use

  void close(RowHome& home) noexcept VT_LOCKED { placement_.close(home); }
  // Adds `n` free pages to `out`, to be mapped after `previous`, each with one reference.
  // `stitched`: takes spare pages of any row before memory would have to be given back to make
  // other: an extra kernel mapping takes less time than making memory. Requires: the budget has the
  // pages, and they are charged. Throws as the driver, with nothing taken.
  void take(RowHome& home, const Page* previous, std::size_t n, bool stitched,
            std::vector<Page*>& out) VT_LOCKED;
  void share(Page* page) VT_LOCKED { ++page->references; }
  void drop(Page* page) noexcept VT_LOCKED;
  // Page sets have `pages` more references, or fewer (negative).
  void count_in_page_sets(std::ptrdiff_t pages) VT_LOCKED {
    in_page_sets_ += static_cast<std::size_t>(pages);
  }
  std::size_t in_page_sets() const VT_LOCKED { return in_page_sets_; }

  // -- pages without memory, which keep their references and their entries in page tables

  // Gives back the memory of `pages`; returns how many pages lost it. A page that the driver
  // refuses to take keeps its memory. Releases the lock. Requires: the pages are not mapped, and
  // keep their references.
  std::size_t sleep(PoolLock& lock, std::span<Page* const> pages) noexcept VT_LOCKED;
  // Makes memory for those of `pages` that have none; it may hold any bytes. Throws as `take`, with
  // nothing changed. Requires: as `take`, for the pages without memory.
  void wake(std::span<Page* const> pages) VT_LOCKED;
  // `pages`, which slept, are mapped again.
  void woken(std::span<Page* const> pages) VT_LOCKED;
  // Pages that sleep; of them, those without memory.
  std::size_t asleep() const VT_LOCKED { return asleep_; }
  std::size_t without_memory() const VT_LOCKED { return without_memory_; }

  bool must_zero(const Page& page, std::uint64_t owner) const {
    if (!page.dirty || options_.zero == ZeroPolicy::never) return false;
    return options_.zero == ZeroPolicy::always || owner == kNoOwner || page.last_owner != owner;
  }

  // -- a broken pool

  // Breaks the pool: undoing a change was refused, for `cause`, so the mappings are not known. From
  // now on no page is taken, and no memory given back.
  void break_down(const std::exception_ptr& cause) noexcept VT_LOCKED;
  // The DriverError to raise; null if the pool is not broken. Any thread may call it.
  std::exception_ptr broken() const {
    return is_broken_.load(std::memory_order_acquire) ? broken_ : nullptr;
  }
  void raise_if_broken() const {
    if (is_broken_.load(std::memory_order_acquire)) std::rethrow_exception(broken_);
  }

  // -- the memory of free pages

  std::size_t spare() const VT_LOCKED { return placement_.spare().size(); }
  // Spare pages that are not promised: their memory may be given back.
  std::size_t releasable() const VT_LOCKED { return sub_sat(spare(), promised_); }
  // Makes memory for `pages` free pages, without the lock, if making memory takes the driver long.
  // True if it released the lock.
  bool make_ready(PoolLock& lock, std::size_t pages) VT_LOCKED;
  // Gives back the memory of the `n` oldest releasable pages, or of all, adjacent handles in one
  // call. Releases the lock meanwhile on a device, where this may take long.
  void release(PoolLock& lock, std::size_t n) VT_LOCKED {
    empty_oldest(driver_.traits().adjacent_handles ? nullptr : &lock, std::min(n, releasable()));
  }
  // Gives back one spare page beyond the pool's limit. Returns when to call again.
  std::chrono::steady_clock::time_point release_excess(PoolLock& lock) VT_LOCKED;
  // Whether release_excess() is due. It is not right after a refusal of the driver.
  bool excess_due() const VT_LOCKED { return excess_due_; }

  // Throws an Error that names a violated invariant. `uses`: what page tables say of pages.
  void check(const std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED;

  // Since the store was made.
  std::uint64_t pages_recycled VT_GUARDED = 0;  // taken pages that had memory
  std::uint64_t pages_fresh VT_GUARDED = 0;     // taken pages whose memory was made for them

 private:
  std::size_t charged() const VT_LOCKED;
  // Pages that may be taken without another charge.
  std::size_t charged_unused() const VT_LOCKED;
  // Pages to be charged in all, with `taken` more pages in use and `spare` free pages kept.
  std::size_t to_charge(std::size_t taken, std::size_t spare) const VT_LOCKED;
  // Throws OutOfPages if `charge` returns false.
  void require_charge(std::size_t taken, std::size_t spare) VT_LOCKED;
  bool has_excess() const VT_LOCKED { return releasable() > most_spare_; }
  void look_for_excess() VT_LOCKED {
    if (!has_excess()) return;
    excess_due_ = true;
    when_due_();
  }
  void make_room(std::size_t taken, std::size_t fresh) VT_LOCKED;
  // Gives back the memory of the `n` oldest spare pages. Releases the lock meanwhile, unless `lock`
  // is null.
  void empty_oldest(PoolLock* lock, std::size_t n) VT_LOCKED;

  Driver& driver_;
  const PoolOptions options_;
  Ledger* const ledger_;
  const std::function<void()> when_due_;
  std::atomic<std::size_t> budget_;
  const std::size_t most_spare_;
  bool excess_due_ VT_GUARDED = false;
  Placement placement_ VT_GUARDED;
  std::exception_ptr broken_;  // set once, before is_broken_
  std::atomic<bool> is_broken_{false};
  std::size_t used_ VT_GUARDED = 0;
  // Pages promised to operations that release the lock before they take them.
  std::size_t promised_ VT_GUARDED = 0;
  std::size_t under_way_ VT_GUARDED = 0;
  std::size_t private_copies_ VT_GUARDED = 0;  // as last counted
  std::size_t in_page_sets_ VT_GUARDED = 0;
  std::size_t asleep_ VT_GUARDED = 0, without_memory_ VT_GUARDED = 0;
};

}  // namespace vtensor
