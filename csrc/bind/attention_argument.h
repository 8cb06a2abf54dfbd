// Tensors that an attention kernel is given, seen once.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind/dlpack_abi.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

namespace nb = nanobind;

constexpr std::int32_t kMostDims = 4;
constexpr std::int64_t kUnknown = -1;  // a size or stride that a compiler leaves open

inline bool same(std::int64_t a, std::int64_t b) {
  return a == kUnknown || b == kUnknown || a == b;
}

// For messages: str(), and what kind of tensor or object it is.
std::string text(nb::handle object);
nb::object listed(nb::handle sequence);
std::string kind_of(nb::handle object);

bool is_on_host(nb::handle tensor);

// As the kernel will see it: of a VTensor, with its positions where the kernel has them.
struct Argument {
  nb::handle object;
  std::string_view name = {};
  TensorCore* core = nullptr;  // of a VTensor
  bool transposed = false;
  std::int32_t rank = 0;
  std::array<std::int64_t, kMostDims> shape{}, strides{};  // of tensors of no more dimensions
  std::uint64_t device = 0, dtype = 0;                     // to compare by
  std::int64_t item_bytes = 0;
  std::optional<dlpack::Tensor> seen = {};

  // False where DLPack cannot describe it, as tensors of a compiler, whose sizes may be symbols.
  bool see();
  // By its attributes instead; false where it is no strided tensor. A compiler is to bind the graph
  // to the head size and, `heads` dimensions from the end, the heads, if that is not 0.
  bool read(std::int32_t heads);
  // Finds `core`. Raises Closed.
  void look_for_core();
  // Of a VTensor that grows along dimension `dim` of four: exchanges 1 and 2.
  void transpose_from(std::size_t dim);

  std::int64_t head_size() const { return shape[static_cast<std::size_t>(rank - 1)]; }
  Address address() const {
    return seen ? reinterpret_cast<Address>(seen->data) + seen->byte_offset : 0;
  }
  std::string sizes() const;
  std::string attribute(const char* of) const { return text(object.attr(of)); }
};

// An int32 tensor ``[count]``, or int64 if that is `wide`; `found` is empty where only the device
// knows what is in it. Nothing where `object` is none.
struct Numbers {
  std::int64_t count = 0;
  std::vector<std::int64_t> found = {};
};
std::optional<Numbers> numbers_of(nb::handle object, bool wide = false);

}  // namespace vtensor::bind
