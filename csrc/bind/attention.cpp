// How attention kernels are given K and V. A kernel checks its own arguments. The checks here are
// of what only vtensor knows: which positions a VTensor or a slot of a KVCache has. Shims call this
// before every launch, so it is one call from Python.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/slot_range.h"
#include "bind/tensor_core.h"
#include "bind/torch_bridge.h"

namespace vtensor::bind {

namespace {

using Numbers = std::vector<std::int64_t>;

constexpr std::size_t kRowsRank = 4;    // [rows, positions, heads, head size], or heads first
constexpr std::size_t kPackedRank = 3;  // [positions, heads, head size]

// Whether `given` is one number for all rows: an int, or what is one to Python.
bool is_number(nb::handle given) {
  return PyLong_Check(given.ptr()) ||
         (PyIndex_Check(given.ptr()) && !TorchBridge::get().is_tensor(given));
}

// A number, or the ints in a host tensor. Nothing if only the device or the kernel understands it.
std::optional<Numbers> numbers_of(const char* operation, nb::handle given) {
  if (is_number(given)) return Numbers{integer(operation, "lengths", given)};
  if (!TorchBridge::get().is_tensor(given) || !given.attr("is_cpu").is(nb::bool_(true))) return {};
  Numbers numbers;
  nb::object list = given.attr("tolist")();
  if (!nb::try_cast(list, numbers)) return {};
  return numbers;
}

// A row, and how many of its first positions a kernel reads or writes.
using RowNeed = std::pair<std::size_t, std::int64_t>;

// What a kernel reads and writes.
struct Launch {
  const char* operation;
  bool heads_first;
  nb::handle lengths;
  std::int64_t added;  // positions that the kernel writes after the lengths
  nb::handle index;
  nb::handle rows;

  std::size_t positions_dim(std::size_t rank) const {
    return rank != kRowsRank ? 0 : heads_first ? 2 : 1;
  }
  bool takes(std::size_t rank) const {
    return rank == kRowsRank || (rank == kPackedRank && !heads_first);
  }
  std::int64_t rows_read(std::int64_t of_rows) const;
  std::optional<std::vector<RowNeed>> needs(std::int64_t of_rows, std::int64_t positions) const;
};

// How many rows the kernel reads, of `of_rows`, if neither the lengths nor the index tell; 0 if
// unknown.
std::int64_t Launch::rows_read(std::int64_t of_rows) const {
  if (rows.is_none()) return of_rows;
  if (PyLong_Check(rows.ptr())) return nb::cast<std::int64_t>(rows);
  if (dlpack::Tensor query; TorchBridge::get().borrow(rows, query))
    return query.ndim == static_cast<std::int32_t>(kRowsRank) ? query.shape[0] : 0;
  const nb::object shape = rows.attr("shape");
  return nb::len(shape) == kRowsRank ? nb::cast<std::int64_t>(shape[0]) : 0;
}

// What is needed of each row that the kernel uses; nothing if only the device knows it. The tensor
// has `of_rows` rows of `positions` positions. Throws if these are not enough, as far as the host
// knows: it may know the rows and not the lengths, or the lengths and not the rows.
std::optional<std::vector<RowNeed>> Launch::needs(std::int64_t of_rows,
                                                  std::int64_t positions) const {
  std::optional<Numbers> ends = Numbers{positions}, chosen;
  if (!lengths.is_none()) ends = numbers_of(operation, lengths);
  bool packed = false;
  if (index.is_none()) {
    const bool for_each = ends && !lengths.is_none() && !is_number(lengths);
    std::int64_t count = rows_read(of_rows);
    packed = for_each && of_rows == 1 && count <= 1;  // also the ends of packed sequences
    if (for_each) count = packed ? 1 : std::max(count, static_cast<std::int64_t>(ends->size()));
    chosen.emplace(static_cast<std::size_t>(count));
    std::iota(chosen->begin(), chosen->end(), 0);
  } else {
    chosen = numbers_of(operation, index);
  }
  if (chosen)
    for (const std::int64_t row : *chosen)
      if (row < 0 || row >= of_rows)
        refuse(operation, "row ", row, " is to be read, the cache has ", of_rows,
               " rows: name one of these");
  if (!ends || ends->empty()) return {};
  for (std::size_t i = 0; i < ends->size(); ++i) {
    const std::int64_t end = (*ends)[i];
    if (end >= 0 && end <= positions - added) continue;
    const std::string of =
        chosen && i < chosen->size() ? " of row " + std::to_string((*chosen)[i]) : "";
    refuse(operation, "the first ", end, " positions", of, " are to be read, ", added,
           " written after them, the cache holds ", positions, ": append or extend first");
  }
  if (!chosen) return {};
  if (packed) ends = Numbers{*std::max_element(ends->begin(), ends->end())};
  const bool one = ends->size() == 1;
  std::vector<RowNeed> needed;
  for (std::size_t i = 0; i < chosen->size() && (one || i < ends->size()); ++i)
    needed.emplace_back((*chosen)[i], (*ends)[one ? 0 : i] + added);
  return needed;
}

// A shape, and the dimension along which it grows.
struct Grown {
  Numbers shape;
  std::size_t grow_dim;

