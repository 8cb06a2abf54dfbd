// Allocations of any size, as a framework's allocator asks for them, in arenas of one pool.
//
// Each stream has address space of its own, so that what is freed serves the next allocation in its
// stream without a wait. Allocations that fill whole pages have these to themselves, so that each
// page they leave is free as a whole; others are cut from shared pages, small ones from pages of
// small ones, so that nothing is lost at their ends. Freed bytes stay mapped
// until others want their memory, so a size that comes again makes no driver call; free pages, from
// anywhere in the pool, stand behind new addresses (GMLake, arXiv 2401.08156; torch's expandable
// segments). State stands under the pool's lock, and is changed whole.
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
  std::size_t allocations = 0;  // that live, or hold what a driver call has lost
  std::size_t allocated = 0;    // bytes of those, as rounded
  std::size_t reserved = 0;     // bytes of addresses
  ArenaCounts pages;            // of all its arenas
};

class Heap {
 public:
  // Sizes are rounded up to it, and addresses are multiples of it.
  static constexpr std::size_t kAlignment = 512;

  explicit Heap(const std::shared_ptr<PagePool>& pool);
  // Addresses and pages of what lives stay until its storages end.
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }

  // Bytes for work in the caller's stream; of none as for one. Whole or nothing (I8). During a
  // capture the mapper maps what is missing, and none of its work is captured. Throws Closed,
  // CapacityExceeded, OutOfPages, DriverError, TimedOut.
  Address allocate(const Caller& caller, std::size_t bytes);
  // Its bytes serve the next allocation in its stream, and later, behind all work in that stream,
  // others. False if nothing was allocated there.
  bool free(const Caller& caller, Address address);
  // What a storage over an allocation holds; its end frees it.
  Generation* publish(Address address);
  // Gives back pages that no allocation needs, and addresses without pages. Returns how many pages
  // are on their way.
  std::size_t trim(const Caller& caller);
  // Nothing more is allocated; what lives is freed as before.
  void close();

  HeapCounts counts();

  std::vector<std::shared_ptr<Arena>> arenas() const;
  // Whether one of its arenas is: nothing is allocated then.
  bool asleep() const;

 private:
  // Small ones and others are cut from shared pages, apart; the last fill pages of their own.
  enum class Kind : std::uint8_t { small, large, whole };
  using Key = std::pair<Stream, Kind>;

  // Address space of one stream and kind.
  class Region final : public Arena::Listener {
   public:
    Region(std::shared_ptr<Arena> arena, Key key)
        : spans(arena->bytes()), arena(std::move(arena)), key(key) {}
    void use_ended(std::size_t begin) noexcept override VT_LOCKED { spans.give_back(begin); }

    Spans spans VT_GUARDED;
    const std::shared_ptr<Arena> arena;
    const Key key;
  };
  struct Place {
    std::shared_ptr<Region> region;
    Interval bytes;
  };

  // Addresses for so many bytes in a stream's regions; null if none has room.
  Place take(Key key, std::size_t bytes) VT_LOCKED;
  // The same in a region of its own.
  Place take_new(const Caller& caller, Key key, std::size_t bytes);
  std::shared_ptr<Region> region_at(Address address) const VT_LOCKED;
  std::vector<std::shared_ptr<Region>> regions() const;
  bool any_asleep() const VT_LOCKED;
  void require_awake(const Caller& caller) const VT_LOCKED;
  // Ends regions in which nothing is allocated or mapped.
  void sweep();

  const std::shared_ptr<PagePool> pool_;
  std::uint64_t owner_ VT_GUARDED;  // of all its arenas
  bool closed_ VT_GUARDED = false;
  std::map<Address, std::shared_ptr<Region>> regions_ VT_GUARDED;  // by their first byte
};

}  // namespace vtensor
