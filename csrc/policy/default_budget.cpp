#include "policy/default_budget.h"

#include <algorithm>
#include <vector>

#include "policy/page_pool.h"

namespace vtensor {

namespace {

// A pool may take this part of the free memory at least, whatever other pools may take: a default
// pool is made on first use, and must not fail because another pool overcommits.
constexpr double kLeastShare = 1.0 / 16;

// Never destroyed: a pool may outlive static objects.
std::mutex& mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::vector<std::weak_ptr<PagePool>>& pools() {
  static auto& pools = *new std::vector<std::weak_ptr<PagePool>>;
  return pools;
}

// A simulated device's memory is the host's, and it has a budget of its own all the same.
bool shares_memory(const DriverTraits& one, const DriverTraits& other) {
  return one.name == other.name && one.device == other.device;
}

}  // namespace

PoolsOfProcess::PoolsOfProcess() : lock_(mutex()) {}

std::size_t PoolsOfProcess::default_budget(Driver& driver) const {
  const DriverTraits& traits = driver.traits();
  std::size_t unused = 0;
  for (const std::weak_ptr<PagePool>& one : pools()) {
    const std::shared_ptr<PagePool> pool = one.lock();
    if (pool && !pool->retired() && shares_memory(pool->traits(), traits))
      unused += pool->unused_bytes();
  }
  const auto free = unused == 0 ? 0.0 : static_cast<double>(driver.free_memory());
  if (free == 0) return traits.available;
  const double left = std::max(free - static_cast<double>(unused), free * kLeastShare);
  return static_cast<std::size_t>(static_cast<double>(traits.available) * left / free);
}

void PoolsOfProcess::add(const std::shared_ptr<PagePool>& pool) {
  std::erase_if(pools(), [](const auto& one) { return one.expired(); });
  pools().push_back(pool);
}

}  // namespace vtensor
