// What a pool may take unless a budget is given: a part of the memory that is free, less what the
// other pools of this process were promised and have not taken. Other processes are not seen.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "policy/page_pool.h"

namespace vtensor {

namespace {

// Of the memory that is free so much is for a pool however much others were promised: a default
// pool is made on first use, and must not fail because another pool overcommits.
constexpr double kLeastShare = 16;

// The pools of this process. Never destroyed: a pool may outlive what is.
struct Registry {
  std::mutex mutex;  // taken before the lock of any pool
  std::vector<std::weak_ptr<PagePool>> pools;
};

Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

// A simulated device's memory is the host's, and it has a budget of its own all the same.
bool shares_memory(const DriverTraits& one, const DriverTraits& other) {
  return one.name == other.name && one.device == other.device;
}

}  // namespace

std::size_t PagePool::promised_bytes() {
  if (retired()) return 0;
  const PoolLock lock(shared_from_this());
  const std::size_t unused = store_.unused();
  return (unused - std::min(unused, store_.spare().size())) * page_size();
}

std::shared_ptr<PagePool> PagePool::enlist(std::unique_ptr<Driver> driver,
                                           const PoolOptions& options) {
  const DriverTraits& traits = driver->traits();
  const std::lock_guard lock(registry().mutex);
  std::vector<std::weak_ptr<PagePool>>& pools = registry().pools;
  std::erase_if(pools, [](const auto& pool) { return pool.expired(); });
  std::size_t budget = options.budget;
  if (budget == 0) {
    std::size_t promised = 0;
    for (const std::weak_ptr<PagePool>& one : pools) {
      const std::shared_ptr<PagePool> pool = one.lock();
      if (pool && shares_memory(pool->traits(), traits)) promised += pool->promised_bytes();
    }
    budget = traits.available;
    if (promised != 0) {
      const auto free = static_cast<double>(driver->free_memory());
      const double left = std::max(free - static_cast<double>(promised), free / kLeastShare);
      if (free > 0) budget = static_cast<std::size_t>(static_cast<double>(budget) * left / free);
    }
  }
  if (budget < traits.page_size) {
    throw InvalidArgument("[Pool] budget of " + std::to_string(budget) +
                          " bytes holds no page of " + std::to_string(traits.page_size) +
                          " bytes: raise the budget or lower the page size");
  }
  PoolOptions budgeted = options;
  budgeted.budget = budget;
  std::unique_ptr<SharedBudget> shared;
  if (!options.shared.empty())
    shared = SharedBudget::join(driver->meter(), options.shared, budget, traits.device);
  std::shared_ptr<PagePool> pool(new PagePool(std::move(driver), budgeted, std::move(shared)));
  pools.push_back(pool);
  return pool;
}

}  // namespace vtensor
