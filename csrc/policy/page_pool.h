// A pool: the pages of one device, the clients that hold them, and the worker that maps and unmaps
// for the clients. The store has the pages and the budget. The pool's lock is the one lock of the
// core: it guards the page tables and generations of all clients. Long driver calls are made
// without the lock, by a thread that has marked the client busy.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "policy/client_list.h"
#include "policy/generation.h"
#include "policy/mapper.h"
#include "policy/page_sender.h"
#include "vmm/caller.h"
#include "vmm/ledger.h"
#include "vmm/page_socket.h"
#include "vmm/page_store.h"
#include "vmm/pool_lock.h"
#include "vmm/pool_options.h"
#include "vmm/reservation.h"
#include "vmm/shared_range.h"

namespace vtensor {

struct PoolCounts {
  std::size_t budget_pages = 0;
  std::size_t used = 0;            // handles in use, and private copies
  std::size_t asleep = 0;          // pages without memory; not in `used`
  std::size_t private_copies = 0;  // pages that the kernel copied at writes; without handles
  std::size_t spare = 0;           // free handles whose memory is made
  std::size_t in_page_sets = 0;    // references of page sets
  std::size_t mapped = 0;          // page table entries
  std::size_t active = 0;          // of the mapped: in the owners' extents
  std::size_t prefetched = 0;      // of the mapped: ready past the extents
  std::size_t cached = 0;          // of the mapped: left by freed tensors for the next ones
  std::size_t pinned = 0;          // of the mapped: held by generations alone, or leaving
  std::size_t evicted = 0;         // cached pages of arenas evicted so far
  std::size_t orphaned = 0;        // of the pinned: their tensor is gone
  std::size_t reserved_pages = 0;
  std::size_t buffers = 0;          // open tensors, slots and arenas
  std::size_t held_elsewhere = 0;   // bytes, by the other pools of a shared budget
  std::size_t held_by_readers = 0;  // pages in use that readers in other processes may still read
};

// Counts since the pool was made.
struct PoolEvents {
  std::uint64_t growths_ready = 0;   // growths into pages that were ready
  std::uint64_t growths_mapped = 0;  // growths that made driver calls
  std::uint64_t pages_recycled = 0;  // see PageStore
  std::uint64_t pages_fresh = 0;
  std::uint64_t tensors_reused = 0;  // tensors that began on a cached tensor's pages
  std::uint64_t tensors_fresh = 0;
};

// An object that keeps pages for later without being a client, as a KV cache keeps prefixes that no
// request uses. Its own operations give the pages up when they need memory. Other operations ask
// for pages before they fail, and the mapper asks when other pools of a shared budget need memory.
// Both ask without a lock of the core, and a shrinker waits for no operation.
class Shrinker {
 public:
  virtual ~Shrinker() = default;
  Shrinker& operator=(Shrinker&&) = delete;

  // Gives up about `pages` pages and returns how many; none while an operation is under way.
  virtual std::optional<std::size_t> shrink(std::size_t pages) noexcept = 0;
  // Pages that it could give up, by the last count if an operation is under way. 0 in a call from
  // its own operation.
  virtual std::size_t shrinkable() noexcept = 0;
};

class PagePool final : public PoolMutex, public std::enable_shared_from_this<PagePool> {
 public:
  // Throws InvalidArgument if the budget is below one page, and as joining a shared budget does.
  static std::shared_ptr<PagePool> create(std::unique_ptr<Driver> driver,
                                          const PoolOptions& options);
  ~PagePool();
  PagePool& operator=(PagePool&&) = delete;

  Driver& driver() { return *driver_; }
  const DriverTraits& traits() const { return driver_->traits(); }
  std::size_t page_size() const { return traits().page_size; }
  PageStore& store() { return store_; }
  // The ranges that other processes read.
  SharedRanges& shared() VT_LOCKED { return shared_; }
  const PoolOptions& options() const { return options_; }
  ZeroPolicy zero_policy() const { return options_.zero; }
  bool looks_ahead() const { return options_.prefetch != 0; }

  // -- for users; these functions take the lock

