#include "heap/heap.h"

#include <algorithm>
#include <string>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "policy/page_pool.h"

namespace vtensor {

namespace {

// The fewest pages of a region. A region is as large as all earlier ones of its key together, so
// regions stay few.
constexpr std::size_t kRegion = 512;

// An allocation gets whole pages if that wastes at most one part in kMostLoss of them.
constexpr std::size_t kMostLoss = 1024;

// `bytes` rounded up to a multiple of `unit`; on overflow SIZE_MAX, which reserve() refuses.
std::size_t rounded(std::size_t bytes, std::size_t unit) {
  return checked_multiply(ceil_div(std::max<std::size_t>(bytes, 1), unit), unit).value_or(SIZE_MAX);
}

}  // namespace

Heap::Region::Region(const std::shared_ptr<PagePool>& pool, std::size_t bytes, const Caller& caller,
                     Key key)
    : Arena(pool, bytes, caller, "memory for vtensor.adopt and vtensor.memory",
            "no page is mapped there, because what was allocated there has been freed"),
      key(key),
      spans(bytes) {}

void Heap::Region::forget(const Generation* generation) noexcept {
  Arena::forget(generation);
  spans.give_back(generation->bytes.begin);
}

Heap::Heap(const std::shared_ptr<PagePool>& pool) : pool_(pool) {
  const PoolLock lock(pool_);
  owner_ = pool_->next_id();
}

Heap::~Heap() {
  for (const auto& [base, region] : regions_) region->abandon();
}

std::vector<std::shared_ptr<Heap::Region>> Heap::regions() const {
  std::vector<std::shared_ptr<Region>> all;
  const PoolLock lock(pool_);
  all.reserve(regions_.size());
  for (const auto& [base, region] : regions_) all.push_back(region);
  return all;
}

// -- addresses

std::shared_ptr<Heap::Region> Heap::best_fit(Key key, std::size_t bytes) const {
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

void Heap::reserve(const Caller& caller, Key key, std::size_t bytes) {
  sweep();
  const std::size_t page = pool_->page_size();
  const std::size_t budget = pool_->store().budget() * page;
  if (bytes > budget) {
    throw OutOfPages("[", caller.operation, "] ", bytes,
                     " bytes are asked for at once, and the pool's budget is ", budget,
                     ": raise it, or ask for less");
  }
  std::size_t reserved = 0;
  {
    const PoolLock lock(pool_);
    for (const auto& [base, region] : regions_) {
      if (region->key == key) reserved += region->bytes();
    }
  }
  const std::size_t size = std::max({bytes, page * kRegion, std::min(reserved, budget)});
  const std::shared_ptr<Region> region(new Region(pool_, size, caller, key), DeleteUnlessForked{});
  region->open(owner_, {}, caller);
  try {
    const PoolLock lock(pool_);
    regions_.emplace(region->base(), region);
  } catch (...) {
    region->abandon();
    throw;
  }
}

bool Heap::any_asleep() const {
  return std::any_of(regions_.begin(), regions_.end(),
                     [](const auto& at) { return at.second->asleep.load() != 0; });
}

void Heap::sweep() {
  std::vector<std::shared_ptr<Region>> unused;
  {
    const PoolLock lock(pool_);
    unused.reserve(regions_.size());
    std::erase_if(regions_, [&](const auto& at) VT_LOCKED {
      const std::shared_ptr<Region>& region = at.second;
      if (!region->spans.all_free() || region->range().mapped() != 0) return false;
      unused.push_back(region);
      return true;
    });
  }
  for (const std::shared_ptr<Region>& region : unused) region->abandon();
}

std::shared_ptr<Heap::Region> Heap::region_at(Address address) const {
  auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const std::shared_ptr<Region>& region = std::prev(after)->second;
  return region->spans.is_taken(address - region->base()) ? region : nullptr;
}

// -- allocations

Address Heap::allocate(const Caller& caller, std::size_t bytes) {
  bytes = rounded(bytes, kAlignment);
  const std::size_t page = pool_->page_size(), whole = rounded(bytes, page);
  const Key key(caller.stream, whole - bytes <= whole / kMostLoss);
  if (key.second) bytes = whole;
  std::shared_ptr<Region> region;
  Interval taken;
  try {
    for (;; reserve(caller, key, bytes)) {
      const PoolLock lock(pool_);
      if (closed_) throw Closed("[", caller.operation, "] the pool is closed: make a new one");
      if (any_asleep()) {
        throw Asleep("[", caller.operation,
                     "] the pool's memory of this tag is asleep: call wake() of the pool first");
      }
      region = best_fit(key, bytes);
      if (!region) continue;
      taken = region->spans.take(bytes);
      if (region->map_ready(caller, taken)) return region->base() + taken.begin;
      break;
    }
    region->map(caller, {&taken, 1}, {}, true);
  } catch (...) {
    if (taken.empty()) throw;
    const PoolLock lock(pool_);
    region->spans.give_back(taken.begin);
    throw;
  }
  return region->base() + taken.begin;
}

bool Heap::free(const Caller& caller, Address address) {
  const PoolLock lock(pool_);
  const std::shared_ptr<Region> region = region_at(address);
  if (!region) return false;
  const std::size_t begin = address - region->base();
  region->unmap_mapped(caller, region->spans.at(begin));
  region->spans.give_back(begin);
  return true;
}

Generation* Heap::publish(Address address) {
  std::shared_ptr<Region> region;
  Interval taken;
  {
    const PoolLock lock(pool_);
    region = region_at(address);
    taken = region->spans.at(address - region->base());
  }
  return region->publish(taken);
}

bool Heap::asleep() const {
  const PoolLock lock(pool_);
  return any_asleep();
}

std::size_t Heap::trim(const Caller& caller) {
  std::size_t pages = 0;
  for (const std::shared_ptr<Region>& region : regions()) {
    const Interval all{0, region->bytes()};
    pages += region->trim(caller, {&all, 1});
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
  const PoolLock lock(pool_);
  for (const auto& [base, region] : regions_) {
    region->count(counts.pages);
    counts.reserved += region->bytes();
    counts.allocations += region->spans.count();
    counts.allocated += region->spans.taken_bytes();
  }
  return counts;
}

}  // namespace vtensor
