// What every operation on a VTensor does first, and how it obtains memory.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "bind/arguments.h"
#include "bind/released_gil.h"
#include "bind/tensor_core.h"
#include "policy/make_room.h"

namespace vtensor::bind {

// Gives the tensor the class without Python hooks for the scope of an operation, because an
// exception from outside in a hook would leave the operation half done (I17). The end of the scope
// sets the class that the tensor's state requires.
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

// One operation on one tensor, which raises what the mapper met for it.
class TensorCore::Operation {
 public:
  Operation(TensorCore& core, const char* name) : sole_(core.mutex_, core.open_, "tensor", name) {
    core.buffer_->raise_error();
  }
  // Also restores the tensor's storage and shape, and throws, if another library has changed them.
  Operation(TensorCore& core, const char* name, nb::handle self) : Operation(core, name) {
    undressed_.emplace(core, self);
    if (core.is_ours(self)) return;
    core.publish(self);
    throw Error("[" + std::string(name) +
                "] the tensor's storage or shape was changed from outside (set_, resize_, .data =, "
                "share_memory_ on a view, ...): what vtensor holds has been put back; repeat the "
                "call, and use t.alias() or t.clone() for what changes tensors in place");
  }

 private:
  const SoleOperation sole_;
  std::optional<Undressed> undressed_;  // its class is set before others may begin
};

// The caller with its stream: the one that it named, or torch's current one. Throws InvalidArgument
// if there is no such stream.
inline Caller caller_of(const char* operation, std::optional<Stream> stream, PagePool& pool) {
  const DriverTraits& traits = pool.traits();
  if (!stream) return {operation, TorchBridge::get().current_stream(traits.device), false};
  if (traits.asynchronous) pool.driver().require_own(operation, *stream);
  return {operation, *stream, true};
}

// Runs `body` without the GIL, and frees memory for it if needed. See make_room.h.
inline void with_memory(PagePool& pool, const Caller& caller, const std::function<void()>& body,
                        std::function<bool(unsigned tries)> give_up = {}) {
  const Outside outside{[](const std::function<void()>& run) {
                          const ReleasedGil released;
                          run();
                        },
                        [] { return TorchBridge::get().empty_cache(); }, std::move(give_up)};
  vtensor::with_memory(pool, caller, outside, body);
}

}  // namespace vtensor::bind
