// TensorCore: what torch has of a VTensor: a storage over mapped pages, sizes and strides.

#include <utility>

#include "bind/released_gil.h"
#include "bind/tensor_core.h"
#include "bind/torch_bridge.h"

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

TensorCore::Strides TensorCore::strides_of(const Buffer& buffer) const {
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

bool TensorCore::is_set(nb::handle self) {
  const auto& [data, item_bytes, dtype, device, shape, strides] = facts_;
  if (!TorchBridge::get().read(self, facts_) || shape.size() != spec_.sizes.size()) return false;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    const std::int64_t size = spec_.size(dim, positions_.size());
    // torch does not define the stride of a dimension of size 1.
    if (shape[dim] != size || (size > 1 && strides[dim] != strides_.values[dim])) return false;
  }
  return positions_.empty() ||
         reinterpret_cast<Address>(data) == buffer_->address_of(0, positions_.begin);
}

// Sets a storage over the pages of `indices`, and the sizes for `length` positions.
void TensorCore::set(nb::handle self, nb::object storage, Interval indices, std::size_t length) {
  std::size_t offset = 0;
  if (!indices.empty()) {
    const Address begin = buffer_->range().address(0, indices.begin);
    offset = (buffer_->address_of(0, positions_.begin) - begin) / spec_.item_size;
  }
  nb::object sizes =
      tuple_of(spec_.sizes.size(), [&](std::size_t dim) { return spec_.size(dim, length); });
  TorchBridge::get().set(self, storage, offset, sizes, strides_.tuple);
  storage_ = std::move(storage);
  published_ = indices;
}

void TensorCore::publish(nb::handle self) {
  const Interval indices = buffer_->indices_of(positions_);
  if (indices.empty()) return detach(self);
  const Address begin = buffer_->range().address(0, indices.begin);
  const Address end = buffer_->range().address(buffer_->shape().rows - 1, indices.end);
  Generation* generation = buffer_->try_publish(indices);
  if (generation == nullptr) generation = without_gil([&] { return buffer_->publish(indices); });
  nb::object storage = TorchBridge::get().storage_over(generation, begin, end - begin);
  set(self, std::move(storage), indices, length());
}

void TensorCore::update(nb::handle self) {
  const Interval indices = buffer_->indices_of(positions_);
  if (indices.empty() || !(indices == published_)) return publish(self);
  set(self, storage_, indices, length());
}

void TensorCore::detach(nb::handle self) {
  set(self, TorchBridge::get().empty_storage(spec_.device), {}, 0);
}

}  // namespace vtensor::bind
