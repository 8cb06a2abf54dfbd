// What an attention kernel requires of its arguments. All checks and their messages are here. Shims
// call it before every launch, so it is one call from Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/attention_argument.h"
#include "bind/bindings.h"
#include "bind/slot_range.h"
#include "bind/torch_bridge.h"

namespace vtensor::bind {

namespace {

constexpr std::int64_t kLargestHead = 256;
constexpr std::int64_t kAlignment = 16;  // bytes

constexpr const char* kRows = "[batch, positions, heads, head size]";
constexpr const char* kHeads = "[batch, heads, positions, head size]";
constexpr const char* kPacked = "[tokens, heads, head size]";

// The number of positions of the rows: one number for all rows, or one for each. Empty if only the
// device knows it.
struct Lengths {
  std::vector<std::int64_t> positions;

  bool known() const { return !positions.empty(); }
  std::int64_t shortest() const { return *std::min_element(positions.begin(), positions.end()); }
  std::int64_t longest() const { return *std::max_element(positions.begin(), positions.end()); }
};

// The tensors of a launch, and which positions of them the kernel reads and writes.
struct Launch {
  Argument q, k, v;
  Argument new_k, new_v;  // None if the kernel writes nothing
  Lengths lengths = {};
  std::int64_t added = 0;             // positions that the kernel writes after the lengths
  std::int64_t sequences = kUnknown;  // of the query
  // The row of K for each of them, or the first rows. Empty if only the device knows them.
  std::optional<std::vector<std::int64_t>> rows = {};

  bool writes() const { return !new_k.object.is_none(); }
};

class AttentionSpec {
 public:
  // The fields of Options, in their order.
  template <typename... Fields>
  explicit AttentionSpec(Fields... fields) : o_{std::move(fields)...} {}

  nb::tuple take(nb::handle query, nb::handle key, nb::handle value, nb::handle lengths,
                 nb::handle index, nb::handle leftpad, nb::handle new_key,
                 nb::handle new_value) const {
    Launch t = launch(query, key, value, new_key, new_value);
    check_rows(t, lengths, index, leftpad);
    check_within(t, o_.lengths, lengths, t.added);
    return taken(t, PyLong_Check(lengths.ptr()) ? t.lengths.longest() : kUnknown);
  }

  nb::tuple take_packed(nb::handle query, nb::handle key, nb::handle value, nb::handle starts_q,
                        nb::handle starts_k, nb::handle used) const {
    Launch t = launch(query, key, value, nb::none(), nb::none(), o_.rows && starts_k.is_none());
    std::int64_t sequences = kUnknown;
    if (t.k.rank == kMostDims) {
      sequences = t.k.shape[0];
      t.lengths = lengths_of("seqused_k", used, t);
      check_within(t, "seqused_k", used, 0);
    } else if (const auto starts = starts_of("cu_seqlens_k", starts_k, t.k.shape[0])) {
      sequences = starts->count - 1;
      if (!starts->found.empty()) t.lengths.positions = {starts->found.back()};
    }
    if (const auto starts = starts_of("cu_seqlens_q", starts_q, t.q.shape[0]);
        starts && !same(starts->count - 1, sequences))
      refuse("cu_seqlens_q is of ", starts->count - 1, " sequences, there is K of ", sequences,
             ": give as many of both");
    t.sequences = t.k.rank == kMostDims ? sequences : 1;
    return taken(t);
  }

  nb::tuple take_listed(nb::handle query, nb::handle key, nb::handle value) const {
    return taken(launch(query, key, value));
  }

  std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> room(
      nb::handle query, nb::handle key, nb::handle value, nb::handle lengths, nb::handle index,
      nb::handle leftpad, nb::handle new_key, nb::handle new_value) const {
    Launch t = launch(query, key, value, new_key, new_value);
    for (const Argument* grown : {&t.k, &t.v})
      if (grown->core == nullptr ||
          !(grown->core->spec().grow_dim == 1 || grown->core->spec().grow_dim == 2))
        refuse(grown->name, " is no VTensor that grows along its positions: give ", kRows,
               " that does");
    check_rows(t, lengths, index, leftpad);
    check_within(t, o_.lengths, lengths, 0);
    const bool known = t.lengths.known();
    return {holds(t), known ? t.lengths.shortest() : 0, known ? t.lengths.longest() : holds(t),
            t.added};
  }

