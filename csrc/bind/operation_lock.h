// Serialises the operations on one tensor. It is held during calls of torch, so the mapper and
// deleters never wait for it, and threads only with the GIL released (I11).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "base/errors.h"
#include "base/process.h"
#include "bind/released_gil.h"

namespace vtensor::bind {

class OperationMutex {
 public:
  void lock(const char* operation) {
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
      throw Error("[" + std::string(operation) +
                  "] the tensor is inside another operation of this thread (a finalizer ran in "
                  "it): call it later");
    }
    if (!mutex_.try_lock()) {
      constexpr std::chrono::seconds bound(60);
      bool locked;
      {
        const ReleasedGil released;
        locked = mutex_.try_lock_for(bound);
      }
      if (!locked) {
        throw TimedOut(operation, bound, "another thread's operation on this tensor has not ended");
      }
    }
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  // False if an operation is running, also in this thread.
  bool try_lock() {
    const std::thread::id self = std::this_thread::get_id();
    if (owner_.load(std::memory_order_relaxed) == self || !mutex_.try_lock()) return false;
    owner_.store(self, std::memory_order_relaxed);
    return true;
  }

  void unlock() {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::timed_mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

// Holds the mutex for a scope. Refused in a forked child, and beside another operation.
class OperationLock {
 public:
  OperationLock(OperationMutex& mutex, const char* name) : mutex_(mutex) {
    refuse_in_forked_child(name);
    mutex.lock(name);
  }
  ~OperationLock() { mutex_.unlock(); }
  OperationLock(const OperationLock&) = delete;
  OperationLock& operator=(const OperationLock&) = delete;

 private:
  OperationMutex& mutex_;
};

// One operation on something with a mutex, refused once that is closed too: `held` is null, or
// false, then.
class SoleOperation : OperationLock {
 public:
  template <typename Held>
  SoleOperation(OperationMutex& mutex, const Held& held, const char* noun, const char* name)
      : OperationLock(mutex, name) {
    if (!held)
      throw Closed("[" + std::string(name) + "] the " + noun + " is closed: make a new one");
  }
};

}  // namespace vtensor::bind
