#include "bind/torch_storage.h"

#include <utility>

#include "bind/released_gil.h"

namespace vtensor::bind {

namespace {

// The tuple of get(0), get(1), ...
template <typename Get>
nb::object tuple_of(std::size_t count, Get get) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (!tuple.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* const number = PyLong_FromLongLong(get(i));
    if (number == nullptr) throw nb::python_error();
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), number);
  }
  return tuple;
}

}  // namespace

TorchStorage::Strides TorchStorage::strides_of(const Buffer& buffer) const {
  const std::size_t dims = spec_.sizes.size();
  Strides strides{std::vector<std::int64_t>(dims, 1), {}};
  for (std::size_t dim = dims - 1; dim-- > 0;) {
    strides.values[dim] =
        dim + 1 == spec_.grow_dim
            ? static_cast<std::int64_t>(buffer.range().row_bytes() / spec_.item_size)
            : strides.values[dim + 1] * spec_.sizes[dim + 1];
  }
  strides.tuple = tuple_of(dims, [&strides](std::size_t dim) { return strides.values[dim]; });
  return strides;
}

bool TorchStorage::is_set(nb::handle self, const Buffer& buffer, Interval positions) {
  const auto& [data, item_bytes, dtype, device, shape, strides] = facts_;
  if (!TorchBridge::get().read(self, facts_) || shape.size() != spec_.sizes.size()) return false;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    const std::int64_t size = spec_.size(dim, positions.size());
    // torch does not define the stride of a dimension of size 1.
    if (shape[dim] != size || (size > 1 && strides[dim] != strides_.values[dim])) return false;
  }
  return positions.empty() ||
         reinterpret_cast<Address>(data) == buffer.address_of(0, positions.begin);
}

void TorchStorage::set(nb::handle self, nb::object storage, const Buffer& buffer,
                       Interval positions, Interval indices) {
  const Address begin = buffer.range().address(0, indices.begin);
  const std::size_t offset = (buffer.address_of(0, positions.begin) - begin) / spec_.item_size;
  nb::object sizes = tuple_of(spec_.sizes.size(),
                              [&](std::size_t dim) { return spec_.size(dim, positions.size()); });
  TorchBridge::get().set(self, storage, offset, sizes, strides_.tuple);
  storage_ = std::move(storage);
  published_ = indices;
}

void TorchStorage::publish(nb::handle self, Buffer& buffer, Interval positions) {
  const Interval indices = buffer.indices_of(positions);
  if (indices.empty()) return detach(self);
  const Address begin = buffer.range().address(0, indices.begin);
  const Address end = buffer.range().address(buffer.shape().rows - 1, indices.end);
  Generation* generation = buffer.try_publish();
  if (generation == nullptr) generation = without_gil([&] { return buffer.publish(); });
  set(self, TorchBridge::get().storage_over(generation, begin, end - begin), buffer, positions,
      indices);
}

void TorchStorage::update(nb::handle self, Buffer& buffer, Interval positions) {
  const Interval indices = buffer.indices_of(positions);
  if (indices.empty() || !(indices == published_)) return publish(self, buffer, positions);
  set(self, storage_, buffer, positions, indices);
}

void TorchStorage::detach(nb::handle self) {
  nb::object storage = TorchBridge::get().empty_storage(spec_.device);
  nb::object sizes =
      tuple_of(spec_.sizes.size(), [this](std::size_t dim) { return spec_.size(dim, 0); });
  TorchBridge::get().set(self, storage, 0, sizes, strides_.tuple);
  storage_ = std::move(storage);
  published_ = {};
}

}  // namespace vtensor::bind
