// What an attention kernel demands of its arguments, known at a glance: see vtensor/demands.py.
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bind/bindings.h"
#include "bind/slot_range.h"
#include "bind/tensor_core.h"
#include "bind/torch_face.h"

namespace vtensor::bind {
namespace {

constexpr std::int64_t kLargestHead = 256;
constexpr std::int64_t kAlignment = 16;  // bytes

struct Demands {
  std::int32_t rank;
  std::int32_t heads_dim;
  bool same_rows;    // dimension 0 is a row, and the query has one for each of the key's
  bool grouped;      // several heads of the query may share one of the key
  bool aligned;      // as FlashAttention: 16 bits, and no strides for which it would copy
  bool reads_tiles;  // whole ones, and past a length with them

  // False where something may be wrong: whoever asks then looks closer, and says what.
  bool met(nb::handle query, nb::handle key, nb::handle value) const {
    TorchFace& torch = TorchFace::get();
    dlpack::Tensor q, k, v;
    return torch.glance(query, q) && torch.glance(key, k) && torch.glance(value, v) &&
           suit(q, k, v);
  }

  nb::object plain(nb::handle query, nb::handle key, nb::handle value, nb::handle lengths,
                   nb::handle starts, nb::handle new_key, nb::handle new_value) const {
    dlpack::Tensor q, k, v;
    Told told;
    if (!look({query, key, value}, {new_key, new_value}, lengths, {&q, &k, &v}, told) ||
        !begin_within(starts, q.shape[0], told) ||
        TorchFace::get().is_plain(key) != TorchFace::get().is_plain(value))
      return nb::none();
    Side of_key = side(key, k, q, told);
    Side of_value = side(value, v, q, told);
    if (!of_key.tensor || !of_value.tensor) return nb::none();
    return nb::make_tuple(of_key.tensor, of_value.tensor,
                          of_key.cache.is_none() ? of_value.cache : of_key.cache);
  }

  nb::object room(nb::handle query, nb::handle key, nb::handle value, nb::handle lengths,
                  nb::handle new_key, nb::handle new_value) const {
    dlpack::Tensor q, k, v;
    Told told;
    if (!look({query, key, value}, {new_key, new_value}, lengths, {&q, &k, &v}, told) ||
        told.kind == Told::all || core_of(key) == nullptr || core_of(value) == nullptr)
      return nb::none();
    const std::int64_t holds = k.shape[positions_dim()];
    std::int64_t shortest = 0, longest = holds;
    if (told.kind != Told::unknown) {
      const auto [low, high] = std::minmax_element(told.positions.begin(), told.positions.end());
      shortest = *low, longest = *high;
    }
    if (shortest < 0 || longest > holds) return nb::none();
    return nb::make_tuple(holds, shortest, longest, told.added);
  }

 private:
  // How many positions the key's rows have: all there are, one number for all rows, one for each,
  // or what only the device knows; and how many are written behind them.
  struct Told {
    enum : std::uint8_t { all, alike, each, unknown } kind = all;
    std::vector<std::int64_t> positions;
    std::int64_t added = 0;
    std::int64_t numbers = 0;  // that a tensor of lengths has
  };
  struct Seen {
    dlpack::Tensor *query, *key, *value;
  };
  // Key or value as the kernel takes it, null where it may not suit; and the cache that it is of.
  struct Side {
    nb::object tensor;
    nb::object cache = nb::none();
  };

  bool suit(const dlpack::Tensor& q, const dlpack::Tensor& k, const dlpack::Tensor& v) const {
    return fit(q, k) && fit(q, v) && std::equal(k.shape, k.shape + rank - 1, v.shape) &&
           heads_fit(q, k) && k.shape[rank - 1] == q.shape[rank - 1] &&
           (!same_rows || q.shape[0] == k.shape[0]) &&
           (!aligned || (is_aligned(k) && is_aligned(v)));
  }

  bool packed() const { return rank == 3; }
  // Dimensions: heads and positions, whichever comes first, and the head size.
  std::size_t positions_dim() const { return static_cast<std::size_t>(2 * rank - 5 - heads_dim); }

