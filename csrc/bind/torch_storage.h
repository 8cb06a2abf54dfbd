// What torch has of a VTensor: a storage over mapped pages, sizes and strides.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "bind/torch_bridge.h"
#include "tensor/buffer.h"

namespace vtensor::bind {

struct TensorSpec {
  std::vector<std::int64_t> sizes;  // sizes[grow_dim] is the initial length
  std::size_t grow_dim = 0;
  std::size_t capacity = 0;
  nb::object dtype;
  nb::object device;
  std::size_t item_size = 0;
  bool zeroed = false;          // positions that extend adds read as zeros
  bool move_when_full = false;  // if front shrinks used up the capacity, move instead of raising

  std::int64_t size(std::size_t dim, std::size_t length) const {
    return dim == grow_dim ? static_cast<std::int64_t>(length) : sizes[dim];
  }
};

// Methods take the VTensor, and the buffer and the positions that it is to show.
class TorchStorage {
 public:
  explicit TorchStorage(const TensorSpec& spec) : spec_(spec) {}

  // Those of a buffer's rows. Throws what Python does.
  struct Strides {
    std::vector<std::int64_t> values;
    nb::object tuple;
  };
  Strides strides_of(const Buffer& buffer) const;
  void set_strides(Strides strides) noexcept { strides_ = std::move(strides); }
  // Whether torch has what was set last.
  bool is_set(nb::handle self, const Buffer& buffer, Interval positions);
  // What the last is_set() found.
  const TensorFacts& facts() const { return facts_; }

  // Publishes a generation over the positions, and sets it as the tensor's storage.
  void publish(nb::handle self, Buffer& buffer, Interval positions);
  // The same. Keeps the present generation if that covers the positions.
  void update(nb::handle self, Buffer& buffer, Interval positions);
  // Takes the tensor off its storage, so that only views hold generations of the buffer.
  void detach(nb::handle self);

 private:
  void set(nb::handle self, nb::object storage, const Buffer& buffer, Interval positions,
           Interval indices);

  const TensorSpec& spec_;
  Strides strides_;
  nb::object storage_;
  Interval published_;  // page indices under storage_
  TensorFacts facts_;   // kept for its memory
};

}  // namespace vtensor::bind