  PoolCounts counts();
  PoolEvents events();
  // Throws OutOfPages if more stays in use, and InvalidArgument if the budget is shared, with
  // nothing changed.
  void set_budget(std::size_t bytes);
  // Pages that shrinkers could give up, without the shrinker whose operation asks.
  std::size_t shrinkable();
  // Pages that the other pools of a shared budget hold and could give up. Asks them, and waits a
  // moment for their answers.
  std::size_t spared_elsewhere();
  // Evicts cached pages, unmaps leaving pages, and gives spare memory back to the device; returns
  // how many pages were spare.
  std::size_t trim();
  // Waits until the worker has nothing to do. Throws the driver's error if pages cannot be
  // unmapped, and TimedOut.
  void wait_idle(std::chrono::nanoseconds timeout);
  // Throws an Error that names the violated invariant.
  void check_invariants();
  // The pool's owner leaves: from now on nothing is cached or mapped ahead, and the mapper ends
  // once all pages that wait for fences are unmapped.
  void retire() noexcept;
  bool retired() const { return retired_.load(std::memory_order_relaxed); }
  // The process ends while other threads may be inside torch with the pages: pages whose owner
  // leaves from now on stay mapped.
  void keep_mapped() noexcept { keeps_mapped_ = true; }
  bool keeps_mapped() const { return keeps_mapped_.load(std::memory_order_relaxed); }
  // Called as the process ends: leaves the shared budgets of all pools, also of closed pools with
  // living views. Pages in use count there until the process has ended.
  static void leave_budgets();

  // -- for readers in other processes

  // A descriptor by which another process gets the pages of shared ranges: the file that has all
  // pages, or a socket on which a reader asks for pages (vmm/page_socket.h). Requires: a range is
  // shared. Throws DriverError.
  Descriptor open_for_readers(const char* operation);
  // Fills in the `answer` to a question on such a socket. Throws refusals of the driver, and as
  // `await_work`.
  void export_pages(const PageMessage& asked, PageMessage& answer);

  // -- clients

  std::uint64_t add(Client* client) VT_LOCKED;
  void remove(Client* client) VT_LOCKED { clients_.erase(client); }
  std::uint64_t next_id() VT_LOCKED { return next_id_++; }
  const std::unordered_set<Client*>& clients() const VT_LOCKED { return clients_; }
  // Takes the lock.
  void add(const std::shared_ptr<Shrinker>& shrinker);
  // The living shrinkers.
  std::vector<std::shared_ptr<Shrinker>> shrinkers() VT_LOCKED;

  // Clients that have pages to unmap or a range to free; the list keeps them alive.
  ClientList& to_unmap() VT_LOCKED { return to_unmap_; }
  void unmap_later(const std::shared_ptr<Client>& client) VT_LOCKED;
  // Has every client of to_unmap() unmap pages that nothing needs. Returns the first refusal.
  std::exception_ptr finish_unmapping(PoolLock& lock) noexcept VT_LOCKED;
  // `client` wants pages ahead: the mapper looks when it next wakes, or wait_idle() wakes it.
  void want(const std::shared_ptr<Client>& client) VT_LOCKED;
  // `want`, before clients that only look ahead: until `client` has its pages, the others get only
  // what is left.
  void want_first(const std::shared_ptr<Client>& client) VT_LOCKED;
  // All pages that the client wanted are mapped, or given up.
  void want_no_more(Client& client) noexcept VT_LOCKED;
  ClientList& wanting() VT_LOCKED { return wanting_; }
  // Whether a freed client's `pages` pages may be cached; evicts older clients for that.
  bool may_cache(std::size_t pages) VT_LOCKED;
  // Clients with cached pages, the oldest first: freed buffers, arenas, and freed slots.
  const ClientList& cached() const VT_LOCKED { return cached_; }
  // Adds a client with cached pages; if `by_shape`, find_cached() finds it, and this may throw.
  void cache(const std::shared_ptr<Client>& client, bool by_shape) VT_LOCKED;
  // Requires: the client still has its cached pages.
  void uncache(Client& client) VT_LOCKED;
  // The last freed client of exactly this shape that can be reused, preferably one that is not
  // busy; null if there is none.
  std::shared_ptr<Client> find_cached(const RowShape& shape) const VT_LOCKED;
  // Has the oldest cached client give up pages; false if there is none.
  bool evict_oldest() VT_LOCKED;
  // Clients, cached or owned, with pages to be zeroed.
  ClientList& unclean() VT_LOCKED { return unclean_; }
  // Has the mapper zero pages of `client`; wakes the mapper unless `client` is listed already.
  void clean_later(const std::shared_ptr<Client>& client) noexcept VT_LOCKED;
  // Counts the private copies of all clients.
  void count_private_copies() VT_LOCKED;

  // -- ends of generations

  // Ends a generation whose last storage has died, or a page set: in any thread, with or without
  // the lock. Never blocks, never throws (I11).
  void end(Ended* ended) noexcept;
  // `end` without a driver call, for callbacks of a driver.
  void end_later(Ended* ended) noexcept;
  // `end` with the lock held: takes effect before the lock is released.
  void end_locked(Ended* ended) noexcept VT_LOCKED { push(ended); }
  // Carries out all ends so far: as the lock is taken, before a wait, before the lock is released,
  // and where its holder looks for pages.
  void drain_ended() noexcept override VT_LOCKED;