  std::int64_t length() const { return shape[grow_dim]; }
};

// What a VTensor or a Reader covers; empty for other objects. Throws Closed.
std::optional<Grown> grown_in(nb::handle object) {
  TorchBridge& torch = TorchBridge::get();
  if (torch.is_plain(object)) return {};
  nb::object found = nb::getattr(object, "_core", nb::none());
  if (found.is_none()) return {};
  if (TensorCore* core = nullptr; nb::try_cast(found, core)) {
    if (core->closed()) torch.detach(object);  // raises Closed
    const TensorSpec& spec = core->spec();
    Grown grown{spec.sizes, spec.grow_dim};
    grown.shape[grown.grow_dim] = static_cast<std::int64_t>(core->length());
    return grown;
  }
  // A reader, whose core knows no shape.
  const nb::object grow_dim = nb::getattr(object, "_grow_dim", nb::none());
  TensorFacts seen;
  if (grow_dim.is_none() || !torch.read(torch.detach(object), seen)) return {};
  return Grown{std::move(seen.shape), nb::cast<std::size_t>(grow_dim)};
}

// The plain view of a VTensor that the kernel gets.
nb::object view_of(const Launch& launch, nb::handle tensor, const Grown& grown) {
  TorchBridge& torch = TorchBridge::get();
  const std::size_t rank = grown.shape.size(), dim = launch.positions_dim(rank);
  nb::object view = torch.detach(tensor);
  if (rank != kRowsRank && rank != kPackedRank) return view;
  const bool transposed = rank == kRowsRank && grown.grow_dim == 3 - dim;
  if (transposed) view = view.attr("transpose")(1, 2);
  const std::int64_t holds = grown.shape[transposed ? grown.grow_dim : dim];
  const auto needed = launch.needs(rank == kRowsRank ? grown.shape[0] : 1, holds);
  if (!needed || needed->empty() || !is_number(launch.lengths)) return view;
  const std::int64_t read = needed->front().second;
  return read == holds ? view : torch.narrow(view, dim, 0, static_cast<std::size_t>(read));
}

// Rows of a tensor that are slots of a cache, or parts of slots.
struct SlotRows {
  std::size_t slots = 0;             // of the cache
  std::size_t row = 0, apart = 0;    // the first row of the range, and the distance between rows
  std::int64_t first = 0, step = 0;  // the first token of each row, and tokens between positions