 private:
  struct Options {
    std::string operation, query, key, value;
    bool heads_first, packed, rows, same_rows, grouped;
    std::string lengths, package;
    nb::tuple dtypes;
    std::int64_t tile;
    bool tiles_to_the_end;
  };

  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw InvalidArgument("[", o_.operation, "] ", parts...);
  }

  std::size_t positions_dim(std::int32_t rank) const {
    return rank != kMostDims ? 0 : o_.heads_first ? 2 : 1;
  }
  std::size_t heads_dim(std::int32_t rank) const {
    return o_.heads_first ? 1 : static_cast<std::size_t>(rank - 2);
  }
  // The positions of a row of the key. The value has as many.
  std::int64_t holds(const Launch& t) const { return t.k.shape[positions_dim(t.k.rank)]; }

  // --- query, key and value

  // The tensors of a launch, after checks that they fit each other and the kernel. `rows`: the key
  // may be rows of sequences although the kernel takes packed ones.
  Launch launch(nb::handle query, nb::handle key, nb::handle value, nb::handle new_key = nb::none(),
                nb::handle new_value = nb::none(), bool rows = false) const {
    if (new_key.is_none() != new_value.is_none())
      refuse("one of k and v is None: give as many new positions of both");
    Launch t{{query, o_.query}, {key, o_.key}, {value, o_.value}, {new_key, "k"}, {new_value, "v"}};
    Argument &q = t.q, &k = t.k, &v = t.v;
    std::array<Argument*, 5> all{&q, &k, &v, &t.new_k, &t.new_v};
    const std::span<Argument*> tensors(all.data(), t.writes() ? 5 : 3);
    // All or none by DLPack, because devices and dtypes compare only within one way of reading.
    if (!std::all_of(tensors.begin(), tensors.end(), [](Argument* a) { return a->see(); }))
      for (Argument* a : tensors)
        if (!a->read(o_.heads_first ? 3 : 2))
          refuse(a->name, " is ", kind_of(a->object), ": give a strided tensor");
    for (Argument* a : {&k, &v}) {
      a->look_for_core();
      a->transpose_from(o_.heads_first ? 1 : 2);
    }
    check_ranks(t, rows);
    if (q.device != k.device || q.device != v.device)
      refuse(q.name, " is on ", q.attribute("device"), ", ", k.name, " on ", k.attribute("device"),
             ", ", v.name, " on ", v.attribute("device"), ": move them to one device");
    if (q.dtype != k.dtype || q.dtype != v.dtype)
      refuse(q.name, " is ", q.attribute("dtype"), ", ", k.name, " ", k.attribute("dtype"), ", ",
             v.name, " ", v.attribute("dtype"), ": use one dtype");
    if (!std::equal(k.shape.begin(), k.shape.begin() + k.rank - 1, v.shape.begin(), same))
      refuse(k.name, " is ", k.sizes(), ", ", v.name, " ", v.sizes(), ": append to both");
    if (k.head_size() != q.head_size())
      refuse(k.name, " has a head size of ", k.head_size(), ", ", q.name, " of ", q.head_size(),
             ": was the cache made for another model?");
    if (o_.same_rows && !o_.packed && !same(q.shape[0], k.shape[0]))
      refuse(q.name, " has ", q.shape[0], " sequences, ", k.name, " ", k.shape[0],
             " rows: give a query for each row, or the rows of K that are meant");
    check_heads(q, k);
    if (nb::len(o_.dtypes) != 0) {
      check_dtype(k);  // all have the same
      check_layout(k, /*with_size=*/true);
      check_layout(v, /*with_size=*/false);  // its head size may be larger
    }
    if (q.rank == kMostDims) t.sequences = q.shape[0];
    return t;
  }

