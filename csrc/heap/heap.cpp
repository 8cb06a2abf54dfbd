#include "heap/heap.h"

#include <algorithm>
#include <string>

#include "base/align.h"
#include "base/errors.h"
#include "policy/page_pool.h"

namespace vtensor {

namespace {

// Least pages of a region. Each is as large as all before it together, so regions stay few.
constexpr std::size_t kSmallRegion = 32, kLargeRegion = 512;

constexpr Arena::Words kWords{
    "memory for vtensor.adopt and vtensor.memory",
    "no page is mapped there, because what was allocated there has been freed"};

// An allocation gets whole pages if it leaves at most one part in kMostLoss of them empty.
constexpr std::size_t kMostLoss = 1024;

// `bytes` rounded up to a multiple of `unit`; SIZE_MAX on overflow, which is refused later.
std::size_t rounded(std::size_t bytes, std::size_t unit) {
  return checked_multiply(ceil_div(std::max<std::size_t>(bytes, 1), unit), unit).value_or(SIZE_MAX);
}

}  // namespace

Heap::Heap(const std::shared_ptr<PagePool>& pool) : pool_(pool) {
  const PoolLock lock(pool_);
  owner_ = pool_->next_id();
}

Heap::~Heap() {
  for (const std::shared_ptr<Region>& region : regions()) {
    {
      const PoolLock lock(pool_);
      region->arena->listen(nullptr);
    }
    region->arena->abandon();
  }
}

std::vector<std::shared_ptr<Heap::Region>> Heap::regions() const {
  std::vector<std::shared_ptr<Region>> all;
  const PoolLock lock(pool_);
  all.reserve(regions_.size());
  for (const auto& [base, region] : regions_) all.push_back(region);
  return all;
}

// -- addresses

Heap::Place Heap::take(Key key, std::size_t bytes) {
  std::shared_ptr<Region> best;
  std::size_t least = 0;
  for (const auto& [base, region] : regions_) {
    if (region->key != key) continue;
    const std::size_t fit = region->spans.fit(bytes);
    if (fit == 0 || (best && fit >= least)) continue;
    best = region;
    least = fit;
  }
  if (!best) return {};
  const Interval taken = best->spans.take(bytes);
  return {std::move(best), taken};
}

Heap::Place Heap::take_new(const Caller& caller, Key key, std::size_t bytes) {
  sweep();
  const std::size_t page = pool_->page_size();
  const std::size_t budget = pool_->store().budget() * page;
  if (bytes > budget) {
    throw OutOfPages("[", caller.operation, "] ", bytes,
                     " bytes are asked for at once, and the pool's budget is ", budget,
                     ": raise it, or ask for less");
  }
  std::size_t reserved = 0;
  std::uint64_t owner;
  {
    const PoolLock lock(pool_);
    owner = owner_;
    for (const auto& [base, region] : regions_) {
      if (region->key == key) reserved += region->arena->bytes();
    }
  }
  const std::size_t least = page * (key.second == Kind::small ? kSmallRegion : kLargeRegion);
  const std::size_t size = std::max({bytes, least, std::min(reserved, budget)});
  std::shared_ptr<Arena> arena = Arena::make_for(owner, pool_, size, caller, kWords);
  try {
    auto region = std::make_shared<Region>(arena, key);
    const PoolLock lock(pool_);
    require_awake(caller);
    const auto entered = regions_.emplace(arena->base(), region).first;
    try {
      const Interval taken = region->spans.take(bytes);
      arena->listen(region.get());
      return {std::move(region), taken};
    } catch (...) {
      regions_.erase(entered);
      throw;
    }
  } catch (...) {
    arena->abandon();
    throw;
  }
}

bool Heap::any_asleep() const {
  return std::any_of(regions_.begin(), regions_.end(),
                     [](const auto& at) { return at.second->arena->asleep.load() != 0; });
}

void Heap::require_awake(const Caller& caller) const {
  if (!any_asleep()) return;
  throw Asleep("[", caller.operation,
               "] the pool's memory of this tag is asleep: call wake() of the pool first");
}

void Heap::sweep() {
  std::vector<std::shared_ptr<Region>> unused;
  {
    const PoolLock lock(pool_);
    unused.reserve(regions_.size());
    for (auto at = regions_.begin(); at != regions_.end();) {
      const std::shared_ptr<Region>& region = at->second;
      const bool used = !region->spans.all_free() || region->arena->range().mapped() != 0;
      if (used) {
        ++at;
        continue;
      }
      region->arena->listen(nullptr);
      unused.push_back(region);
      at = regions_.erase(at);
    }
  }
  for (const std::shared_ptr<Region>& region : unused) region->arena->abandon();
}

std::shared_ptr<Heap::Region> Heap::region_at(Address address) const {
  auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const std::shared_ptr<Region>& region = std::prev(after)->second;
  return region->spans.is_taken(address - region->arena->base()) ? region : nullptr;
}

// -- allocations

Address Heap::allocate(const Caller& caller, std::size_t bytes) {
  bytes = rounded(bytes, kAlignment);
  const std::size_t page = pool_->page_size(), whole = rounded(bytes, page);
  Key key(caller.stream, bytes <= page / 2 ? Kind::small : Kind::large);
  if (whole - bytes <= whole / kMostLoss) {
    key.second = Kind::whole;
    bytes = whole;
  }
  Place place;
  try {
    {
      const PoolLock lock(pool_);
      if (closed_) throw Closed("[", caller.operation, "] the pool is closed: make a new one");
      require_awake(caller);
      pool_->reap();
      place = take(key, bytes);
      if (place.region && place.region->arena->map_ready(caller, place.bytes))
        return place.region->arena->base() + place.bytes.begin;
    }
    if (!place.region) place = take_new(caller, key, bytes);
    place.region->arena->map_in_capture(caller, place.bytes);
  } catch (...) {
    if (!place.region) throw;
    const PoolLock lock(pool_);
    place.region->spans.give_back(place.bytes.begin);
    throw;
  }
  return place.region->arena->base() + place.bytes.begin;
}

bool Heap::free(const Caller& caller, Address address) {
  const PoolLock lock(pool_);
  const std::shared_ptr<Region> region = region_at(address);
  if (!region) return false;
  const std::size_t begin = address - region->arena->base();
  region->arena->unmap_mapped(caller, region->spans.at(begin));
  region->spans.give_back(begin);
  return true;
}

Generation* Heap::publish(Address address) {
  std::shared_ptr<Region> region;
  Interval taken;
  {
    const PoolLock lock(pool_);
    region = region_at(address);
    taken = region->spans.at(address - region->arena->base());
  }
  return region->arena->publish(taken);
}

std::vector<std::shared_ptr<Arena>> Heap::arenas() const {
  std::vector<std::shared_ptr<Arena>> all;
  for (const std::shared_ptr<Region>& region : regions()) all.push_back(region->arena);
  return all;
}

bool Heap::asleep() const {
  const PoolLock lock(pool_);
  return any_asleep();
}

std::size_t Heap::trim(const Caller& caller) {
  std::size_t pages = 0;
  for (const std::shared_ptr<Region>& region : regions()) {
    const Interval all{0, region->arena->bytes()};
    pages += region->arena->trim(caller, {&all, 1});
  }
  sweep();
  return pages;
}

void Heap::close() {
  const PoolLock lock(pool_);
  closed_ = true;
}

HeapCounts Heap::counts() {
  HeapCounts counts;
  for (const std::shared_ptr<Region>& region : regions()) {
    const ArenaCounts pages = region->arena->counts();
    counts.pages.active += pages.active;
    counts.pages.cached += pages.cached;
    counts.pages.prefetched += pages.prefetched;
    counts.pages.pinned += pages.pinned;
    counts.pages.evicted += pages.evicted;
    counts.reserved += region->arena->bytes();
    const PoolLock lock(pool_);
    counts.allocations += region->spans.count();
    counts.allocated += region->spans.taken_bytes();
  }
  return counts;
}

}  // namespace vtensor
