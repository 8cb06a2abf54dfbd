#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/released_gil.h"
#include "bind/sleep.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

// The result of `ask` on the core's buffer, or `otherwise` if the tensor is closed. Runs without
// the GIL, and keeps the buffer alive: another thread may close the tensor in the meantime.
template <typename Result, typename Ask>
Result of_buffer(const char* operation, TensorCore& core, Result otherwise, Ask ask) {
  refuse_in_forked_child(operation);
  const std::shared_ptr<Buffer> buffer = core.buffer();
  if (!buffer) return otherwise;
  const ReleasedGil released;
  return ask(*buffer);
}

std::vector<PageRecord> pages_of(TensorCore& core) {
  return of_buffer("VTensor.pages", core, std::vector<PageRecord>(),
                   [](Buffer& buffer) { return buffer.pages(); });
}

std::size_t mapped_bytes(TensorCore& core) {
  return of_buffer("VTensor.nbytes_mapped", core, std::size_t{0}, [](Buffer& buffer) {
    return buffer.mapped_pages() * buffer.pool()->page_size();
  });
}

}  // namespace

void bind_tensor(nb::module_& module) {
  // Now, because its constructor may release the GIL, and another thread would wait for it with the
  // GIL held.
  TorchBridge::get();

  nb::class_<PageRecord>(module, "PageRecord", "The page behind one slot of one row of a VTensor.")
      .def_ro("row", &PageRecord::row)
      .def_ro("index", &PageRecord::index)
      .def_ro("address", &PageRecord::address)
      .def_ro("page_id", &PageRecord::page_id)
      .def_ro("shared", &PageRecord::shared)
      .def_ro("state", &PageRecord::state)
      .def("__repr__", [](const PageRecord& record) {
        return "PageRecord(row=" + std::to_string(record.row) +
               ", index=" + std::to_string(record.index) +
               ", page_id=" + std::to_string(record.page_id) +
               ", shared=" + std::to_string(record.shared) + ", state='" + record.state + "')";
      });

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
          nb::arg("pool"), nb::arg("sizes"), nb::arg("grow_dim"), nb::arg("capacity"),
          nb::arg("dtype"), nb::arg("device"), nb::arg("item_size"), nb::arg("zeroed"),
          nb::arg("move_when_full"))
      .def("attach", &TensorCore::attach)
      .def(
          "prepare",
          [](TensorCore& core, nb::handle n) { core.prepare(integer("VTensor.prepare", "n", n)); },
          nb::arg("n").none())
      .def(
          "extend",
          [](TensorCore& core, nb::handle self, nb::handle n) {
            core.extend(self, integer("VTensor.extend", "n", n));
          },
          nb::arg("tensor"), nb::arg("n").none())
      .def("append", &TensorCore::append, nb::arg("tensor"), nb::arg("source").none())
      .def(
          "shrink",
          [](TensorCore& core, nb::handle self, nb::handle n, nb::handle front,
             std::optional<Stream> stream) {
            core.shrink(self, integer("VTensor.shrink", "n", n),
                        truth("VTensor.shrink", "front", front), stream);
          },
          nb::arg("tensor"), nb::arg("n").none(), nb::arg("front").none(),
          nb::arg("stream") = nb::none())
      .def(
          "truncate",
          [](TensorCore& core, nb::handle self, nb::handle length, std::optional<Stream> stream) {
            core.truncate(self, integer("VTensor.truncate", "length", length), stream);
          },
          nb::arg("tensor"), nb::arg("length").none(), nb::arg("stream") = nb::none())
      .def(
          "unshare",
          [](TensorCore& core, nb::handle self, nb::handle start, nb::handle stop) {
            core.unshare(self, integer("VTensor.unshare", "start", start),
                         integer("VTensor.unshare", "stop", stop));
          },
          nb::arg("tensor"), nb::arg("start").none(), nb::arg("stop").none())
      .def(
          "reindex",
          [](TensorCore& core, nb::handle self, nb::handle index) {
            TensorCore::Reindexing one{&core, self, integers("VTensor.reindex", "index", index)};
            TensorCore::reindex({&one, 1}, {});
          },
          nb::arg("tensor"), nb::arg("index").none())
      .def(
          "reserve",
          [](TensorCore& core, nb::handle self, nb::handle capacity) {
            core.reserve(self, integer("VTensor.reserve", "capacity", capacity));
          },
          nb::arg("tensor"), nb::arg("capacity").none())
      .def("fork", &TensorCore::fork, nb::arg("tensor"), nb::arg("stream") = nb::none())
      .def(
          "reallocate",
          [](TensorCore& core, nb::handle self, nb::handle moved, nb::handle capacity) {
            core.reallocate(self, moved, integer("VTensor.reallocate", "capacity", capacity));
          },
          nb::arg("tensor"), nb::arg("moved"), nb::arg("capacity").none())
      .def("alias", &TensorCore::alias)
      .def("close", &TensorCore::close, nb::arg("tensor"), nb::arg("stream") = nb::none())
      .def("fall_asleep", &TensorCore::fall_asleep, nb::arg("tensor"), nb::arg("sleep"))
      .def("wake", &TensorCore::wake, nb::arg("tensor"))
      .def_prop_ro("asleep", &TensorCore::asleep)
      .def("record_stream", &TensorCore::record_stream)
      .def("pages", &pages_of)
      .def_prop_ro("mapped_bytes", &mapped_bytes)
      .def_prop_ro("mapped_bytes_seen",
                   [](TensorCore& core) {
                     const std::shared_ptr<Buffer> buffer = core.buffer();
                     return buffer ? buffer->mapped_pages_seen() * buffer->pool()->page_size() : 0;
                   })
      .def_prop_ro(
          "reserved_bytes",
          [](TensorCore& core) { return core.closed() ? 0 : core.buffer()->range().bytes(); })
      .def_prop_ro("address", &TensorCore::address)
      .def_prop_ro("length", &TensorCore::length)
      .def_prop_ro("capacity", &TensorCore::capacity)
      .def_prop_ro("moves_when_full", [](TensorCore& core) { return core.spec().move_when_full; })
      .def_prop_ro("grow_dim", [](TensorCore& core) { return core.spec().grow_dim; })
      .def_prop_ro("dtype", [](TensorCore& core) { return core.spec().dtype; })
      .def_prop_ro("closed", &TensorCore::closed);

  module.def(
      "reindex",
      [](const std::vector<TensorCore*>& cores, const std::vector<nb::handle>& tensors,
         std::vector<std::vector<std::int64_t>> indices,
         const std::vector<std::pair<nb::dict, nb::dict>>& states) {
        std::vector<TensorCore::Reindexing> all;
        for (std::size_t i = 0; i < cores.size(); ++i)
          all.push_back({cores.at(i), tensors.at(i), std::move(indices.at(i))});
        TensorCore::reindex(all, states);
      },
      nb::arg("cores"), nb::arg("tensors"), nb::arg("indices"), nb::arg("states"));

  module.def(
      "use_tensor_classes",
      [](nb::object open, nb::object copy_on_write, nb::object asleep, nb::object closed) {
        TensorCore::use_classes(
            {std::move(open), std::move(copy_on_write), std::move(asleep), std::move(closed)});
      },
      nb::kw_only(), nb::arg("open"), nb::arg("copy_on_write"), nb::arg("asleep"),
      nb::arg("closed"),
      "Sets the classes of a VTensor: open, with shared pages at which a write faults, asleep, and "
      "closed.");

  module.def(
      "use_exchange_api", [](bool use) { TorchBridge::get().use_exchange_api(use); },
      nb::arg("use"),
      "For tests: whether to read tensors by DLPack's C exchange API. Without it, as with an older "
      "torch, they are read by Python attributes.");
}

}  // namespace vtensor::bind