  void check_ranks(const Launch& t, bool rows) const {
    const Argument &q = t.q, &k = t.k, &v = t.v;
    const std::int32_t rank = o_.packed && !(rows && k.rank == kMostDims) ? 3 : kMostDims;
    for (const Argument* side : {&k, &v}) {
      if (side->rank == rank) continue;
      if (o_.packed)
        refuse(side->name, " has rows that lie apart, and sequences are to be packed as ", kPacked,
               ": pass ", side->name,
               "[0] if there is one row, or use flash_attn_with_kvcache(cache_seqlens=)");
      refuse(side->name, " is ", side->sizes(), ": give ", o_.heads_first ? kHeads : kRows);
    }
    // Some kernels take packed queries with rows of K. They do not give the number of sequences.
    const bool may_be_packed = o_.packed || !o_.same_rows;
    const bool may_be_rows = !o_.packed || k.rank == kMostDims;
    if (!(q.rank == 3 && may_be_packed) && !(q.rank == kMostDims && may_be_rows))
      refuse(q.name, " is ", q.sizes(), ": give ",
             !may_be_rows     ? kPacked
             : o_.heads_first ? kHeads
                              : kRows);
    if (!o_.same_rows && !o_.packed && (k.core == nullptr) != (v.core == nullptr))
      refuse("one of ", k.name, " and ", v.name,
             " is a plain tensor: give VTensors, or views of both");
  }

  void check_heads(const Argument& q, const Argument& k) const {
    const std::int64_t heads = q.shape[heads_dim(q.rank)], of_key = k.shape[heads_dim(k.rank)];
    if (of_key == 0 || heads % of_key != 0)
      refuse(
          q.name, " has ", heads, " heads, ", k.name, " ", of_key,
          ": the first must be a multiple of the second; was the cache made for another model, or "
          "is it in another layout?");
    if (!o_.grouped && heads != of_key)
      refuse(q.name, " has ", heads, " heads, ", k.name, " ", of_key, ": pass enable_gqa=True");
  }

  void check_dtype(const Argument& t) const {
    if (t.seen && t.dtype == taken_dtype_) return;
    if (PySequence_Contains(o_.dtypes.ptr(), t.object.attr("dtype").ptr()) == 1) {
      if (t.seen) taken_dtype_ = t.dtype;
      return;
    }
    std::string takes;
    for (nb::handle dtype : o_.dtypes)
      takes += (takes.empty() ? "" : ", ") + text(dtype).substr(std::string("torch.").size());
    refuse(o_.package, " takes ", takes, ", ", t.name, " is ", t.attribute("dtype"),
           ": make the cache with one of these");
  }

  // Refuses what FlashAttention refuses, and tensors that it would copy whole at every call.
  void check_layout(const Argument& t, bool with_size) const {
    const std::int64_t size = t.head_size(), item = t.item_bytes;
    if (with_size && size > kLargestHead)
      refuse(o_.package, " takes head sizes up to ", kLargestHead, ", ", t.name, " has ", size,
             ": use SDPA");
    if (size * item % kAlignment != 0)
      refuse(o_.package, " pads a head size of ", size, " and copies all of ", t.name,
             " at every call: make the cache with a multiple of ", kAlignment / item);
    const auto last = static_cast<std::size_t>(t.rank - 1);
    if (t.strides[last] != 1)
      refuse(o_.package, " copies all of ", t.name, " at every call, because its last stride is ",
             t.strides[last], ": lay the head size out last");
    bool aligned = t.address() % kAlignment == 0;
    for (std::size_t i = 0; i < last; ++i)
      if (t.shape[i] > 1 && t.strides[i] != kUnknown)
        aligned = aligned && t.strides[i] * item % kAlignment == 0;
    if (!aligned)
      refuse(o_.package, " needs, or copies all of ", t.name,
             " for, an address and strides that are multiples of ", kAlignment,
             " bytes; its strides are ", text(listed(t.object.attr("stride")())),
             ": give each head a multiple of ", kAlignment, " bytes");
  }

  // --- lengths

  // The lengths in `given`: one for all rows, or one for each sequence of the query. If it is None,
  // all positions that there are.
  Lengths lengths_of(std::string_view name, nb::handle given, const Launch& t) const {
    if (given.is_none()) return holds(t) == kUnknown ? Lengths{} : Lengths{{holds(t)}};
    if (PyLong_Check(given.ptr())) {
      Lengths lengths{{0}};
      if (!nb::try_cast(given, lengths.positions[0])) lengths.positions[0] = -1;  // past 64 bits
      return lengths;
    }
    if (!TorchBridge::get().is_tensor(given)) {
      if (nb::isinstance(given, nb::module_::import_("torch").attr("SymInt"))) return {};
      refuse(name, " is ", kind_of(given), ": give an int or an int32 tensor");
    }
    return {one_for_each(name, given, t)};
  }

