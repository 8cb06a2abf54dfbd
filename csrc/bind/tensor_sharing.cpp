// The operations of a VTensor that share its pages with another, or move them to another range.
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "bind/operation.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

namespace {

std::vector<std::size_t> every_row(const RowShape& shape) {
  std::vector<std::size_t> rows(shape.rows);
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  return rows;
}

}  // namespace

// Moves the tensor to the start of a new range, which gives back capacity that front shrinks used
// up, and adds `n` positions.
void TensorCore::move_to_front(nb::handle self, const Caller& caller, std::size_t n,
                               bool populate) {
  const std::size_t length = positions_.size();
  // In a tensor made by zeros(), all new positions; otherwise what the pages hold of a parent's
  // bytes, counted from the new start.
  const std::size_t stale =
      spec_.zeroed ? length + n : stale_until_ - std::min(stale_until_, positions_.begin);
  detach(self);
  may_copy_on_write_ = true;
  std::shared_ptr<Buffer> moved;
  try {
    const RowShape shape = row_shape(spec_.capacity, phase_of_first());
    const std::vector<std::size_t> rows = every_row(shape);
    with_memory(*buffer_->pool(), caller, [&] {
      moved = buffer_->share(caller, shape, rows, !buffer_->published());
      try {
        moved->grow(caller, {0, length + n}, populate);
        moved->zero(caller, {length, std::max(length, std::min(length + n, stale))});
      } catch (...) {
        moved->abandon();
        throw;
      }
    });
  } catch (...) {
    publish(self);
    throw;
  }
  buffer_->abandon();
  use(std::move(moved));
  positions_ = {0, length + n};
  stale_until_ = stale;
  publish(self);
}

void TensorCore::unshare(nb::handle self, std::int64_t start, std::int64_t stop) {
  Operation operation(*this, "VTensor.unshare", self);
  if (start < 0 || stop < start || static_cast<std::size_t>(stop) > length()) {
    refuse("VTensor.unshare", "start, stop are " + std::to_string(start) + ", " +
                                  std::to_string(stop) + ", the length " +
                                  std::to_string(length()) + ": need 0 <= start <= stop <= length");
  }
  const Interval positions{positions_.begin + static_cast<std::size_t>(start),
                           positions_.begin + static_cast<std::size_t>(stop)};
  const Caller caller = this->caller("VTensor.unshare");
  with_memory(*buffer_->pool(), caller, [&] { buffer_->unshare(caller, positions); });
}

// The rows that `index`, of dimension 0, selects.
std::vector<std::size_t> TensorCore::chosen_rows(std::span<const std::int64_t> index) const {
  if (spec_.grow_dim == 0)
    refuse("VTensor.reindex",
           "dimension 0 is the one that grows: there are no rows to choose from");
  if (index.empty()) refuse("VTensor.reindex", "the index is empty: a tensor has at least one row");
  const std::int64_t batch = spec_.sizes[0];
  const std::size_t inner = buffer_->shape().rows / static_cast<std::size_t>(batch);
  std::vector<std::size_t> rows;
  for (std::int64_t i : index) {
    if (i < -batch || i >= batch) {
      refuse("VTensor.reindex", "index " + std::to_string(i) +
                                    " is out of range for dimension 0 of size " +
                                    std::to_string(batch) + ": give one from -size to size - 1");
    }
    if (i < 0) i += batch;
    for (std::size_t row = 0; row < inner; ++row)
      rows.push_back(static_cast<std::size_t>(i) * inner + row);
  }
  return rows;
}