  // Keeps host `memory` alive until the fence `after` has passed. Takes the lock.
  void keep_until(FencePtr after, std::shared_ptr<void> memory);

  // -- the mapper

  const std::shared_ptr<Mapper>& mapper() const { return mapper_; }
  // Starts the mapper, for `end_later`. Throws DriverError.
  void ensure_mapper();
  // Wakes the mapper once the lock is released; starts it if it does not run.
  void wake_mapper() noexcept VT_LOCKED;
  // Why the mapper's thread cannot call the driver; null if it can.
  void set_mapper_error(std::exception_ptr error) VT_LOCKED;
  // Frees host memory whose copies have ended, and spare pages beyond the limit; returns when to
  // look again.
  std::chrono::steady_clock::time_point maintain(PoolLock& lock) VT_LOCKED;

  // -- waiting

  // Waits until done(), called after each change, returns true; for the pool's patience at most,
  // then throws TimedOut: "[operation] timed out after 60 s: what".
  void await(PoolLock& lock, const char* operation, const char* what,
             const std::function<bool()>& done) VT_LOCKED;
  // Waits until the next change, or `until`.
  void wait_changed(PoolLock& lock, std::chrono::steady_clock::time_point until) VT_LOCKED {
    wait(lock, changed_, until);
  }
  // Called when the mapper has done all that it can do now.
  void mapper_rests() VT_LOCKED {
    changed();
    mapper_rests_.notify_all();
  }
  // Waits until no thread makes driver calls without the lock. The mapper begins none meanwhile.
  // Throws TimedOut.
  void quiesce(PoolLock& lock, const char* operation) VT_LOCKED;
  // Whether a thread is in `quiesce`.
  bool quiescing() const VT_LOCKED { return quiescing_ != 0; }

  PoolEvents counted VT_GUARDED;

 private:
  PagePool(std::unique_ptr<Driver> driver, const PoolOptions& options,
           std::unique_ptr<Ledger> ledger);
  void wait(PoolLock& lock, std::condition_variable& change,
            std::chrono::steady_clock::time_point until) VT_LOCKED;
  bool idle() const VT_LOCKED;
  // Waits until all work launched so far in the streams of all clients has ended. Throws Closed
  // once the pool has retired, TimedOut, DriverError.
  void await_work(const char* operation);
  bool tidy() noexcept override VT_LOCKED;
  bool left_over() noexcept override;
  void after_unlock() noexcept override { mapper_->wake(); }

  void push(Ended* ended) noexcept;
  // Frees host memory whose copies have ended; returns whether some is left.
  bool drop_copied(PoolLock& lock) VT_LOCKED;

  // Null if the budget is the pool's own. Destroyed after the driver, which gives all memory back.
  const std::unique_ptr<Ledger> ledger_;
  // Host memory that copies may still use. Destroyed after the driver, and so after its copies.
  std::list<std::pair<FencePtr, std::shared_ptr<void>>> copied_ VT_GUARDED;
  const std::unique_ptr<Driver> driver_;
  PoolOptions options_;

  PageStore store_;
  SharedRanges shared_ VT_GUARDED;
  // Threads in `quiesce` or `trim`: the mapper begins no step meanwhile.
  std::size_t quiescing_ VT_GUARDED = 0;
  std::uint64_t next_id_ VT_GUARDED = 1;
  std::unordered_set<Client*> clients_ VT_GUARDED;
  std::vector<std::weak_ptr<Shrinker>> shrinkers_ VT_GUARDED;
  ClientList to_unmap_ VT_GUARDED;
  ClientList wanting_ VT_GUARDED;                           // the next to be served first
  ClientList cached_ VT_GUARDED;                            // oldest first
  std::map<RowShape, ClientList> cached_alike_ VT_GUARDED;  // `cached_` by shape; newest first
  std::size_t pages_alike_ VT_GUARDED = 0;  // cached pages of cached_alike_, for the `cache` limit
  ClientList unclean_ VT_GUARDED;
  bool wake_mapper_ VT_GUARDED = false;    // wake the mapper once the lock is released
  std::atomic<bool> retired_{false};       // the pool's owner has left
  std::atomic<bool> keeps_mapped_{false};  // the process is about to end
  std::exception_ptr mapper_error_ VT_GUARDED;
  // wait_idle() sleeps on it: waking at each of the mapper's steps would slow the steps.
  std::condition_variable mapper_rests_;

  std::atomic<Ended*> ended_{nullptr};  // a stack of ends that have not taken effect
  const std::shared_ptr<Mapper> mapper_;
  std::unique_ptr<PageSender> sender_ VT_GUARDED;  // null until a reader needs it
};

}  // namespace vtensor