  std::vector<std::int64_t> one_for_each(std::string_view name, nb::handle given,
                                         const Launch& t) const {
    auto numbers = numbers_of(given);
    if (!numbers || !same(numbers->count, t.sequences))
      refuse(name, " is ", kind_of(given), ", ", t.q.name, " is ", t.q.sizes(),
             ": give one int32 for each sequence, in a tensor");
    return std::move(numbers->found);
  }

  // Refuses lengths that the key does not have, and lengths after which `added` more do not fit.
  void check_within(const Launch& t, std::string_view name, nb::handle given,
                    std::int64_t added) const {
    const std::int64_t has = holds(t);
    if (!t.lengths.known() || has == kUnknown) return;
    const std::int64_t low = t.lengths.shortest(), high = t.lengths.longest();
    if (low < 0 || high > has)
      refuse(name, " is ",
             PyLong_Check(given.ptr()) ? text(given) : std::to_string(high > has ? high : low),
             ", the cache holds ", has, " positions: append or extend first");
    if (high + added > has)
      refuse(name, " is ", high, " and ", added, " more are to be appended, the cache holds ", has,
             " positions: make it longer, or give a VTensor, which grows");
  }

  // Sets what the kernel reads and writes of the rows, after checks of it and of their padding.
  void check_rows(Launch& t, nb::handle lengths, nb::handle index, nb::handle leftpad) const {
    t.lengths = lengths_of(o_.lengths, lengths, t);
    check_index(t, index);
    if (!leftpad.is_none()) check_padding(t, one_for_each("cache_leftpad", leftpad, t));
    if (t.writes()) check_new(t, lengths);
  }

  void check_padding(const Launch& t, std::span<const std::int64_t> pads) const {
    const auto& ends = t.lengths.positions;
    for (std::size_t i = 0; i < pads.size(); ++i) {
      const std::int64_t end = ends.size() == pads.size() ? ends[i]
                               : ends.size() == 1         ? ends[0]
                                                          : holds(t);
      if (pads[i] < 0 || (end != kUnknown && pads[i] > end))
        refuse("cache_leftpad is ", pads[i], " of a sequence of ", end,
               " positions: give how many of them are padding");
    }
  }

  void check_index(Launch& t, nb::handle index) const {
    const std::int64_t rows = t.k.shape[0];
    if (o_.same_rows || t.sequences == kUnknown || rows == kUnknown) return;
    if (index.is_none()) {
      if (t.sequences > rows)
        refuse(t.q.name, " has ", t.sequences, " sequences, the cache ", rows,
               " rows: give a row for each, or cache_batch_idx");
      return;
    }
    auto numbers = numbers_of(index, /*wide=*/true);
    if (!numbers || !same(numbers->count, t.sequences))
      refuse("cache_batch_idx is ", kind_of(index), ", ", t.q.name, " has ", t.sequences,
             " sequences: give one row for each, in a tensor");
    for (const std::int64_t row : numbers->found)
      if (row < 0 || row >= rows)
        refuse("cache_batch_idx names row ", row, ", the cache has rows 0 to ", rows - 1,
               ": name those");
    t.rows = std::move(numbers->found);
  }

