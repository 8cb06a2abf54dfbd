// One operation at a time on an object: its caller, and how it gets memory.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>

#include "base/errors.h"
#include "base/process.h"
#include "bind/released_gil.h"
#include "bind/torch_bridge.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"
#include "vmm/caller.h"

namespace vtensor::bind {

// Serialises the operations on one object. It is held during calls of torch, so the mapper and
// deleters never wait for it, and threads only with the GIL released (I11).
class OperationMutex {
 public:
  // `noun`: what the object is, for messages.
  explicit OperationMutex(const char* noun) : noun_(noun) {}

  const char* noun() const { return noun_; }

  void lock(const char* operation) {
    if (is_mine()) {
      throw Error("[", operation, "] the ", noun_,
                  " is inside another operation of this thread (a finalizer ran in it): call it "
                  "later");
    }
    constexpr std::chrono::seconds bound(60);
    if (!mutex_.try_lock() && !without_gil([&] { return mutex_.try_lock_for(bound); })) {
      throw TimedOut(operation, bound,
                     text("another thread's operation on this ", noun_, " has not ended"));
    }
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  // Locks for a scope. Refused in a forked child, and beside another operation.
  std::unique_lock<OperationMutex> hold(const char* operation) {
    refuse_in_forked_child(operation);
    lock(operation);
    return {*this, std::adopt_lock};
  }

  // Locks for the end of the object: inside is at most a thread that wants its prefixes.
  void await_end() noexcept { mutex_.lock(); }
  // Whether this thread is in an operation.
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  // False if an operation is running, also in this thread.
  bool try_lock() {
    if (is_mine() || !mutex_.try_lock()) return false;
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }

  void unlock() {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  const char* const noun_;
  std::timed_mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

// The caller with its stream: the one that it named, or torch's current one. Throws InvalidArgument
// if there is no such stream.
inline Caller caller_of(const char* operation, std::optional<Stream> stream, PagePool& pool) {
  const DriverTraits& traits = pool.traits();
  if (!stream) return {operation, TorchBridge::get().current_stream(traits.device), false};
  if (traits.asynchronous) static_cast<void>(pool.driver().capturing(operation, *stream));
  return {operation, *stream, true};
}

// The result of `body`, which runs without the GIL. Frees memory for it if needed: see make_room.h.
template <typename Body>
auto with_memory(PagePool& pool, const Caller& caller, const Body& body,
                 const GiveUp& give_up = {}) {
  const auto empty_cache = [] {
    const nb::gil_scoped_acquire gil;
    return TorchBridge::get().empty_cache();
  };
  const ReleasedGil released;
  if constexpr (std::is_void_v<decltype(body())>) {
    vtensor::with_memory(pool, caller, body, empty_cache, give_up);
  } else {
    decltype(body()) result{};
    vtensor::with_memory(pool, caller, [&] { result = body(); }, empty_cache, give_up);
    return result;
  }
}

// One operation on what an object holds in a pool. `held` is null once the object is closed, and
// the operation is refused then.
class SoleOperation {
 public:
  template <typename Held>
  SoleOperation(OperationMutex& mutex, const Held& held, const char* name,
                std::optional<Stream> stream = {})
      : lock_(mutex.hold(name)),
        pool_(pool_of(mutex, held, name)),
        caller_(caller_of(name, stream, pool_)) {}
  // For a caller whose stream is known.
  template <typename Held>
  SoleOperation(OperationMutex& mutex, const Held& held, const Caller& caller)
      : lock_(mutex.hold(caller.operation)),
        pool_(pool_of(mutex, held, caller.operation)),
        caller_(caller) {}

  const Caller& caller() const { return caller_; }
  // The caller for a record of the stream, which is not named: a named one may end, and this one is
  // used again when pages go.
  Caller recorded() const { return {caller_.operation, caller_.stream}; }

  template <typename Body>
  auto with_memory(const Body& body, const GiveUp& give_up = {}) const {
    return bind::with_memory(pool_, caller_, body, give_up);
  }

 private:
  template <typename Held>
  static PagePool& pool_of(const OperationMutex& mutex, const Held& held, const char* name) {
    if (held) return *held->pool();
    throw Closed("[", name, "] the ", mutex.noun(), " is closed: make a new one");
  }

  const std::unique_lock<OperationMutex> lock_;
  PagePool& pool_;
  const Caller caller_;
};

}  // namespace vtensor::bind
