#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>

#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/released_gil.h"
#include "bind/tensor_core.h"
#include "policy/sleep.h"

namespace vtensor::bind {

namespace {

// The result of `ask` on the core's buffer; none if the tensor is closed. Runs without the GIL, and
// keeps the buffer alive: another thread may close the tensor in the meantime.
template <typename Ask>
auto of_buffer(const char* operation, TensorCore& core, Ask ask) {
  refuse_in_forked_child(operation);
  const std::shared_ptr<Buffer> buffer = core.buffer();
  return buffer ? without_gil([&] { return ask(*buffer); }) : decltype(ask(*buffer)){};
}

std::vector<PageRecord> pages_of(TensorCore& core) {
  return of_buffer("VTensor.pages", core, [](Buffer& buffer) { return buffer.pages(); });
}

std::size_t mapped_bytes(TensorCore& core) {
  return of_buffer("VTensor.nbytes_mapped", core, [](Buffer& buffer) {
    return buffer.counts().mapped * buffer.pool()->page_size();
  });
}

}  // namespace

void bind_tensor(nb::module_& module) {
  // Now, because its constructor may release the GIL, and another thread would wait for it with the
  // GIL held.
  TorchBridge::get();

  using Record = PageRecord;
  bind_fields(
      nb::class_<Record>(module, "PageRecord", "The page behind one slot of one row of a VTensor.")
          .def("__repr__",
               [](const Record& r) {
                 return nb::str("PageRecord(row={}, index={}, page_id={}, shared={}, state={!r})")
                     .format(r.row, r.index, r.page_id, r.shared, r.state);
               }),
      VT_FIELD(Record, row), VT_FIELD(Record, index), VT_FIELD(Record, address),
      VT_FIELD(Record, page_id), VT_FIELD(Record, shared), VT_FIELD(Record, state));

  const auto tensor = "tensor"_a;
  const auto n = "n"_a.none(), capacity = "capacity"_a.none();
  const auto no_stream = "stream"_a = nb::none();
  nb::class_<TensorCore>(module, "TensorCore")
      .def(
          "__init__",
          [](TensorCore* core, const std::shared_ptr<PagePool>& pool,
             std::vector<std::int64_t> sizes, std::size_t grow_dim, std::size_t capacity,
             nb::object dtype, nb::object device, std::size_t item_size, bool zeroed,
             bool move_when_full) {
            new (core)
                TensorCore(pool, TensorSpec{std::move(sizes), grow_dim, capacity, std::move(dtype),
                                            std::move(device), item_size, zeroed, move_when_full});
          },
          "pool"_a, "sizes"_a, "grow_dim"_a, "capacity"_a, "dtype"_a, "device"_a, "item_size"_a,
          "zeroed"_a, "move_when_full"_a)
      .def("attach", &TensorCore::attach)
      .def("prepare", &TensorCore::prepare, n)
      .def("extend", &TensorCore::extend, tensor, n)
      .def("append", &TensorCore::append, tensor, "source"_a.none())
      .def("shrink", &TensorCore::shrink, tensor, n, "front"_a.none(), no_stream)
      .def("truncate", &TensorCore::truncate, tensor, "length"_a.none(), no_stream)
      .def("unshare", &TensorCore::unshare, tensor, "start"_a.none(), "stop"_a.none())
      .def("reserve", &TensorCore::reserve, tensor, capacity)
      .def("fork", &TensorCore::fork, tensor, no_stream)
      .def("reallocate", &TensorCore::reallocate, tensor, "moved"_a, capacity)
      .def("open_for_readers", &TensorCore::open_for_readers, tensor)
      .def("alias", &TensorCore::alias)
      .def("close", &TensorCore::close, tensor, no_stream)
      .def("fall_asleep", &TensorCore::fall_asleep, tensor, "sleep"_a)
      .def("wake", &TensorCore::wake, tensor)
      .def_prop_ro("asleep", &TensorCore::asleep)
      .def("record_stream", &TensorCore::record_stream)
      .def("pages", &pages_of)
      .def_prop_ro("mapped_bytes", &mapped_bytes)
      .def_prop_ro("mapped_bytes_seen",
                   [](TensorCore& core) {
                     const std::shared_ptr<Buffer> buffer = core.buffer();
                     return buffer ? buffer->range().mapped() * buffer->pool()->page_size() : 0;
                   })
      .def_prop_ro(
          "reserved_bytes",
          [](TensorCore& core) { return core.closed() ? 0 : core.buffer()->range().bytes(); })
      .def_prop_ro(
          "phase",
          [](TensorCore& core) { return core.closed() ? 0 : core.buffer()->shape().phase; })
      .def_prop_ro("address", &TensorCore::address)
      .def_prop_ro("length", &TensorCore::length)
      .def_prop_ro("capacity", [](TensorCore& core) { return core.spec().capacity; })
      .def_prop_ro("moves_when_full", [](TensorCore& core) { return core.spec().move_when_full; })
      .def_prop_ro("grow_dim", [](TensorCore& core) { return core.spec().grow_dim; })
      .def_prop_ro("dtype", [](TensorCore& core) { return core.spec().dtype; })
      .def_prop_ro("closed", &TensorCore::closed);

  module.def(
      "reindex",
      [](const std::vector<TensorCore*>& cores, const std::vector<nb::handle>& tensors,
         const std::vector<nb::handle>& indices,
         const std::vector<std::pair<nb::dict, nb::dict>>& states) {
        std::vector<TensorCore::Reindexing> all;
        for (std::size_t i = 0; i < cores.size(); ++i)
          all.push_back(
              {cores[i], tensors.at(i), integers("VTensor.reindex", "index", indices.at(i))});
        TensorCore::reindex(all, states);
      },
      "cores"_a, "tensors"_a, "indices"_a, "states"_a);

  module.def(
      "use_tensor_classes", &TensorCore::use_classes, nb::kw_only(), "open"_a, "copy_on_write"_a,
      "asleep"_a, "closed"_a,
      "Sets the classes of a VTensor: open, with shared pages at which a write faults, asleep, "
      "and closed.");
}

}  // namespace vtensor::bind