  // Where packed sequences begin and the last ends; nothing if `given` is None.
  std::optional<Numbers> starts_of(std::string_view name, nb::handle given,
                                   std::int64_t tokens) const {
    if (given.is_none()) return {};
    auto numbers = numbers_of(given);
    if (!numbers) refuse(name, " is ", kind_of(given), ": give int32 [sequences + 1]");
    const auto& found = numbers->found;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] < 0 || (tokens != kUnknown && found[i] > tokens))
        refuse(name, " goes to ", found[i], ", there are ", tokens,
               " tokens: give where each sequence begins and the last ends");
      if (i > 0 && found[i] < found[i - 1])
        refuse(name, " goes from ", found[i - 1], " back to ", found[i],
               ": give where each sequence begins and the last ends, in their order");
    }
    return numbers;
  }

  // Sets the number of positions that the kernel writes after the lengths.
  void check_new(Launch& t, nb::handle lengths) const {
    if (lengths.is_none())
      refuse("k and v without ", o_.lengths, ": give the number of positions before them");
    check_new(t, t.k, t.new_k);
    check_new(t, t.v, t.new_v);
    t.added = t.new_k.shape[1];
    if (!same(t.added, t.new_v.shape[1]))
      refuse("k is ", t.new_k.sizes(), ", v ", t.new_v.sizes(),
             ": give as many new positions of both");
  }
  void check_new(const Launch& t, const Argument& held, const Argument& added) const {
    if (added.rank != kMostDims || !same(added.shape[0], t.sequences))
      refuse("new positions are ", added.sizes(), ", ", t.q.name, " is ", t.q.sizes(), ": give ",
             kRows, " of the same batch");
    if (added.shape[2] != held.shape[2] || added.shape[3] != held.shape[3] ||
        added.dtype != held.dtype)
      refuse("new positions are ", added.sizes(), " of ", added.attribute("dtype"),
             ", the cache has ", held.shape[2], " heads of ", held.shape[3], ", ",
             held.attribute("dtype"), ": was it made for another model?");
  }

  // --- what the kernel gets

  // A view of the first `stop` positions of a VTensor; other tensors unchanged.
  nb::object view_of(const Argument& t, std::int64_t stop) const {
    if (t.core == nullptr) return nb::borrow(t.object);
    TorchBridge& torch = TorchBridge::get();
    nb::object view = torch.detach(t.object);
    if (t.transposed) view = view.attr("transpose")(1, 2);
    const std::size_t dim = positions_dim(t.rank);
    if (stop == kUnknown || stop == t.shape[dim]) return view;
    return torch.narrow(view, dim, 0, static_cast<std::size_t>(stop));
  }

  // The result of take(). If key or value is a layer of a KVCache, checks first that its slots have
  // the positions to read and write.
  nb::tuple taken(const Launch& t, std::int64_t stop = kUnknown) const {
    nb::object of_key = cache_of(t, t.k), of_value = cache_of(t, t.v);
    nb::object cache = of_key.is_none() ? of_value : of_key;
    if (o_.tile != 0 && !cache.is_none()) check_tile(t, cache);
    return nb::make_tuple(view_of(t.k, stop), view_of(t.v, stop), cache);
  }
  nb::object cache_of(const Launch& t, const Argument& of) const {
    if (of.core != nullptr || !of.seen) return nb::none();
    const nb::object mark = SlotRange::of(of.object);
    if (mark.is_none()) return nb::none();
    const auto* range = nb::cast<const SlotRange*>(mark);
    nb::object cache = range->open_cache();
    const auto rows = range->rows(*of.seen, positions_dim(of.rank));
    if (!rows) return nb::none();
    if (!t.lengths.known() || t.sequences == kUnknown || (t.rows && t.rows->empty())) return cache;
    const SlotRange::Needed needed{t.lengths.positions, t.added,
                                   t.rows ? std::span(*t.rows) : std::span<const std::int64_t>(),
                                   static_cast<std::size_t>(t.sequences)};
    if (const auto missing = range->missing(*rows, needed))
      refuse(missing->tokens, " tokens of slot ", missing->slot,
             " are to be read or written, step() has made ", missing->has,
             " ready: call step(lengths) with those that are appended first, or pass fewer");
    return cache;
  }

  // Refuses a cache of smaller tiles than the kernel's if a tile may reach past the mapped pages.
  void check_tile(const Launch& t, nb::handle cache) const {
    if (!o_.tiles_to_the_end && t.lengths.known() && t.lengths.shortest() + t.added >= holds(t))
      return;
    if (is_on_host(t.q.object)) return;  // host kernels read no tiles
    const auto tile = nb::cast<std::int64_t>(cache.attr("tile"));
    if (tile >= std::min(o_.tile, nb::cast<std::int64_t>(cache.attr("max_len")))) return;
    refuse(o_.tile, " rows are read at once, the cache maps with tile=", tile,
           ": make it with tile=", o_.tile, " or more");
  }

  const Options o_;
  mutable std::uint64_t taken_dtype_ = ~std::uint64_t{0};  // the last accepted, as DLPack's number
};

constexpr const char* kDoc =
    R"(What an attention kernel requires of its arguments.

All kernels require one device, dtype and head size, equally many positions of K and V, and lengths within them. The
options add the rest. The methods check everything and raise InvalidArgument.

In compiled code, heads and head sizes are constants of the graph. Other sizes and strides that the compiler leaves
open are not checked, nor are the contents of tensors.

