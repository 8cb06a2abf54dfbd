// The tensors that an attention kernel gets, each read once.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind/arguments.h"
#include "bind/dlpack_abi.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

namespace nb = nanobind;

constexpr std::int32_t kMostDims = 4;
constexpr std::int64_t kUnknown = -1;  // a size or stride that a compiler leaves open

inline bool same(std::int64_t a, std::int64_t b) {
  return a == kUnknown || b == kUnknown || a == b;
}

nb::object listed(nb::handle sequence);
// For messages: the type of an object, or the shape and dtype of a tensor.
std::string kind_of(nb::handle object);

bool is_on_host(nb::handle tensor);

// A tensor as the kernel will get it. A VTensor's positions are in the kernel's dimension.
struct Argument {
  nb::handle object;
  std::string_view name = {};
  TensorCore* core = nullptr;  // null unless it is a VTensor
  bool transposed = false;
  std::int32_t rank = 0;
  std::array<std::int64_t, kMostDims> shape{}, strides{};  // of the first dimensions
  std::uint64_t device = 0, dtype = 0;                     // only for comparisons
  std::int64_t item_bytes = 0;
  std::optional<dlpack::Tensor> seen = {};

  // Reads it by DLPack. False if DLPack cannot describe it, such as a compiler's tensor with
  // symbolic sizes.
  bool see();
  // Reads it by its attributes. False if it is no strided tensor. If `heads` is not 0, makes a
  // compiler bind the graph to the head size, and to the size `heads` dimensions from the end.
  bool read(std::int32_t heads);
  // Sets `core` if it is a VTensor. Throws Closed.
  void look_for_core();
  // Exchanges dimensions 1 and 2 if it is a VTensor of four dimensions that grows along `dim`.
  void transpose_from(std::size_t dim);

  std::int64_t head_size() const { return shape[static_cast<std::size_t>(rank - 1)]; }
  Address address() const {
    return seen ? reinterpret_cast<Address>(seen->data) + seen->byte_offset : 0;
  }
  std::string sizes() const;
  std::string attribute(const char* of) const { return text(object.attr(of)); }
};

// An int32 tensor ``[count]``, or also int64 if `wide`. `found` is empty if only the device knows
// the contents. Nothing if `object` is no such tensor.
struct Numbers {
  std::int64_t count = 0;
  std::vector<std::int64_t> found = {};
};
std::optional<Numbers> numbers_of(nb::handle object, bool wide = false);

}  // namespace vtensor::bind
