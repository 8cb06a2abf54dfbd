// What an attention kernel demands of its arguments, known at a glance: see vtensor/demands.py.
#include <algorithm>
#include <cstdint>
#include <string>

#include "base/errors.h"
#include "bind/bindings.h"
#include "bind/tensor_core.h"
#include "bind/torch_face.h"

namespace vtensor::bind {
namespace {

constexpr std::int64_t kLargestHead = 256;
constexpr std::int64_t kAlignment = 16;  // bytes

struct Demands {
  std::int32_t rank;
  std::int32_t heads_dim;
  bool same_rows;  // dimension 0 is a row, and the query has one for each of the key's
  bool grouped;    // several heads of the query may share one of the key
  bool aligned;    // as FlashAttention: 16 bits, and no strides for which it would copy

  // False where something may be wrong: whoever asks then looks closer, and says what.
  bool met(nb::handle query, nb::handle key, nb::handle value) const {
    TorchFace& torch = TorchFace::get();
    dlpack::Tensor q, k, v;
    return torch.glance(query, q) && torch.glance(key, k) && torch.glance(value, v) && fit(q, k) &&
           fit(q, v) && std::equal(k.shape, k.shape + rank - 1, v.shape) && heads_fit(q, k) &&
           k.shape[rank - 1] == q.shape[rank - 1] && (!same_rows || q.shape[0] == k.shape[0]) &&
           (!aligned || (is_aligned(k) && is_aligned(v)));
  }

  nb::object views(nb::handle query, nb::handle key, nb::handle value,
                   std::int64_t positions) const {
    TensorCore* const keys = core_of(key, positions);
    TensorCore* const values = core_of(value, positions);
    if (keys == nullptr || values == nullptr) return nb::none();
    nb::object of_key = view_of(*keys, key, positions);
    nb::object of_value = view_of(*values, value, positions);
    if (!met(query, of_key, of_value)) return nb::none();
    return nb::make_tuple(of_key, of_value);
  }

 private:
  // Dimensions: heads and positions, whichever comes first, and the head size.
  std::size_t positions_dim() const { return static_cast<std::size_t>(2 * rank - 5 - heads_dim); }

  // Null where `tensor` is no VTensor that grows along the kernel's positions and has so many.
  TensorCore* core_of(nb::handle tensor, std::int64_t positions) const {
    TensorCore* core = nullptr;
    nb::object found = nb::getattr(tensor, "_core", nb::none());
    if (found.is_none() || !nb::try_cast(found, core) || core->closed()) return nullptr;
    if (core->spec().grow_dim != positions_dim() ||
        positions > static_cast<std::int64_t>(core->length()))
      return nullptr;
    return core;
  }
  nb::object view_of(const TensorCore& core, nb::handle tensor, std::int64_t positions) const {
    TorchFace& torch = TorchFace::get();
    nb::object view = torch.detach(tensor);
    if (positions < 0 || positions == static_cast<std::int64_t>(core.length())) return view;
    return torch.narrow(view, positions_dim(), 0, static_cast<std::size_t>(positions));
  }

  bool fit(const dlpack::Tensor& q, const dlpack::Tensor& other) const {
    return q.ndim == rank && other.ndim == rank && q.device.type == other.device.type &&
           q.device.index == other.device.index && q.dtype.code == other.dtype.code &&
           q.dtype.bits == other.dtype.bits;
  }
  bool heads_fit(const dlpack::Tensor& q, const dlpack::Tensor& k) const {
    const std::int64_t heads = q.shape[heads_dim], of_key = k.shape[heads_dim];
    return of_key != 0 && (grouped ? heads % of_key == 0 : heads == of_key);
  }
  bool is_aligned(const dlpack::Tensor& t) const {
    const std::int64_t item = t.dtype.bits / 8, head = t.shape[rank - 1];
    const auto at = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
    if ((t.dtype.code != dlpack::kFloat && t.dtype.code != dlpack::kBfloat) || item != 2)
      return false;
    return at % kAlignment == 0 && head <= kLargestHead && head * item % kAlignment == 0 &&
           t.strides[rank - 1] == 1 &&
           std::all_of(t.strides, t.strides + rank - 1,
                       [&](std::int64_t stride) { return stride * item % kAlignment == 0; });
  }
};

constexpr const char* kDoc =
    R"(What a kernel demands of query, key and value, for ``suit``: one device, one
dtype, one head size of query and key, as many positions of key and value, and what these say.

Args:
    rank: dimensions of all three.
    heads_dim: which of them are the heads, from the front.
    same_rows: dimension 0 is a row, and the query has one for each of the key's.
    grouped: the query may have a multiple of the key's heads, not only as many.
    aligned: float16 or bfloat16, of head sizes up to 256, at an address and of strides in steps of 16 bytes:
        what FlashAttention takes without a copy.

Raises:
    InvalidArgument: ``heads_dim`` is none of ``rank`` dimensions.)";

constexpr const char* kViewsDoc = R"(Plain views of two VTensors, where these suit.

Args:
    positions: of key and value, from the first; all where negative.

Returns:
    Of key and value; None where they may not suit, or are no VTensors that grow along the positions.)";

}  // namespace

void bind_demands(nb::module_& module) {
  nb::class_<Demands>(module, "Demands", kDoc)
      .def(
          "__init__",
          [](Demands* self, std::int32_t rank, std::int32_t heads_dim, bool same_rows, bool grouped,
             bool aligned) {
            if (heads_dim < 0 || heads_dim >= rank)
              throw InvalidArgument("[Demands] heads_dim is " + std::to_string(heads_dim) +
                                    ": give one of " + std::to_string(rank) +
                                    " dimensions, from the front");
            new (self) Demands{rank, heads_dim, same_rows, grouped, aligned};
          },
          nb::arg("rank"), nb::arg("heads_dim"), nb::kw_only(), nb::arg("same_rows") = true,
          nb::arg("grouped") = true, nb::arg("aligned") = false)
      .def("met", &Demands::met, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none())
      .def("views", &Demands::views, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("positions"),
           nb::sig("def views(self, query: object | None, key: object | None, value: object | None,"
                   " positions: int) -> tuple | None"),
           kViewsDoc);
}

}  // namespace vtensor::bind