Args:
    operation: the name of the function in messages.
    query, key, value: the names of the three tensors in messages.
    heads_first: they are ``[batch, heads, positions, head size]``, not ``[batch, positions, heads, head size]``.
    packed: they are ``[tokens, heads, head size]`` instead.
    rows: for a kernel of packed sequences: K may also be rows of sequences.
    same_rows: the query must have one sequence for each row of K. Otherwise K may have more rows.
    grouped: the query may have a multiple of K's heads. Otherwise it must have as many.
    lengths: the name of the lengths in messages.
    package: the name of the kernel's package in messages.
    dtypes: the dtypes that the kernel takes. If there are any, head sizes above 256, and addresses and strides that
        are no multiples of 16 bytes, are refused too: FlashAttention refuses these, or copies K and V. Empty means
        any dtype and any strides.
    tile: rows that the kernel reads at once, past the given lengths; 0 if it reads nothing past them.
    tiles_to_the_end: the kernel also reads past the end of the tensors.)";

constexpr const char* kTakeDoc = R"(Checks the arguments, and returns K and V for the kernel.

Args:
    query, key, value: plain tensors, VTensors that grow along the positions, or layers of a KVCache. VTensors with
        their positions in another dimension than the kernel's are transposed. The slots of a layer must have all
        positions that the kernel reads or writes.
    lengths: the positions to read, after which the kernel writes: None for all, an int for all rows, or int32
        ``[sequences]``. The host knows only those in a host tensor.
    index: the row of K for each sequence. None means the first rows.
    leftpad: int32 ``[sequences]``: the positions before a sequence's own.
    new_key, new_value: ``[batch, positions, heads, head size]``: what the kernel writes.

Returns:
    K, V, and the KVCache or None. A VTensor is returned as a plain view, of ``lengths`` positions if that is an int.
    A plain tensor is returned unchanged.

Raises:
    InvalidArgument: if an argument does not suit. The message names it.
    Closed: if a VTensor or the KVCache is closed.)";

constexpr const char* kTakePackedDoc = R"(As ``take``, for packed sequences.

Args:
    starts_q, starts_k: int32 ``[sequences + 1]``: where each sequence begins, and the last ends.
    used: the positions to read if K has rows, like ``lengths`` of ``take``.)";

constexpr const char* kTakeListedDoc =
    R"(As ``take``, for a kernel that takes the positions to read of K from a list, such as a table of
pages. The list is not checked.)";

constexpr const char* kRoomDoc =
    R"(Checks an append to two VTensors, and returns the lengths that it needs.

Arguments are as for ``take``.

Returns:
    The positions that the VTensors hold; those of the shortest and of the longest row, as far as the host knows; and
    the number of positions that the kernel writes after each.)";

}  // namespace

void bind_attention_spec(nb::module_& module) {
  using Text = std::string;
  const auto query = "query"_a.none(), key = "key"_a.none(), value = "value"_a.none();
  const auto optional = [](const char* name) { return nb::arg(name).none() = nb::none(); };
  const auto lengths = optional("lengths"), index = optional("index");
  const auto leftpad = optional("leftpad");
  const auto new_key = optional("new_key"), new_value = optional("new_value");
  nb::class_<AttentionSpec>(module, "AttentionSpec", kDoc)
      .def(nb::init<Text, Text, Text, Text, bool, bool, bool, bool, bool, Text, Text, nb::tuple,
                    std::int64_t, bool>(),
           "operation"_a, "query"_a, "key"_a, "value"_a, nb::kw_only(), "heads_first"_a = false,
           "packed"_a = false, "rows"_a = false, "same_rows"_a = true, "grouped"_a = true,
           "lengths"_a = "cache_seqlens", "package"_a = "", "dtypes"_a = nb::tuple(), "tile"_a = 0,
           "tiles_to_the_end"_a = false)
      .def("take", &AttentionSpec::take, query, key, value, lengths, index, leftpad, new_key,
           new_value, kTakeDoc)
      .def("take_packed", &AttentionSpec::take_packed, query, key, value, optional("starts_q"),
           optional("starts_k"), optional("used"), kTakePackedDoc)
      .def("take_listed", &AttentionSpec::take_listed, query, key, value, kTakeListedDoc)
      .def("room", &AttentionSpec::room, query, key, value, lengths, index, leftpad, new_key,
           new_value, kRoomDoc);
}

}  // namespace vtensor::bind
