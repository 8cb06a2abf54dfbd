// A holder of pages: an address range whose pages are mapped ahead of need and unmapped after the
// work that may use them. Its page table says of each index why its pages are mapped (`Why`);
// Buffer and Arena derive from it and decide what is needed, ahead or cached. The pool has lists of
// its clients; its worker maps and unmaps for them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fault_report.h"
#include "base/interval.h"
#include "policy/client_list.h"
#include "policy/coverage.h"
#include "policy/generation.h"
#include "policy/page_pool.h"
#include "vmm/caller.h"
#include "vmm/pending_work.h"
#include "vmm/pool_lock.h"
#include "vmm/reservation.h"

namespace vtensor {

// What a client says of one of its pages, for people.
struct PageRecord {
  std::size_t row;
  std::size_t index;  // of the page in its row
  Address address;
  std::int64_t page_id;  // -1 if the kernel copied it and it has no handle of its own yet
  std::uint32_t shared;  // references to the page
  const char* state;     // "mapped", "shared", "prefetched", "cached", "private", "pinned",
                         // "asleep"
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  virtual ~Client() = default;
  Client& operator=(Client&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const RowShape& shape() const { return shape_; }
  Reservation& range() { return range_; }
  const Reservation& range() const { return range_; }

  // Nodes of the pool's lists that the client can be in.
  struct Hooks {
    ClientList::Hook to_unmap, wanting, cached, cached_alike, unclean;
    bool first = false;  // wants pages before clients that only look ahead
  };
  Hooks hooks VT_GUARDED;

  // -- for its owner

  // Throws if its pool is broken, Asleep if the client sleeps, and, once, what the driver refused
  // the mapper for it (I10).
  void raise_error(const char* operation);
  void raise_if_asleep(const char* operation) const;
  // Work in the caller's stream uses the pages: they are unmapped only after that work.
  void use(const Caller& caller);
  // The owner leaves: pages are cached, or unmapped as the generations over them end. Never blocks,
  // never throws (I11). Takes effect before the lock is next released. Requires: called once.
  void abandon() noexcept;
  std::vector<PageRecord> pages();
  // Shows the pages to readers in other processes from now on, with `words` words (see
  // vmm/shared_range.h); another time it does nothing. Throws InvalidArgument if the pool is not
  // shareable, DriverError.
  void share(const char* operation, std::size_t words);

  // -- for operations that change what is mapped

  // Marks the client busy for a scope: no other thread changes its mappings while the lock is
  // released. Throws what await_turn throws, DriverError on a broken pool, and Error inside a Busy
  // of this thread.
  class Busy {
   public:
    Busy(Client& client, PoolLock& lock, const Caller& caller) VT_LOCKED;
    ~Busy() VT_LOCKED;
    Busy& operator=(Busy&&) = delete;

   private:
    Client& client_;
  };
  // Waits until no thread makes driver calls for it, and what operations that failed had mapped is
  // unmapped; the mapper begins nothing meanwhile. False if there was nothing to wait for. Throws
  // what the driver refuses, and TimedOut.
  bool await_turn(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Throws if the caller's stream is being captured, because driver work would become part of the
  // graph or break it, or if the stream is not of the driver's context.
  void require_no_capture(const Caller& caller) const;
  // Whether all fences of ready_after_ have passed. Throws what the driver refuses.
  bool is_quiet() VT_LOCKED;
  // Work launched in `stream` from now on waits for the fences of ready_after_.
  void order(Stream stream) const VT_LOCKED {
    for (const FencePtr& fence : ready_after_) driver_.order(stream, *fence);
  }

  // -- ends

  // A generation of the client has ended (forget); the owner has left (leave).
  virtual void forget(const Generation* generation) noexcept VT_LOCKED;
  virtual void leave() noexcept VT_LOCKED = 0;

  // -- unmapping

  // Unmaps pages that nothing needs: now, or once their fences have passed.
  virtual void give_back_unused() noexcept VT_LOCKED;
  // Unmaps pages that nothing needs and whose fences have passed, and frees the range if the owner
  // has left. False if pages are left; `refusal` is then the driver's refusal, if there was one.
  // Releases the lock meanwhile, unless `lock` is null: a deleter cannot.
  bool finish_unmapping(PoolLock* lock) noexcept VT_LOCKED;
  // Unmaps about `pages` of the pages that nothing needs; begins no driver call after `until`.
  enum class Unmapped : std::uint8_t { some, waits, refused, done };
  Unmapped unmap_some(PoolLock* lock, std::size_t pages,
                      std::chrono::steady_clock::time_point until) noexcept VT_LOCKED;
  // Why its pages stay: a refused fence or unmapping, until it is tried again.
  const std::exception_ptr& refusal() const VT_LOCKED { return refusal_; }
  // Pages that wait to be unmapped; 0 if their unmapping was refused.
  std::size_t pages_leaving() const VT_LOCKED {
    return refusal_ ? 0 : range_.mapped(Why::unneeded) + range_.mapped(Why::fenced);
  }
  // Unmaps pages ahead of need; returns how many.
  virtual std::size_t drop_ahead() VT_LOCKED;

  // -- reuse

  // Whether it lies in the range of another client.
  bool placed() const { return host_ != nullptr; }
  // Whether it has cached pages and no others: pages that are leaving would be taken back by the
  // next owner (I7).
  bool reusable() const VT_LOCKED {
    return range_.mapped() != 0 && range_.mapped() == range_.mapped(Why::cached);
  }
  // Unmaps cached pages.
  virtual void evict() VT_LOCKED = 0;

  // -- the worker's tasks, a part at a time: claimed, carried out without the lock, entered. The
  // client is busy in between.

  // Whether another thread changes its mappings, or waits to: the worker leaves it alone.
  bool busy() const VT_LOCKED { return busy_ || waiting_ != 0; }

  // Claims up to `pages` of the pages that it wants ahead. False if it wants or can have none.
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED;
  void enter_ahead(Reservation::Arrival& arrival) VT_LOCKED;
  // Pages wanted ahead that are not mapped.
  std::size_t missing_ahead() const VT_LOCKED { return range_.missing(Why::prefetched); }

  // `unmap_some`, but not soon after a refusal.
  Unmapped give_back_some(PoolLock& lock, std::size_t pages,
                          std::chrono::steady_clock::time_point until) noexcept VT_LOCKED;

  // Zeroing of pages that the last owner left, once that owner's work has passed: whether there are
  // such pages, in a client that is awake; whether up to `pages` of them were zeroed.
  bool to_clean() const VT_LOCKED { return asleep.load() == 0 && !unclean(1).empty(); }
  bool clean_some(PoolLock& lock, std::size_t pages) VT_LOCKED;

  // -- sleep (see sleep.h)

  // The number of the sleep that the client is in; 0 if it is awake. Operations are refused while
  // it sleeps.
  std::atomic<std::uint64_t> asleep{0};
  // Fences after all work launched so far that may use its pages; whether a lease announces more
  // work.
  std::vector<FencePtr> fences() const VT_LOCKED;
  void add_work_to(PendingWork& all) const VT_LOCKED { all.add(work_, ready_after_); }
  bool leased() const VT_LOCKED;
  // The client woke without its contents: each page counts as a new arrival that shows zeros.
  virtual void lose_contents() noexcept VT_LOCKED {}
  // Has reports of faults, and readers in other processes, say whether its range is asleep.
  void explain_asleep(bool asleep) noexcept VT_LOCKED {
    if (known_) known_->set_asleep(asleep);
    if (range_.shared()) range_.shared()->set_asleep(asleep);
  }

  // -- reports

  // What the driver refused the worker for it; null if nothing, or if it was taken before.
  std::exception_ptr take_error() VT_LOCKED;
  PoolCounts counts();
  // Adds its pages to `counts`. Pages that sleep do not count as mapped.
  void count(PoolCounts& counts) const VT_LOCKED;
  // Throws an Error that names the violated invariant.
  virtual void check(std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED;

 protected:
  // 2^47 bytes are the addresses of a process on x86-64.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 47;

  // For messages: `noun` is "tensor" or "arena", `capture_advice` for users whose capture refuses
  // driver calls.
  Client(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages,
         const char* noun, const char* capture_advice);

  // Reserves the addresses of its rows, as Driver::reserve, and joins the pool. `report`: what
  // reports of faults say of them. Pages may move between clients of one `owner` without zeroing
  // (I7); without one, it is an owner of its own. Takes the lock.
  void open(const Caller& caller, std::unique_ptr<faults::Range> report, Backed backed,
            std::optional<std::uint64_t> owner = {});

  // Pages were unmapped, or their unmapping was refused.
  virtual void enter_back(const Reservation::Departure& departure) VT_LOCKED;
  // Adds to `arrival` empty indices that the client wants ahead, up to `pages` pages, and the pages
  // to be mapped there if these are shared ones.
  virtual void find_missing(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED;
  // Whether it wants pages ahead that are not mapped.
  virtual bool wants() const VT_LOCKED { return missing_ahead() != 0; }
  // Pages that it wanted ahead were mapped or refused.
  virtual void arrived(const Reservation::Arrival& arrival) VT_LOCKED = 0;
  // Pages ahead have come, been zeroed or gone.
  virtual void ahead_changed() VT_LOCKED {}

  // Indices that the owner needs no more, or that are ahead or cached no more, all of them or those
  // from `begin` on that are mapped for this reason: what no generation covers is unneeded.
  void release(Interval indices) VT_LOCKED;
  void release(Why why, std::size_t begin = 0) VT_LOCKED;
  // Notes the side stream, and makes room for its fence: growth waits for zeroing by both, and
  // there may be no memory once pages are being zeroed.
  void make_room_for_zeroing() VT_LOCKED;
  // Wants no more pages ahead. What is mapped in part goes.
  void give_up_ahead() VT_LOCKED;
  // The next operation raises `error`. A placed client's host keeps it, so that the slot's next
  // owner does not drop it.
  void failed(std::exception_ptr error) VT_LOCKED;
  // A generation that covers `indices` of every row, or an arena's pages of `bytes`.
  Generation* publish_locked(Interval indices, Interval bytes = {}) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const char *const noun_, *const capture_advice_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  Backed backed_;                     // as its range was reserved
  faults::Known known_;               // its range in reports of faults; null if it is placed
  bool owned_ VT_GUARDED = true;      // the owner has not left
  bool reserved_ VT_GUARDED = false;  // the range is not freed yet
  bool is_tensor_ VT_GUARDED = true;  // counted as one while it has an owner
  bool busy_ VT_GUARDED = false;      // a thread makes driver calls for it without the lock
  // The thread whose Busy holds the client; none during the worker's steps.
  std::thread::id busy_thread_ VT_GUARDED;
  // Callers that wait until the client is not busy; the mapper lets them go first.
  std::size_t waiting_ VT_GUARDED = 0;
  // Fences that the next stream to use ready or cached pages waits for.
  std::vector<FencePtr> ready_after_ VT_GUARDED;
  // Pages may still be zeroed by work that ready_after_ has no fence of: is_quiet() adds one.
  bool zeroing_ VT_GUARDED = false;
  std::size_t evicted_ VT_GUARDED = 0;  // cached pages, so far; counted by arenas
  PendingWork work_ VT_GUARDED;
  std::vector<Generation*> generations_ VT_GUARDED;  // that have not ended, in any order
  Coverage covered_ VT_GUARDED;                      // by any of them
  Generation* host_ = nullptr;  // placed clients only: keeps the host's range reserved
  // Made in advance, so that `abandon` cannot fail.
  std::unique_ptr<Generation> owner_end_ = std::make_unique<Generation>();

 private:
  // Makes those of `indices` unneeded that only generations needed, if none covers them now.
  void uncover(Interval indices) VT_LOCKED;
  // If no page is fenced, unneeded pages become so. Whether any is.
  bool begin_unmapping() VT_LOCKED;
  // Claims about `pages` of the pages that are to be unmapped, if it returns `some`.
  Unmapped claim_back(Reservation::Departure& departure, std::size_t pages) noexcept VT_LOCKED;
  // Whether the owner has left and no generation is left, so that the range is to be freed.
  bool ends() const VT_LOCKED {
    return !owned_ && reserved_ && generations_.empty() && range_.mapped(Why::cached) == 0;
  }
  // Frees the range of a client that ends. False if pages are left in it.
  bool release_range() VT_LOCKED;
  void refused(std::exception_ptr error) noexcept VT_LOCKED;
  // Some runs of pages ahead or cached that the last owner left unzeroed, up to `most` pages.
  std::vector<Reservation::Run> unclean(std::size_t most) const VT_LOCKED;

  std::vector<FencePtr> unmap_after_ VT_GUARDED;  // the fenced pages may be unmapped then
  std::exception_ptr refusal_ VT_GUARDED;
  // When the mapper tries again. A caller that waits for the pages tries at once.
  std::chrono::steady_clock::time_point retry_at_ VT_GUARDED;
  std::exception_ptr error_ VT_GUARDED;  // what the driver refused the mapper, not yet raised
  std::atomic<bool> failed_{false};      // error_ is set: read without the lock
};

}  // namespace vtensor
