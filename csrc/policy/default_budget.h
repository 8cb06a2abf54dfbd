// What a pool may take unless a budget is given: a part of the memory that is free, less what the
// other pools of this process may take and have not taken. Other processes are not seen.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "driver/driver.h"

namespace vtensor {

class PagePool;

// The pools of this process, locked before the lock of any pool: of two pools that are made at
// once, the later counts with the budget of the earlier.
class PoolsOfProcess {
 public:
  PoolsOfProcess();

  // In bytes, for a pool of this driver.
  std::size_t default_budget(Driver& driver) const;
  void add(const std::shared_ptr<PagePool>& pool);

 private:
  const std::unique_lock<std::mutex> lock_;
};

}  // namespace vtensor