  // False where something may be wrong.
  bool look(std::array<nb::handle, 3> given, std::array<nb::handle, 2> added, nb::handle lengths,
            Seen seen, Told& told) const {
    TorchFace& torch = TorchFace::get();
    const dlpack::Tensor &q = *seen.query, &k = *seen.key, &v = *seen.value;
    if (!torch.glance(given[0], *seen.query) || !torch.glance(given[1], *seen.key) ||
        !torch.glance(given[2], *seen.value) || !suit(q, k, v) ||
        (!packed() && q.shape[0] > k.shape[0]) || !look(lengths, q, told))
      return false;
    if (added[0].is_none() && added[1].is_none()) return true;
    dlpack::Tensor new_k, new_v;
    if (packed() || told.kind == Told::all || !torch.glance(added[0], new_k) ||
        !torch.glance(added[1], new_v) || !goes_behind(new_k, q, k) || !goes_behind(new_v, q, v))
      return false;
    told.added = new_k.shape[positions_dim()];
    return told.added == new_v.shape[positions_dim()];
  }
  bool goes_behind(const dlpack::Tensor& added, const dlpack::Tensor& q,
                   const dlpack::Tensor& held) const {
    return fit(q, added) && added.shape[0] == q.shape[0] &&
           added.shape[heads_dim] == held.shape[heads_dim] &&
           added.shape[rank - 1] == held.shape[rank - 1];
  }
  bool look(nb::handle lengths, const dlpack::Tensor& q, Told& told) const {
    if (lengths.is_none()) return true;
    if (PyLong_CheckExact(lengths.ptr())) {
      told = {Told::alike, {0}};
      return !packed() && nb::try_cast(lengths, told.positions[0]);
    }
    Numbers numbers;
    if (!read(lengths, numbers) || (!packed() && numbers.count != q.shape[0])) return false;
    told.numbers = numbers.count;
    if (!numbers.known) {
      told.kind = Told::unknown;
      return true;
    }
    const std::span<const std::int32_t> found = numbers.found;
    if (found.empty()) return false;
    told.kind = Told::each;
    if (!packed()) {
      told.positions.assign(found.begin(), found.end());
      return true;
    }
    // From where each sequence begins to where the last ends.
    told.positions = {found.back()};
    return found.front() >= 0 && std::is_sorted(found.begin(), found.end());
  }
  // Whether as many sequences as those of the key begin in order, and end, within `tokens`.
  static bool begin_within(nb::handle starts, std::int64_t tokens, const Told& told) {
    if (starts.is_none()) return true;
    Numbers numbers;
    if (!read(starts, numbers) || (told.kind != Told::all && numbers.count != told.numbers))
      return false;
    const std::span<const std::int32_t> found = numbers.found;
    return found.empty() || (found.front() >= 0 && found.back() <= tokens &&
                             std::is_sorted(found.begin(), found.end()));
  }
  // An int32 tensor ``[count]``, of which the host may know what is in it.
  struct Numbers {
    std::int64_t count = 0;
    bool known = false;
    std::span<const std::int32_t> found;
  };
  static bool read(nb::handle object, Numbers& numbers) {
    dlpack::Tensor seen;
    if (!TorchFace::get().glance(object, seen) || seen.ndim != 1 ||
        seen.dtype.code != dlpack::kInt || seen.dtype.bits != 32)
      return false;
    numbers.count = seen.shape[0];
    numbers.known = nb::getattr(object, "is_cpu").is(nb::bool_(true));
    if (!numbers.known || numbers.count == 0) return true;
    const char* first = static_cast<const char*>(seen.data) + seen.byte_offset;
    numbers.found = {reinterpret_cast<const std::int32_t*>(first),
                     static_cast<std::size_t>(numbers.count)};
    // Tensors without memory are for tracing.
    return seen.data != nullptr && (numbers.count == 1 || seen.strides[0] == 1);
  }

