#include "heap/heap.h"

#include <algorithm>
#include <string>

#include "base/errors.h"
#include "policy/page_pool.h"

namespace vtensor {

namespace {

// Pages of a region at least. Addresses cost little: a record of each page.
constexpr std::size_t kSmallRegion = 32, kLargeRegion = 512;

// Never passes SIZE_MAX; what is rounded down to a multiple then is refused later.
std::size_t rounded(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const std::size_t over = bytes % Heap::kAlignment;
  if (over == 0) return bytes;
  return bytes > SIZE_MAX - Heap::kAlignment ? bytes - over : bytes - over + Heap::kAlignment;
}

}  // namespace

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

std::shared_ptr<Heap::Region> Heap::fitting(std::pair<Stream, Kind> key, std::size_t bytes) const {
  std::shared_ptr<Region> best;
  std::size_t least = 0;
  for (const auto& [base, region] : regions_) {
    if (region->key != key) continue;
    const std::size_t fit = region->spans.fit(bytes);
    if (fit == 0 || (best && fit >= least)) continue;
    best = region;
    least = fit;
  }
  return best;
}

Heap::Place Heap::take(const Caller& caller, std::size_t bytes) {
  const std::size_t page = pool_->page_size();
  const Kind kind = bytes <= page / 2 ? Kind::small : Kind::large;
  const std::pair key(caller.stream, kind);
  {
    const PoolLock lock(pool_);
    pool_->reap();
    if (std::shared_ptr<Region> region = fitting(key, bytes))
      return {region, region->spans.take(bytes)};
  }
  sweep();
  const std::size_t least = page * (kind == Kind::small ? kSmallRegion : kLargeRegion);
  std::shared_ptr<Arena> arena =
      Arena::make(pool_, std::max(bytes, least), /*zeros=*/false, caller,
                  "no page is mapped there, because what was allocated there has been freed");
  try {
    auto region = std::make_shared<Region>(arena, key);
    const PoolLock lock(pool_);
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
  const auto [region, taken] = take(caller, rounded(bytes));
  const std::shared_ptr<Arena> arena = region->arena;
  try {
    if (arena->pool()->driver().capturing(caller.stream))
      arena->await_prepared(caller, {&taken, 1});
    arena->map(caller, {&taken, 1});
  } catch (...) {
    const PoolLock lock(pool_);
    region->spans.give_back(taken.begin);
    throw;
  }
  return arena->base() + taken.begin;
}

bool Heap::free(const Caller& caller, Address address) {
  std::shared_ptr<Region> region;
  Interval taken;
  {
    const PoolLock lock(pool_);
    region = region_at(address);
    if (!region) return false;
    taken = region->spans.at(address - region->arena->base());
  }
  region->arena->unmap(caller, {&taken, 1});
  const PoolLock lock(pool_);
  region->spans.give_back(taken.begin);
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

void Heap::use(const Caller& caller, Address address) {
  std::shared_ptr<Region> region;
  {
    const PoolLock lock(pool_);
    region = region_at(address);
  }
  if (region) region->arena->use(caller);
}

std::size_t Heap::trim(const Caller& caller) {
  std::size_t pages = 0;
  for (const std::shared_ptr<Region>& region : regions()) {
    const Interval all{0, region->arena->bytes()};
    pages += region->arena->trim(caller, {&all, 1});
  }
  return pages;
}

HeapCounts Heap::counts() {
  HeapCounts counts;
  for (const std::shared_ptr<Region>& region : regions()) {
    const ArenaCounts pages = region->arena->counts();
    counts.pages.active += pages.active;
    counts.pages.cached += pages.cached;
    counts.pages.prefetched += pages.prefetched;
    counts.pages.pinned += pages.pinned;
    counts.pages.quarantined += pages.quarantined;
    counts.pages.evicted += pages.evicted;
    counts.reserved += region->arena->bytes();
    const PoolLock lock(pool_);
    counts.allocations += region->spans.count();
    counts.allocated += region->spans.taken_bytes();
  }
  return counts;
}

}  // namespace vtensor
