// Allocations of any size, as a framework's allocator asks for them, in arenas of one pool.
//
// Each stream has address space of its own, so freed bytes serve the next allocation in their
// stream without a wait. An allocation that fills whole pages shares no page, so its end frees all
// of its pages. Smaller allocations share pages, so the ends of their pages are not lost. Freed
// bytes stay mapped until memory is short: an allocation of a size freed before makes no driver
// call. Any free page of the pool can back new addresses (GMLake, arXiv 2401.08156; torch's
// expandable segments). The pool's lock guards all state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/interval.h"
#include "heap/spans.h"
#include "vmm/caller.h"
#include "vmm/pool_lock.h"

namespace vtensor {

struct HeapCounts {
  std::size_t allocations = 0;  // living ones
  std::size_t allocated = 0;    // their bytes, rounded up
  std::size_t reserved = 0;     // bytes of addresses
  PoolCounts pages;             // of its arenas
};

class Heap {
 public:
  // Sizes and addresses of allocations are multiples of kAlignment.
  static constexpr std::size_t kAlignment = 512;

  explicit Heap(const std::shared_ptr<PagePool>& pool);
  // Living storages keep their addresses and pages.
  ~Heap();
  Heap& operator=(Heap&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }

  // Allocates `bytes` (at least one) for work in the caller's stream. Whole or nothing (I8). During
  // a capture the mapper maps missing pages, so that no driver call is captured. Throws Closed,
  // CapacityExceeded, OutOfPages, DriverError, TimedOut.
  Address allocate(const Caller& caller, std::size_t bytes);
  // Frees an allocation. The bytes may serve the next allocation in its stream at once, but other
  // streams only after all work in that stream. False if nothing was allocated at `address`.
  bool free(const Caller& caller, Address address);
  // A generation for a storage over an allocation. The end of the generation frees it.
  Generation* publish(Address address);
  // Unmaps pages that no allocation needs, and frees addresses without pages. Returns how many
  // pages are leaving.
  std::size_t trim(const Caller& caller);
  // Refuses further allocations. Living allocations are freed as before.
  void close();

  HeapCounts counts();

  // An arena for the allocations of one stream, of whole pages or of others.
  class Region;
  std::vector<std::shared_ptr<Region>> regions() const;
  // Whether a region is asleep. Allocations are refused then.
  bool asleep() const;

 private:
  using Key = std::pair<Stream, bool>;  // the stream; whether the allocations fill whole pages

  // The region of `key` with the smallest free span that has `bytes`; null if none has room.
  std::shared_ptr<Region> best_fit(Key key, std::size_t bytes) const VT_LOCKED;
  // Adds a region with room for `bytes`.
  void reserve(const Caller& caller, Key key, std::size_t bytes);
  std::shared_ptr<Region> region_at(Address address) const VT_LOCKED;
  bool any_asleep() const VT_LOCKED;
  // Frees regions in which nothing is allocated or mapped.
  void sweep();

  const std::shared_ptr<PagePool> pool_;
  std::uint64_t owner_;  // of the pages of all its regions
  bool closed_ VT_GUARDED = false;
  std::map<Address, std::shared_ptr<Region>> regions_ VT_GUARDED;  // by their first byte
};

class Heap::Region final : public Arena {
 public:
  Region(const std::shared_ptr<PagePool>& pool, std::size_t bytes, const Caller& caller, Key key);
  using Arena::open;
  void forget(const Generation* generation) noexcept override VT_LOCKED;

  const Key key;
  Spans spans VT_GUARDED;
};

}  // namespace vtensor
