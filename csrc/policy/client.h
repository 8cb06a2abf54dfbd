// A holder of pages: an address range whose pages are mapped ahead of need, and unmapped after the
// work that may use them. The page table says why the pages of each index are mapped (`Why`);
// Buffer and Arena derive from Client, and decide which pages are needed, ahead or cached. The pool
// has lists of its clients; its worker maps and unmaps for them.
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

// A description of one page of a client, for people.
struct PageRecord {
  std::size_t row;
  std::size_t index;  // of the page in its row
  Address address;
  std::int64_t page_id;  // its handle; -1 for a private copy, and asleep
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
    bool first = false;  // is served before clients that only look ahead
  };
  Hooks hooks VT_GUARDED;

  // -- for its owner

  // Throws if the pool is broken, Asleep if the client sleeps, and once the mapper's error (I10).
  void raise_error(const char* operation);
  void raise_if_asleep(const char* operation) const;
  // Work in the caller's stream uses the pages, which are unmapped only after the work.
  void use(const Caller& caller);
  // The owner leaves: pages are cached, or unmapped as the generations over them end. Never blocks,
  // never throws (I11). Takes effect before the lock is next released. Requires: called once.
  void abandon() noexcept;
  std::vector<PageRecord> pages();
  // Shows the pages to readers in other processes from now on, with `words` words (see
  // vmm/shared_range.h); later calls do nothing. Throws InvalidArgument if the pool is not
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
  // Waits until no thread makes driver calls for the client, and all leaving pages are unmapped;
  // the mapper begins nothing meanwhile. False if there was nothing to wait for. Throws a refusal
  // of the driver, and TimedOut.
  bool await_turn(PoolLock& lock, const Caller& caller) VT_LOCKED;
  // Throws if the caller's stream is being captured, because driver work would join the graph or
  // break the capture, or if the stream is not of the driver's context.
  void require_no_capture(const Caller& caller) const;
  // Whether all fences of ready_after_ have passed. Throws a refusal of the driver.
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
  // Unmaps pages that nothing needs and whose fences have passed, and frees the range of a client
  // that ends. False if anything is left to do; refusal() is then the driver's refusal, if there
  // was one. Releases the lock meanwhile, unless `lock` is null, as in a deleter.
  bool finish_unmapping(PoolLock* lock) noexcept VT_LOCKED;
  // Unmaps about `pages` of the pages that nothing needs; begins no driver call after `until`.
  enum class Unmapped : std::uint8_t { some, waits, refused, done };
  Unmapped unmap_some(PoolLock* lock, std::size_t pages,
                      std::chrono::steady_clock::time_point until) noexcept VT_LOCKED;
  // A refused fence or unmapping, because of which pages stay, until the next try.
  const std::exception_ptr& refusal() const VT_LOCKED { return refusal_; }
  // Pages that wait to be unmapped; 0 if their unmapping was refused.
  std::size_t pages_leaving() const VT_LOCKED {
    return refusal_ ? 0 : range_.mapped(Why::unneeded) + range_.mapped(Why::fenced);
  }
  // Gives up the pages ahead of need; returns how many.
  virtual std::size_t drop_ahead() VT_LOCKED;

  // -- reuse

  // Whether the client lies in the range of another client, its host.
  bool placed() const { return host_ != nullptr; }
  // Whether the client has only cached pages: its next owner would take back leaving pages (I7).
  bool reusable() const VT_LOCKED {
    return range_.mapped() != 0 && range_.mapped() == range_.mapped(Why::cached);
  }
  // Unmaps cached pages.
  virtual void evict() VT_LOCKED = 0;

  // -- the worker's tasks, a part at a time: claimed, carried out without the lock, entered. The
  // client is busy in between.

  // Whether another thread changes the client's mappings, or waits to: the worker then leaves the
  // client alone.
  bool busy() const VT_LOCKED { return busy_ || waiting_ != 0; }

  // Claims up to `pages` of the pages wanted ahead. False if none is wanted, or none can be had.
  bool claim_ahead(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED;
  void enter_ahead(Reservation::Arrival& arrival) VT_LOCKED;
  // Pages wanted ahead that are not mapped.
  std::size_t missing_ahead() const VT_LOCKED { return range_.missing(Why::prefetched); }

  // `unmap_some`, but not soon after a refusal, and not beside another thread.
  Unmapped give_back_some(PoolLock& lock, std::size_t pages,
                          std::chrono::steady_clock::time_point until) noexcept VT_LOCKED;

  // Zeroing of pages ahead or cached, once the last owner's work has passed. to_clean: such pages
  // exist, in a client that is awake. clean_some zeroes up to `pages` of them; false if it did
  // nothing.
  bool to_clean() const VT_LOCKED { return asleep.load() == 0 && !unclean(1).empty(); }
  bool clean_some(PoolLock& lock, std::size_t pages) VT_LOCKED;

  // -- sleep (see sleep.h)

  // The number of the client's sleep, in which operations are refused; 0 if the client is awake.
  std::atomic<std::uint64_t> asleep{0};
  // Fences after all work launched so far that may use the pages; whether a lease announces more.
  std::vector<FencePtr> fences() const VT_LOCKED;
  void add_work_to(PendingWork& all) const VT_LOCKED { all.add(work_, ready_after_); }
  bool leased() const VT_LOCKED;
  // The client woke without its contents: each page counts as a new one, which shows zeros.
  virtual void lose_contents() noexcept VT_LOCKED {}
  // Tells reports of faults, and readers in other processes, whether the range is asleep.
  void explain_asleep(bool asleep) noexcept VT_LOCKED {
    if (known_) known_->set_asleep(asleep);
    if (range_.shared()) range_.shared()->set_asleep(asleep);
  }

  // -- reports

  // The worker's error for the client, which is forgotten then; null if there is none.
  std::exception_ptr take_error() VT_LOCKED;
  PoolCounts counts();
  // Adds the client's pages to `counts`. Sleeping pages do not count as mapped.
  void count(PoolCounts& counts) const VT_LOCKED;
  // Throws an Error that names the violated invariant.
  virtual void check(std::unordered_map<const Page*, PageUse>& uses) const VT_LOCKED;

 protected:
  // A process on x86-64 has 2^47 bytes of addresses.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 47;

  // For messages: `noun` is "tensor" or "arena"; `capture_advice` tells users how to avoid driver
  // calls in a capture.
  Client(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages,
         const char* noun, const char* capture_advice);

  // Reserves the addresses of the rows, as Driver::reserve, and joins the pool. `report` explains
  // faults there. Clients of one `owner` get each other's pages without zeroing (I7); without
  // `owner` the client is an owner of its own. Takes the lock.
  void open(const Caller& caller, std::unique_ptr<faults::Range> report, Backed backed,
            std::optional<std::uint64_t> owner = {});

  // Pages were unmapped, or their unmapping was refused.
  virtual void enter_back(const Reservation::Departure& departure) VT_LOCKED;
  // Adds empty indices that the client wants ahead to `arrival`, up to `pages` pages; and for
  // deferred pages the pages themselves.
  virtual void find_missing(Reservation::Arrival& arrival, std::size_t pages) VT_LOCKED;
  // Whether the client wants pages ahead that are not mapped.
  virtual bool wants() const VT_LOCKED { return missing_ahead() != 0; }
  // Called when pages wanted ahead were mapped or refused.
  virtual void arrived(const Reservation::Arrival& arrival) VT_LOCKED = 0;
  // Called when pages ahead have come, gone, or been zeroed.
  virtual void ahead_changed() VT_LOCKED {}

  // The owner needs `indices` no more, or the pages of a reason, from index `begin` on, are ahead
  // or cached no more. Pages that no generation covers become unneeded.
  void release(Interval indices) VT_LOCKED;
  void release(Why why, std::size_t begin = 0) VT_LOCKED;
  // Notes the side stream, and makes room for its fence in ready_after_ before zeroing begins:
  // growth waits for zeroing by both, and there may be no memory later.
  void make_room_for_zeroing() VT_LOCKED;
  // Wants no more pages ahead. Indices mapped in part become unneeded.
  void give_up_ahead() VT_LOCKED;
  // The next operation raises `error`. The host of a placed client keeps the error, because the
  // slot's next owner would drop it.
  void failed(std::exception_ptr error) VT_LOCKED;
  // Makes a generation that covers `indices` of every row, or an arena's pages of `bytes`.
  Generation* publish_locked(Interval indices, Interval bytes = {}) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const char *const noun_, *const capture_advice_;
  Driver& driver_;
  const RowShape shape_;
  Reservation range_;
  Backed backed_;                     // of the range
  faults::Known known_;               // reports of faults in the range; null if placed
  bool owned_ VT_GUARDED = true;      // the owner has not left
  bool reserved_ VT_GUARDED = false;  // the range is reserved, and not freed yet
  bool is_tensor_ VT_GUARDED = true;  // PoolCounts::buffers counts the client while it has an owner
  bool busy_ VT_GUARDED = false;      // a thread makes driver calls for it without the lock
  // The thread that has a Busy of the client; none during the worker's steps.
  std::thread::id busy_thread_ VT_GUARDED;
  // How many callers wait until the client is not busy; the mapper lets them go first.
  std::size_t waiting_ VT_GUARDED = 0;
  // Fences for which the next stream that uses ready or cached pages waits.
  std::vector<FencePtr> ready_after_ VT_GUARDED;
  // Work that ready_after_ has no fence of may still zero pages: is_quiet() adds fences.
  bool zeroing_ VT_GUARDED = false;
  std::size_t evicted_ VT_GUARDED = 0;  // cached pages evicted so far; for arenas
  PendingWork work_ VT_GUARDED;
  std::vector<Generation*> generations_ VT_GUARDED;  // those that have not ended, in any order
  Coverage covered_ VT_GUARDED;                      // indices that some generation covers
  Generation* host_ = nullptr;  // placed clients only: keeps the host's range reserved
  // Made in advance, because `abandon` must not fail.
  std::unique_ptr<Generation> owner_end_ = std::make_unique<Generation>();

 private:
  // Makes indices unneeded that only generations needed, if none covers them any more.
  void uncover(Interval indices) VT_LOCKED;
  // Fences the unneeded pages, if no page is fenced yet. Whether any page is fenced then.
  bool begin_unmapping() VT_LOCKED;
  // Claims about `pages` of the fenced pages, if it returns `some`.
  Unmapped claim_back(Reservation::Departure& departure, std::size_t pages) noexcept VT_LOCKED;
  // Whether the owner has left, no generation is left and nothing is cached: the range is freed.
  bool ends() const VT_LOCKED {
    return !owned_ && reserved_ && generations_.empty() && range_.mapped(Why::cached) == 0;
  }
  // Frees the range if the client ends. False if pages are left in it.
  bool release_range() VT_LOCKED;
  void refused(std::exception_ptr error) noexcept VT_LOCKED;
  // Some runs of pages ahead or cached, up to `most` pages, that have another owner's bytes.
  std::vector<Reservation::Run> unclean(std::size_t most) const VT_LOCKED;

  std::vector<FencePtr> unmap_after_ VT_GUARDED;  // fences of the fenced pages
  std::exception_ptr refusal_ VT_GUARDED;
  // When the mapper tries a refusal again. A caller that waits for the pages tries at once.
  std::chrono::steady_clock::time_point retry_at_ VT_GUARDED;
  std::exception_ptr error_ VT_GUARDED;  // the mapper's, not yet raised
  std::atomic<bool> failed_{false};      // error_ is set; read without the lock
};

}  // namespace vtensor
