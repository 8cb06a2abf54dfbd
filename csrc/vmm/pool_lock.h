// The one lock of the core: a pool's. Page tables, generations and lists stand under it; driver
// calls that take long are made without it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace vtensor {

class PoolMutex {
 public:
  PoolMutex() = default;
  PoolMutex(const PoolMutex&) = delete;
  PoolMutex& operator=(const PoolMutex&) = delete;

  // Wakes what waits for a change of what stands under the lock.
  void changed() { changed_.notify_all(); }

 protected:
  ~PoolMutex() = default;

  // Before the lock is let go: does what other threads left to its holder. True if `after_unlock`
  // is to be called.
  virtual bool tidy() noexcept = 0;
  // After it was let go: whether others have left something since.
  virtual bool left_over() noexcept = 0;
  virtual void after_unlock() noexcept = 0;
  // Operations that make driver calls without the lock. Requires it.
  std::size_t in_flight() const { return in_flight_; }

  std::mutex mutex_;
  std::condition_variable changed_;

 private:
  friend class PoolLock;
  friend class Unlocked;

  std::size_t in_flight_ = 0;
};

// Holds a pool's lock, and the pool.
class PoolLock {
 public:
  explicit PoolLock(std::shared_ptr<PoolMutex> pool)
      : pool_(std::move(pool)), lock_(pool_->mutex_) {}
  PoolLock(std::shared_ptr<PoolMutex> pool, std::try_to_lock_t how)
      : pool_(std::move(pool)), lock_(pool_->mutex_, how) {}
  ~PoolLock() { let_go(); }
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

  void let_go() noexcept;
  void take_again() { lock_.lock(); }
  // Lets it go until something changed, or `until`; does not tidy.
  void wait_changed(std::chrono::steady_clock::time_point until) {
    pool_->changed_.wait_until(lock_, until);
  }

 private:
  friend class Unlocked;
  std::shared_ptr<PoolMutex> pool_;
  std::unique_lock<std::mutex> lock_;
};

// For its length the lock is let go, for driver calls, which may take as long as the device is
// busy. Whatever needs quiet, as fork(2) does, waits for its end. What the calls change is claimed
// before.
class Unlocked {
 public:
  explicit Unlocked(PoolLock& lock) : lock_(lock) {
    ++lock_.pool_->in_flight_;
    lock_.let_go();
  }
  ~Unlocked() {
    lock_.take_again();
    --lock_.pool_->in_flight_;
    lock_.pool_->changed();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PoolLock& lock_;
};

inline void PoolLock::let_go() noexcept {
  if (!lock_) return;
  bool call = false;
  do {
    call |= pool_->tidy();
    lock_.unlock();
  } while (pool_->left_over() && lock_.try_lock());
  if (call) pool_->after_unlock();
}

}  // namespace vtensor
