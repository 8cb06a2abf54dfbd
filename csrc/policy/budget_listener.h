// Wakes a pool's mapper when another pool of its shared budget asks for memory. It has a thread of
// its own, because the mapper sleeps on what only this process can wake. It holds nothing of the
// pool and takes no lock of it.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "policy/mapper.h"
#include "vmm/shared_budget.h"

namespace vtensor {

class BudgetListener {
 public:
  BudgetListener() = default;
  ~BudgetListener() { stop(); }
  BudgetListener(const BudgetListener&) = delete;
  BudgetListener& operator=(const BudgetListener&) = delete;

  // `budget` outlives the listener. Throws DriverError if the system has no thread.
  void start(SharedBudget& budget, Mapper::Waker mapper);
  void stop() noexcept;

 private:
  SharedBudget* budget_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace vtensor
