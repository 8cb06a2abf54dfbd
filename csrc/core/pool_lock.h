// The one lock of the core: a pool's. Page tables, generations and lists stand under it; driver
// calls that take long are made without it.
#pragma once

#include <memory>
#include <mutex>

namespace vtensor {

class PagePool;

// Holds a pool's lock, and the pool. Generations that end meanwhile are reaped before it lets go.
class PoolLock {
 public:
  explicit PoolLock(const std::shared_ptr<PagePool>& pool);
  PoolLock(const std::shared_ptr<PagePool>& pool, std::try_to_lock_t how);
  ~PoolLock() { let_go(); }
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

  void let_go() noexcept;
  void take_again() { lock_.lock(); }

 private:
  friend class PagePool;
  friend class Unlocked;
  std::shared_ptr<PagePool> pool_;
  std::unique_lock<std::mutex> lock_;
};

// For its length the lock is let go, for driver calls, which may take as long as the device is
// busy. Whatever needs quiet, as fork(2) does, waits for its end. What the calls change is claimed
// before.
class Unlocked {
 public:
  explicit Unlocked(PoolLock& lock);
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PoolLock& lock_;
};

}  // namespace vtensor