  std::size_t slot(std::size_t i) const { return (row + i * apart) % slots; }
  // Tokens that a slot must have so that the first `positions` of a row exist.
  std::int64_t tokens(std::int64_t positions) const {
    return positions == 0 ? 0 : first + (positions - 1) * step + 1;
  }
};

// The SlotRange that `tensor` is over; None if it is over other memory.
nb::object range_of(nb::handle tensor) {
  try {
    return nb::getattr(TorchBridge::get().storage(tensor), SlotRange::kName, nb::none());
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return nb::none();  // torch.func's wrappers have no storage
  }
}

// `tensor` as rows along dimension 0 with positions along `positions_dim`, or as one row if that is
// 0. Nothing if it does not consist of whole tokens of rows.
std::optional<SlotRows> rows_in(const SlotRange& range, const TensorFacts& tensor,
                                std::size_t positions_dim) {
  const auto at = reinterpret_cast<Address>(tensor.data);
  if (at < range.begin) return {};  // an empty tensor, which has no address
  const auto bytes = [&](std::size_t dim) {
    return static_cast<std::size_t>(tensor.strides[dim]) * tensor.item_bytes;
  };
  const std::size_t apart = positions_dim != 0 && tensor.shape[0] > 1 ? bytes(0) : 0;
  const std::size_t step =
      tensor.shape[positions_dim] > 1 ? bytes(positions_dim) : range.item_bytes;
  if (apart % range.row_bytes != 0 || step % range.item_bytes != 0) return {};
  const std::size_t offset = at - range.begin;
  return SlotRows{range.slots, offset / range.row_bytes, apart / range.row_bytes,
                  static_cast<std::int64_t>(offset % range.row_bytes / range.item_bytes),
                  static_cast<std::int64_t>(step / range.item_bytes)};
}

// The KVCache that `tensor` is a view of a layer of, or None. Throws if a slot does not have the
// tokens, Closed if the cache is closed or gone.
nb::object cache_of(const Launch& launch, nb::handle tensor) {
  TorchBridge& torch = TorchBridge::get();
  if (!torch.is_tensor(tensor)) return nb::none();
  const nb::object found = range_of(tensor);
  if (found.is_none()) return nb::none();
  const auto& range = *nb::cast<const SlotRange*>(found);
  nb::object cache = range.cache();
  if (range.open->cache == nullptr || cache.is_none())
    throw Closed("[KVCache] the cache whose layer this is has been closed: make a new one");
  range.open->cache->buffers().range(0)->raise_if_asleep(launch.operation);
  TensorFacts seen;
  if (!torch.read(tensor, seen)) return cache;
  const std::size_t rank = seen.shape.size(), dim = launch.positions_dim(rank);
  const auto rows = launch.takes(rank) ? rows_in(range, seen, dim) : std::nullopt;
  if (!rows) {
    const bool empty = std::find(seen.shape.begin(), seen.shape.end(), 0) != seen.shape.end();
    if (empty || launch.rows_read(1) == 0) return cache;
    refuse(launch.operation, "a view of ", rank,
           " dimensions of a layer that is no rows of tokens: ",
           launch.heads_first ? "give [slots, heads, tokens, head size]"
                              : "give [slots, tokens, heads, head size], or one slot of it");
  }
  const auto needed = launch.needs(rank == kRowsRank ? seen.shape[0] : 1, seen.shape[dim]);
  if (!needed) return cache;
  range.open->read([&](const SlotCache& of) {
    for (const auto& [row, positions] : *needed) {
      const std::size_t slot = rows->slot(row);
      const std::int64_t tokens = rows->tokens(positions);
      const std::size_t band = of.buffers().group(range.group).band;
      const std::size_t has = of.is_deferred(slot) ? 0 : of.lengths().here(slot, band);
      if (tokens > static_cast<std::int64_t>(has))
        refuse(launch.operation, tokens, " tokens of slot ", slot,
               " are to be read or written, step() has made ", has,
               " ready: call step(lengths) with those that are appended first, or pass fewer");
    }
  });
  return cache;
}

nb::tuple views(const char* operation, nb::handle key, nb::handle value, bool heads_first,
                nb::handle lengths, std::int64_t added, nb::handle index, nb::handle rows) {
  const Launch launch{operation, heads_first, lengths, added, index, rows};
  const std::array<nb::handle, 2> given{key, value};
  const std::array<std::optional<Grown>, 2> grown{grown_in(key), grown_in(value)};
  if (grown[0] && grown[1] && grown[0]->length() != grown[1]->length())
    refuse(operation, "K has ", grown[0]->length(), " positions, V ", grown[1]->length(),
           ": append to both");
  std::array<nb::object, 2> taken;
  nb::object cache = nb::none();
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (grown[i]) {
      taken[i] = view_of(launch, given[i], *grown[i]);
      continue;
    }
    taken[i] = nb::borrow(given[i]);
    nb::object of = cache_of(launch, given[i]);
    if (cache.is_none()) cache = std::move(of);
  }
  return nb::make_tuple(taken[0], taken[1], cache);
}

constexpr const char* kDoc = R"(K and V as an attention kernel gets them.

Checks that VTensors and slots of a KVCache have the positions that the kernel reads and writes, as far as the host
knows them. The kernel checks all else, and all of plain tensors.

Args:
    operation: the name of the function in messages.
    key, value: ``[rows, positions, heads, head size]``, or ``[positions, heads, head size]`` for one row or packed
        sequences: VTensors and Readers, layers of a KVCache and views of them, or plain tensors. VTensors with
        positions and heads exchanged are transposed.
    heads_first: the kernel takes ``[rows, heads, positions, head size]``.
    lengths: the positions to read of each row: None for all, a number for all rows, or a tensor with one for each.
        If there is one row, a tensor may also have the ends of packed sequences. What a tensor on a device holds is
        not checked.
    added: positions that the kernel writes after these.
    index: a tensor with the rows to read. None means the first ones.
    rows: how many rows are read without an ``index``. A query of four dimensions has one sequence for each. None
        means all. 0 or another query means unknown: then only a tensor of lengths tells. 0 is for kernels that take
        the positions to read from a list, such as a table of pages.

Returns:
    K, V, and the KVCache or None. A VTensor is returned as a plain view, of ``lengths + added`` positions if
    ``lengths`` is a number. Other objects are returned unchanged.

Raises:
    InvalidArgument: if a row or position does not exist, a slot does not have the tokens, a view of a layer is not
        made of rows of tokens, or one of two VTensors is shorter. The message names it.
    Closed: if a VTensor or the KVCache is closed.)";

}  // namespace

void bind_attention(nb::module_& module) {
  module.def("attention_views", &views, "operation"_a, "key"_a.none(), "value"_a.none(),
             "heads_first"_a = false, "lengths"_a.none() = nb::none(), "added"_a = 0,
             "index"_a.none() = nb::none(), "rows"_a.none() = nb::none(), kDoc);
}

}  // namespace vtensor::bind
