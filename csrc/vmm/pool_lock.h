// The one lock of the core: a pool's. It guards page tables, generations and lists. Driver calls
// that take long are made without it.
//
// Clang's thread safety analysis, in `make check`, checks these marks:
//
//   VT_LOCKED    of a function: its callers hold the lock. A function with a PoolLock argument may
//                release the lock and take it again.
//   VT_GUARDED   of data: read and written with the lock held.
//
// The analysis sees one lock for all pools: it cannot follow the many paths to a pool's lock, and
// no operation has two pools.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define VT_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define VT_THREAD_SAFETY(attribute)
#endif
#define VT_LOCKED VT_THREAD_SAFETY(requires_capability(::vtensor::pool_lock))
#define VT_GUARDED VT_THREAD_SAFETY(guarded_by(::vtensor::pool_lock))
#define VT_TAKES_LOCK VT_THREAD_SAFETY(acquire_capability(::vtensor::pool_lock))
#define VT_LETS_LOCK_GO VT_THREAD_SAFETY(release_capability(::vtensor::pool_lock))
// For the destructor of a scope.
#define VT_END_OF_SCOPE VT_THREAD_SAFETY(release_capability())

namespace vtensor {

struct VT_THREAD_SAFETY(capability("lock")) AnyPoolLock {};
inline constexpr AnyPoolLock pool_lock;

class PoolMutex {
 public:
  PoolMutex& operator=(PoolMutex&&) = delete;

  // Wakes threads that wait for a change of what the lock guards.
  void changed() { changed_.notify_all(); }
  // How many operations make driver calls without the lock.
  std::size_t in_flight() const VT_LOCKED { return in_flight_; }

 protected:
  ~PoolMutex() = default;

  // Called when the lock was taken: carries out what threads without the lock have ended.
  virtual void drain_ended() noexcept VT_LOCKED = 0;
  // Called before the lock is released: does what other threads left to its holder. True if
  // `after_unlock` is to be called.
  virtual bool tidy() noexcept VT_LOCKED = 0;
  // Called when the lock was released: whether other threads have left something since.
  virtual bool left_over() noexcept = 0;
  virtual void after_unlock() noexcept = 0;
  // For the analysis, if `mutex_` was not locked by a PoolLock.
  void assume_locked() const VT_THREAD_SAFETY(assert_capability(::vtensor::pool_lock)) {}

  std::mutex mutex_;
  std::condition_variable changed_;

 private:
  friend class PoolLock;
  friend class Unlocked;

  std::size_t in_flight_ VT_GUARDED = 0;
};

// Holds a pool's lock, and the pool.
class VT_THREAD_SAFETY(scoped_lockable) PoolLock {
 public:
  explicit PoolLock(std::shared_ptr<PoolMutex> pool) VT_TAKES_LOCK : pool_(std::move(pool)),
                                                                     lock_(pool_->mutex_) {
    pool_->drain_ended();
  }
  // The analysis takes the lock for held: follow with `if (!lock) return`.
  PoolLock(std::shared_ptr<PoolMutex> pool, std::try_to_lock_t how) VT_TAKES_LOCK
      : pool_(std::move(pool)),
        lock_(pool_->mutex_, how) {}
  ~PoolLock() VT_END_OF_SCOPE { unlock(); }
  PoolLock& operator=(PoolLock&&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

  // Releases the lock until `change` is notified, or until `until`; does not tidy.
  void wait(std::condition_variable& change, std::chrono::steady_clock::time_point until)
      VT_LOCKED {
    change.wait_until(lock_, until);
  }

 private:
  friend class Unlocked;
  void unlock() noexcept;

  std::shared_ptr<PoolMutex> pool_;
  std::unique_lock<std::mutex> lock_;
};

// Releases the lock for a scope, for driver calls, which may take as long as the device is busy.
// Claim first what the calls change. Operations that need all driver calls to have ended, such as
// Pool.trim(), wait for the end of the scope.
class VT_THREAD_SAFETY(scoped_lockable) Unlocked {
 public:
  explicit Unlocked(PoolLock& lock) VT_LETS_LOCK_GO : lock_(lock) {
    ++lock_.pool_->in_flight_;
    lock_.unlock();
  }
  ~Unlocked() VT_END_OF_SCOPE {
    lock_.lock_.lock();
    --lock_.pool_->in_flight_;
    lock_.pool_->changed();
  }
  Unlocked& operator=(Unlocked&&) = delete;

 private:
  PoolLock& lock_;
};

inline void PoolLock::unlock() noexcept {
  if (!lock_) return;
  bool call = false;
  do {
    pool_->assume_locked();
    call |= pool_->tidy();
    lock_.unlock();
  } while (pool_->left_over() && lock_.try_lock());
  if (call) pool_->after_unlock();
}

}  // namespace vtensor