  Side side(nb::handle tensor, const dlpack::Tensor& seen, const dlpack::Tensor& q,
            const Told& told) const {
    const std::int64_t holds = seen.shape[positions_dim()];
    const auto there = [&](std::int64_t n) { return 0 <= n && n + told.added <= holds; };
    if (!std::all_of(told.positions.begin(), told.positions.end(), there)) return {};
    return TorchFace::get().is_plain(tensor) ? plain_side(tensor, seen, q, told)
                                             : grown_side(tensor, holds, told);
  }
  // Of a plain tensor, which may be of a cache's layer: what its slots have not is not to be
  // touched, nor, where a kernel reads tiles, what may lie behind.
  Side plain_side(nb::handle tensor, const dlpack::Tensor& seen, const dlpack::Tensor& q,
                  const Told& told) const {
    const nb::object mark = SlotRange::of(tensor);
    if (mark.is_none()) return {nb::borrow(tensor)};
    const auto* range = nb::cast<const SlotRange*>(mark);
    const auto rows = range->rows(seen, packed() ? 0 : positions_dim());
    if (!rows || range->closed() || reads_tiles) return {};
    if (told.kind != Told::unknown) {
      const std::int64_t whole[] = {seen.shape[positions_dim()]};
      const std::span<const std::int64_t> needed =
          told.kind == Told::all ? whole : std::span<const std::int64_t>(told.positions);
      if (!range->ready(*rows, needed, told.added,
                        packed() ? 1 : static_cast<std::size_t>(q.shape[0])))
        return {};
    }
    nb::object cache = range->cache();
    if (cache.is_none()) return {};
    return {nb::borrow(tensor), std::move(cache)};
  }
  // Null where `tensor` is no VTensor that grows along the kernel's positions.
  TensorCore* core_of(nb::handle tensor) const {
    TensorCore* core = nullptr;
    nb::object found = nb::getattr(tensor, "_core", nb::none());
    const bool suits = !found.is_none() && nb::try_cast(found, core) && !core->closed() &&
                       core->spec().grow_dim == positions_dim();
    return suits ? core : nullptr;
  }
  // Of a VTensor, which is to have grown by what is written.
  Side grown_side(nb::handle tensor, std::int64_t holds, const Told& told) const {
    if (told.added != 0 || core_of(tensor) == nullptr) return {};
    TorchFace& torch = TorchFace::get();
    nb::object view = torch.detach(tensor);
    if (told.kind != Told::alike || told.positions[0] == holds) return {std::move(view)};
    return {torch.narrow(view, positions_dim(), 0, static_cast<std::size_t>(told.positions[0]))};
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
    rank: dimensions of all three: 4, or 3 where sequences are packed.
    heads_dim: which of them are the heads, from the front: beside the head size, or before the positions.
    same_rows: dimension 0 is a row, and the query has one for each of the key's.
    grouped: the query may have a multiple of the key's heads, not only as many.
    aligned: float16 or bfloat16, of head sizes up to 256, at an address and of strides in steps of 16 bytes:
        what FlashAttention takes without a copy.
    reads_tiles: the kernel reads whole tiles, which go past the lengths that it is told.

Raises:
    InvalidArgument: another ``rank`` or ``heads_dim``.)";

constexpr const char* kPlainDoc = R"(Key and value as the kernel takes them, where all suits.

Args:
    query, key, value: VTensors that grow along the positions, plain tensors, and layers of a KVCache, of
        which the kernel touches only what its slots have.
    lengths: positions that are read and written: None for all there are; an int for all rows; int32
        ``[rows]`` of the query, which only a host tensor tells; of packed sequences, where each begins and
        the last ends.
    starts: the same of the query's packed sequences.
    new_key, new_value: what the kernel writes behind ``lengths``.

Returns:
    Plain views of VTensors, of ``lengths`` positions where that is an int; plain tensors as they are; and the
    KVCache, or None. None alone where something may not suit.)";

constexpr const char* kRoomDoc = R"(What two VTensors are to hold for a kernel that writes behind
``lengths``; these and the others as for ``plain``.

Returns:
    The positions that they hold; those of the shortest and of the longest row, as far as the host knows; and
    how many are written behind each. None where something may not suit.)";

}  // namespace

void bind_demands(nb::module_& module) {
  nb::class_<Demands>(module, "Demands", kDoc)
      .def(
          "__init__",
          [](Demands* self, std::int32_t rank, std::int32_t heads_dim, bool same_rows, bool grouped,
             bool aligned, bool reads_tiles) {
            if ((rank != 3 && rank != 4) || heads_dim < rank - 3 || heads_dim > rank - 2)
              throw InvalidArgument("[Demands] rank is " + std::to_string(rank) +
                                    ", heads_dim is " + std::to_string(heads_dim) +
                                    ": give rank 4 and 1 or 2, or rank 3 and 0 or 1");
            new (self) Demands{rank, heads_dim, same_rows, grouped, aligned, reads_tiles};
          },
          nb::arg("rank"), nb::arg("heads_dim"), nb::kw_only(), nb::arg("same_rows") = true,
          nb::arg("grouped") = true, nb::arg("aligned") = false, nb::arg("reads_tiles") = false)
      .def("met", &Demands::met, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none())
      .def("plain", &Demands::plain, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("lengths").none() = nb::none(),
           nb::arg("starts").none() = nb::none(), nb::arg("new_key").none() = nb::none(),
           nb::arg("new_value").none() = nb::none(),
           nb::sig("def plain(self, query: object | None, key: object | None, value: object | None,"
                   " lengths: object | None = None, starts: object | None = None,"
                   " new_key: object | None = None, new_value: object | None = None)"
                   " -> tuple | None"),
           kPlainDoc)
      .def("room", &Demands::room, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("lengths").none(), nb::arg("new_key").none(),
           nb::arg("new_value").none(),
           nb::sig("def room(self, query: object | None, key: object | None, value: object | None,"
                   " lengths: object | None, new_key: object | None, new_value: object | None)"
                   " -> tuple[int, int, int, int] | None"),
           kRoomDoc);
}

}  // namespace vtensor::bind