void TensorCore::reindex(std::span<Reindexing> tensors,
                         std::span<const std::pair<nb::dict, nb::dict>> states) {
  // In one order, independent of the caller's, so that two threads never wait for each other.
  std::sort(tensors.begin(), tensors.end(),
            [](const Reindexing& a, const Reindexing& b) { return a.core < b.core; });
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<std::vector<std::size_t>> rows;
  bool one_pool = true;
  for (const Reindexing& tensor : tensors) {
    operations.push_back(std::make_unique<Operation>(*tensor.core, "VTensor.reindex", tensor.self));
    rows.push_back(tensor.core->chosen_rows(tensor.index));
    one_pool &= tensor.core->buffer_->pool() == tensors.front().core->buffer_->pool();
  }
  std::vector<std::shared_ptr<Buffer>> moved(tensors.size());  // null for those that stay in place
  try {
    for (const Reindexing& tensor : tensors) {
      tensor.core->detach(tensor.self);
      tensor.core->may_copy_on_write_ = true;
    }
    std::vector<Buffer::Reindexing> in_place;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorCore& core = *tensors[i].core;
      Buffer& buffer = *core.buffer_;
      const Caller caller = core.caller("VTensor.reindex");
      RowShape shape = core.row_shape(core.spec_.capacity, core.phase_of_first());
      const bool may_stay =
          one_pool && rows[i].size() == shape.rows && buffer.pool()->traits().remaps_in_one_step;
      shape.rows = rows[i].size();
      with_memory(*buffer.pool(), caller, [&] {
        if (may_stay && !buffer.published()) {
          in_place.push_back({&buffer, rows[i]});
        } else {
          moved[i] = buffer.share(caller, shape, rows[i], false);
        }
      });
    }
    if (!in_place.empty()) {
      const Caller caller = tensors.front().core->caller("VTensor.reindex");
      with_memory(*in_place.front().buffer->pool(), caller,
                  [&] { Buffer::reindex(caller, in_place); });
    }
  } catch (...) {
    for (const std::shared_ptr<Buffer>& buffer : moved) {
      if (buffer) buffer->abandon();
    }
    for (const Reindexing& tensor : tensors) tensor.core->publish(tensor.self);
    throw;
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (moved[i]) tensors[i].core->take_rows(std::move(moved[i]), tensors[i].index.size());
  }
  for (const auto& [state, changes] : states) {
    if (PyDict_Update(state.ptr(), changes.ptr()) != 0) throw nb::python_error();
  }
  for (const Reindexing& tensor : tensors) tensor.core->publish(tensor.self);
}

// Takes over a buffer with the same positions and `batch` times the inner rows.
void TensorCore::take_rows(std::shared_ptr<Buffer> rows, std::size_t batch) {
  spec_.sizes[0] = static_cast<std::int64_t>(batch);
  buffer_->abandon();
  use(std::move(rows));
  const std::size_t reached = stale_until_ - std::min(stale_until_, positions_.begin);
  positions_ = {0, length()};
  stale_until_ = spec_.zeroed ? buffer_->reach(positions_) : reached;
}

void TensorCore::reserve(nb::handle self, std::int64_t capacity) {
  Operation operation(*this, "VTensor.reserve", self);
  if (capacity < 0 || static_cast<std::size_t>(capacity) < length()) {
    throw CapacityExceeded("[VTensor.reserve] capacity of " + std::to_string(capacity) +
                           " does not hold the length of " + std::to_string(length()) +
                           ": raise it");
  }
  const std::size_t before = std::exchange(spec_.capacity, static_cast<std::size_t>(capacity));
  try {
    move_to_front(self, caller("VTensor.reserve"), 0, false);
  } catch (...) {
    spec_.capacity = before;
    throw;
  }
}

std::unique_ptr<TensorCore> TensorCore::fork(nb::handle self, std::optional<Stream> stream) {
  Operation operation(*this, "VTensor.fork", self);
  const Caller caller = this->caller("VTensor.fork", stream);
  const RowShape shape = row_shape(spec_.capacity, phase_of_first());
  const std::vector<std::size_t> rows = every_row(shape);
  may_copy_on_write_ = true;
  std::shared_ptr<Buffer> child;
  with_memory(*buffer_->pool(), caller,
              [&] { child = buffer_->share(caller, shape, rows, false); });
  return std::make_unique<TensorCore>(std::move(child), spec_, length(), true);
}

void TensorCore::reallocate(nb::handle self, nb::handle moved, std::int64_t capacity) {
  Operation operation(*this, "VTensor.reallocate", self);
  const Caller caller = this->caller("VTensor.reallocate");
  if (capacity < 0 || static_cast<std::size_t>(capacity) < length()) {
    throw CapacityExceeded("[VTensor.reallocate] capacity of " + std::to_string(capacity) +
                           " does not hold the length of " + std::to_string(length()) +
                           ": raise it");
  }
  const RowShape shape = row_shape(static_cast<std::size_t>(capacity), phase_of_first());
  const std::vector<std::size_t> rows = every_row(shape);
  TensorSpec spec = spec_;
  spec.capacity = static_cast<std::size_t>(capacity);
  {
    const ReleasedGil released;
    buffer_->use(caller);
  }
  detach(self);
  may_copy_on_write_ = true;
  try {
    std::shared_ptr<Buffer> pages;
    with_memory(*buffer_->pool(), caller,
                [&] { pages = buffer_->share(caller, shape, rows, !buffer_->published()); });
    auto core = std::make_unique<TensorCore>(std::move(pages), std::move(spec), length(),
                                             stale_until_ > positions_.end);
    core->attach(moved, length());
    nb::setattr(moved, "_core", nb::cast(std::move(core)));
  } catch (...) {
    publish(self);
    throw;
  }
  leave(self);
}

}  // namespace vtensor::bind
