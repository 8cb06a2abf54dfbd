// What every operation on a VTensor does first, and how it asks the core for memory.
#pragma once

#include <optional>
#include <string>

#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/released_gil.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

// For its length the tensor is of the class whose torch functions run no Python, where an exception
// from outside would find an operation half done (I17); then of the one that its state asks for.
class TensorCore::Undressed {
 public:
  Undressed(TensorCore& core, nb::handle self);
  ~Undressed();
  Undressed(const Undressed&) = delete;
  Undressed& operator=(const Undressed&) = delete;

 private:
  TensorCore& core_;
  nb::handle self_;
};

// One operation on one tensor: refused in a forked child, on a closed tensor and beside another
// operation.
class TensorCore::Operation {
 public:
  Operation(TensorCore& core, const char* name) : core_(core) {
    refuse_in_forked_child(name);
    core.mutex_.lock(name);
    if (core.closed_) {
      core.mutex_.unlock();
      throw Closed("[" + std::string(name) + "] the tensor is closed: make a new one");
    }
    try {
      core.buffer_->raise_error();
    } catch (...) {
      core.mutex_.unlock();
      throw;
    }
  }
  // Also notices where the tensor's storage or shape was changed behind our back, and puts it back.
  Operation(TensorCore& core, const char* name, nb::handle self) : Operation(core, name) {
    undressed_.emplace(core, self);
    if (core.is_ours(self)) return;
    core.publish(self);
    throw Error("[" + std::string(name) +
                "] the tensor's storage or shape was changed from outside (set_, resize_, .data =, "
                "share_memory_ on a view, ...): what vtensor holds has been put back; repeat the "
                "call, and use t.snapshot() or t.clone() for what changes tensors in place");
  }
  ~Operation() {
    undressed_.reset();
    core_.mutex_.unlock();
  }

 private:
  TensorCore& core_;
  std::optional<Undressed> undressed_;
};

// Who asks, in the stream that he named or else torch's current one. Throws InvalidArgument where
// that which he named cannot be.
inline Caller caller_of(const char* operation, std::optional<Stream> stream, PagePool& pool) {
  const DriverTraits& traits = pool.traits();
  if (!stream) return {operation, TorchFace::get().current_stream(traits.device), false};
  if (traits.asynchronous) pool.driver().require_own(operation, *stream);
  return {operation, *stream, true};
}

// Runs `body` without the GIL. Where the driver refuses, what is parked or about to be unmapped is
// given back first; where the device has no memory left, also what is ahead and what torch caches;
// and then once more. No lock that the mapper or a deleter takes is held meanwhile (I11).
template <typename Body>
void with_memory(PagePool& pool, const Caller& caller, Body body) {
  const auto attempt = [&body] {
    const ReleasedGil released;
    body();
  };
  bool asked = true;
  const auto find_memory = [&pool, &asked] {
    {
      const ReleasedGil released;
      pool.give_all_back();
    }
    if (pool.traits().asynchronous) asked = TorchFace::get().empty_cache();
  };
  try {
    return attempt();
  } catch (const UndoFailed&) {
    throw;
  } catch (const DeviceOutOfMemory&) {
    find_memory();
  } catch (const ReserveReached&) {
    find_memory();
  } catch (const DriverError&) {
    const ReleasedGil released;
    if (!pool.relieve()) throw;
  }
  try {
    attempt();
  } catch (const DeviceOutOfMemory& refusal) {
    if (!pool.traits().asynchronous) throw;
    throw OutOfPages("[" + std::string(caller.operation) + "] need a page of " +
                     std::to_string(pool.page_size()) + " bytes, the device has no memory left: " +
                     std::to_string(pool.driver().free_memory()) + " bytes free " +
                     (asked ? "after torch gave back its cache"
                            : "while torch cannot give back its cache, as during a capture") +
                     " (" + refusal.name +
                     "): free tensors, here or in other processes, or lower budget=");
  }
}

}  // namespace vtensor::bind
