// One flat range of addresses, of which any pages are mapped in any order: the memory in which
// engines with a block table keep K and V. A page is mapped while a block needs it, and stays
// mapped until memory is wanted elsewhere: blocks that come and go make no driver call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/interval.h"
#include "base/sparse_array.h"
#include "policy/client.h"
#include "vmm/caller.h"

namespace vtensor {

class Arena : public Client {
 public:
  // Throws CapacityExceeded, DriverError. `zeros`: if kernels cannot be given the address of a
  // hole, a read-only page of zeros is mapped in each hole (see Backed).
  static std::shared_ptr<Arena> make(const std::shared_ptr<PagePool>& pool, std::size_t bytes,
                                     bool zeros, const Caller& caller);

  Address base() const { return range_.base(); }
  std::size_t bytes() const { return shape_.capacity; }
  // The pages that hold these bytes.
  Interval pages_of(Interval bytes) const;

  // Maps the pages of `intervals` (bytes) until `unmap`, each interval as the use of one block: in
  // one batch of driver calls, or none. Whole or nothing (I8). `since` is empty or has a time for
  // each interval. Returns for each interval whether all of its pages have stayed mapped since its
  // time, and so kept their contents. A page that came later shows zeros or what this arena once
  // wrote (I7). `in_capture`: while the caller's stream is captured, the mapper makes the driver
  // calls, and map() waits for the mapper. Throws OutOfPages, DriverError, TimedOut.
  std::vector<char> map(const Caller& caller, std::span<const Interval> intervals,
                        std::span<const std::uint64_t> since = {}, bool in_capture = false);
  // `map` of one interval without a driver call. False, with nothing changed, if a page is not
  // mapped or a fence is to be waited for.
  bool map_ready(const Caller& caller, Interval bytes) VT_LOCKED;
  // Ends one use of each interval's pages. A page without uses stays mapped until eviction, and at
  // least until the work launched so far in the arena's streams has passed. Throws InvalidArgument,
  // with nothing changed, if a page has fewer uses.
  void unmap(const Caller& caller, std::span<const Interval> intervals);
  // `unmap` of one interval. Requires: its pages have a use.
  void unmap_mapped(const Caller& caller, Interval bytes) VT_LOCKED;
  // Has the mapper map the pages of `intervals`, and returns at once.
  void prepare(std::span<const Interval> intervals);
  // Unmaps the cached and prefetched pages of `intervals`. Returns how many pages are leaving.
  // Throws TimedOut.
  std::size_t trim(const Caller& caller, std::span<const Interval> intervals);
  // For each interval: all of its pages have stayed mapped since its time in `since`, and none is
  // leaving.
  std::vector<char> holds(std::span<const Interval> intervals,
                          std::span<const std::uint64_t> since = {});
  // The present time for `since`: pages that are mapped from now on have a later one.
  std::uint64_t now();
  // A generation for a storage over `bytes`, which `map` was given: the end of the generation is
  // their `unmap`. Without bytes, a generation for a storage over the whole range: it keeps the
  // addresses, and no page.
  Generation* publish(Interval bytes = {});

  // -- for its pool: see Client
  void forget(const Generation* generation) noexcept override VT_LOCKED;
  void leave() noexcept override VT_LOCKED;
  std::size_t drop_ahead() override VT_LOCKED { return awaiting_ != 0 ? 0 : Client::drop_ahead(); }
  void evict() override VT_LOCKED;
  void enter_back(const Reservation::Departure& departure) override VT_LOCKED;
  void lose_contents() noexcept override VT_LOCKED;
  void check(std::unordered_map<const Page*, PageUse>& uses) const override VT_LOCKED;

 protected:
  // For messages: `noun` names the arena, `hole` says why a byte may have no page. Throws
  // CapacityExceeded.
  Arena(const std::shared_ptr<PagePool>& pool, std::size_t bytes, const Caller& caller,
        const char* noun, const char* hole);
  // As Client::open. Throws DriverError.
  void open(std::optional<std::uint64_t> owner, Backed backed, const Caller& caller);

 private:
  struct Use {
    std::uint32_t blocks = 0;     // blocks that need the page
    bool ahead = false;           // came ahead of need, and no map() has used it since
    std::uint64_t mapped_at = 0;  // clock_ at its arrival
  };

  static std::size_t pages_for(const PagePool& pool, std::size_t bytes, const Caller& caller);
  void arrived(const Reservation::Arrival& arrival) override VT_LOCKED;

  std::vector<Interval> pages_of(std::span<const Interval> intervals) const;
  // Makes uses and page table entries of `pages` present. Throws std::bad_alloc.
  void have_uses(std::span<const Interval> pages) VT_LOCKED;
  // Calls visit(page, use) for the uses that are present.
  template <typename Visit>
  void each_use(Visit visit) VT_LOCKED {
    for (std::size_t i = uses_.next(0); i < range_.row_pages(); i = uses_.next(i + 1))
      visit(i, uses_.reserved(i));
  }
  std::vector<Reservation::Run> missing(std::span<const Interval> pages) const VT_LOCKED;
  std::vector<char> map_missing(PoolLock& lock, const Caller& caller,
                                std::span<const Interval> pages,
                                std::span<const std::uint64_t> since, bool in_capture) VT_LOCKED;
  // Has the mapper map `runs`, and waits for the mapper and for its work on the device.
  void await_mapper(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs)
      VT_LOCKED;
  // Whether `pages` are awake and have stayed mapped since the n-th time of `since`, and have been
  // used since they came.
  bool kept(Interval pages, std::span<const std::uint64_t> since, std::size_t n) const VT_LOCKED;
  void begin_use(std::span<const Interval> pages) noexcept VT_LOCKED;
  void end_use(std::span<const Interval> pages) noexcept VT_LOCKED;
  // Ends one use of each page.
  void count_back(std::span<const Interval> pages) noexcept VT_LOCKED;
  bool may_cache() const VT_LOCKED;
  void cache(std::size_t i, Page* page) noexcept VT_LOCKED;
  void uncache(std::size_t i) noexcept VT_LOCKED;
  // Sets why a page is mapped, and takes it off the list of cached pages.
  void set_why(std::size_t page, Why why) noexcept VT_LOCKED;
  // Why pages with uses are mapped: once the owner has left, only generations use them.
  Why used() const VT_LOCKED { return owned_ ? Why::needed : Why::viewed; }

  const char* const hole_;
  std::uint64_t clock_ VT_GUARDED = 0;  // arrivals of pages, and losses of contents, so far
  std::size_t mapping_ VT_GUARDED = 0;  // calls of map() under way: uses may lack a mapping
  SparseArray<Use> uses_ VT_GUARDED;    // [page index]
  PageList cached_ VT_GUARDED;
  std::size_t awaiting_ VT_GUARDED = 0;  // callers that wait for the mapper
};

}  // namespace vtensor
