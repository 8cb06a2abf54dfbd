#include "bind/tensor_core.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/process.h"
#include "base/trace.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/sleep.h"

namespace vtensor::bind {

namespace {

TensorClasses& classes = *new TensorClasses;  // never destroyed: the interpreter may end first

// Above this, torch's parallel copy is faster than one memcpy a row.
constexpr std::size_t kMemcpyLimit = std::size_t{256} << 10;

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

std::size_t product(std::span<const std::int64_t> sizes) {
  std::size_t result = 1;
  for (const std::int64_t size : sizes) {
    const auto next = checked_multiply(result, static_cast<std::size_t>(size));
    if (!next)
      throw CapacityExceeded("[empty] sizes " + shape_text(sizes) + " overflow: lower them");
    result = *next;
  }
  return result;
}

}  // namespace

void TensorCore::use_classes(TensorClasses named) { classes = std::move(named); }

TensorCore::TensorCore(const std::shared_ptr<PagePool>& pool, TensorSpec spec)
    : spec_(std::move(spec)) {
  for (std::size_t i = 0; i < spec_.sizes.size(); ++i) {
    if (spec_.sizes[i] < (i == spec_.grow_dim ? 0 : 1)) {
      throw InvalidArgument(
          "[empty] sizes " + shape_text(spec_.sizes) +
          " cannot be: give at least 1 everywhere, and at least 0 along grow_dim");
    }
  }
  if (static_cast<std::size_t>(spec_.sizes[spec_.grow_dim]) > spec_.capacity) {
    throw CapacityExceeded("[empty] length of " + std::to_string(spec_.sizes[spec_.grow_dim]) +
                           " passes capacity of " + std::to_string(spec_.capacity) +
                           ": raise capacity=");
  }
  refuse_in_forked_child("empty");
  const RowShape shape = row_shape(spec_.capacity, 0);
  const Caller caller{"empty", TorchBridge::get().current_stream(pool->traits().device)};
  std::shared_ptr<Buffer> buffer;
  with_memory(*pool, caller, [&] { buffer = Buffer::create(pool, shape, caller); });
  use(std::move(buffer));
}

TensorCore::TensorCore(std::shared_ptr<Buffer> buffer, TensorSpec spec, std::size_t length,
                       bool unclean)
    : spec_(std::move(spec)), positions_{0, length} {
  if (unclean || spec_.zeroed) stale_until_ = buffer->reach(positions_);
  use(std::move(buffer));
  may_copy_on_write_ = true;
}

TensorCore::~TensorCore() {
  if (open_) buffer_->abandon();
}

Caller TensorCore::caller(const char* operation, std::optional<Stream> stream) const {
  return caller_of(operation, stream, *buffer_->pool());
}

RowShape TensorCore::row_shape(std::size_t capacity, std::size_t phase) const {
  const std::span<const std::int64_t> sizes(spec_.sizes);
  const auto item = checked_multiply(product(sizes.subspan(spec_.grow_dim + 1)), spec_.item_size);
  if (!item) throw CapacityExceeded("[empty] sizes " + shape_text(sizes) + " overflow: lower them");
  return {product(sizes.first(spec_.grow_dim)), *item, capacity, phase, spec_.zeroed};
}

std::size_t TensorCore::phase_of_first() const {
  const RowShape& shape = buffer_->shape();
  return (shape.phase + positions_.begin * shape.item_bytes) % buffer_->pool()->page_size();
}

// A span for `n` positions of every row. Its address is that of position `first` of row 0.
trace::Span TensorCore::traced(trace::What what, std::size_t first, std::size_t n) const {
  const RowShape& shape = buffer_->shape();
  return {what, buffer_->address_of(0, first), n * shape.rows * shape.item_bytes,
          buffer_->range().base()};
}

// Takes over a buffer, and computes the strides from its rows.
void TensorCore::use(std::shared_ptr<Buffer> buffer) {
  buffer_ = std::move(buffer);
  const std::size_t dims = spec_.sizes.size();
  stride_values_.assign(dims, 1);
  for (std::size_t dim = dims; dim-- > 0;) {
    if (dim + 1 == spec_.grow_dim) {
      stride_values_[dim] =
          static_cast<std::int64_t>(buffer_->range().row_bytes() / spec_.item_size);
    } else if (dim + 1 < dims) {
      stride_values_[dim] = stride_values_[dim + 1] * spec_.sizes[dim + 1];
    }
  }
  nb::object strides = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(dims)));
  for (std::size_t dim = 0; dim < dims; ++dim) {
    PyTuple_SetItem(strides.ptr(), static_cast<Py_ssize_t>(dim),
                    PyLong_FromLongLong(stride_values_[dim]));
  }
  strides_ = std::move(strides);
}

nb::object TensorCore::sizes(std::size_t length) const {
  nb::object sizes = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(spec_.sizes.size())));
  if (!sizes.is_valid()) throw nb::python_error();
  for (std::size_t dim = 0; dim < spec_.sizes.size(); ++dim) {
    const auto size = dim == spec_.grow_dim ? static_cast<std::int64_t>(length) : spec_.sizes[dim];
    PyTuple_SetItem(sizes.ptr(), static_cast<Py_ssize_t>(dim), PyLong_FromLongLong(size));
  }
  return sizes;
}

bool TensorCore::is_ours(nb::handle self) {
  if (!TorchBridge::get().read(self, facts_) || facts_.shape.size() != spec_.sizes.size())
    return false;
  for (std::size_t dim = 0; dim < facts_.shape.size(); ++dim) {
    const auto size =
        dim == spec_.grow_dim ? static_cast<std::int64_t>(length()) : spec_.sizes[dim];
    // torch does not define the stride of a dimension of size 1.
    if (facts_.shape[dim] != size || (size > 1 && facts_.strides[dim] != stride_values_[dim]))
      return false;
  }
  return length() == 0 || reinterpret_cast<Address>(facts_.data) == address();
}

// Publishes a new generation and sets it as the tensor's storage.
void TensorCore::publish(nb::handle self) {
  const Interval slots = buffer_->indices_of(positions_);
  if (slots.empty()) {
    detach(self);
    return;
  }
  const Address first = buffer_->range().address(0, slots.begin);
  const Address end = buffer_->range().address(buffer_->shape().rows - 1, slots.end);
  Generation* generation = buffer_->try_publish();
  if (generation == nullptr) {
    const ReleasedGil released;
    generation = buffer_->publish();
  }
  TorchBridge& torch = TorchBridge::get();
  nb::object storage =
      torch.storage_over(generation, first, end - first, buffer_->pool()->traits().device);
  torch.set(self, storage, (address() - first) / spec_.item_size, sizes(length()), strides_);
  storage_ = std::move(storage);
  published_ = slots;
}

// Sets a new length or first element in torch, within the present generation if that covers it.
void TensorCore::reshape(nb::handle self) {
  const Interval slots = buffer_->indices_of(positions_);
  if (slots.empty() || !(slots == published_)) {
    publish(self);
    return;
  }
  const Address first = buffer_->range().address(0, slots.begin);
  TorchBridge::get().set(self, storage_, (address() - first) / spec_.item_size, sizes(length()),
                         strides_);
}

// Takes the tensor off its storage, so that only views hold generations of the buffer.
void TensorCore::detach(nb::handle self) {
  TorchBridge& torch = TorchBridge::get();
  nb::object storage = torch.empty_storage(spec_.device);
  torch.set(self, storage, 0, sizes(0), strides_);
  storage_ = std::move(storage);
  published_ = {};
}

TensorCore::Undressed::Undressed(TensorCore& core, nb::handle self) : core_(core), self_(self) {
  if (self.type().is(classes.copy_on_write)) nb::setattr(self, "__class__", classes.open);
}

TensorCore::Undressed::~Undressed() { core_.dress(self_); }

void TensorCore::dress(nb::handle self) noexcept {
  if (!open_ || buffer_->pool()->traits().kernel_copies_on_write) may_copy_on_write_ = false;
  if (may_copy_on_write_) {
    const ReleasedGil released;
    may_copy_on_write_ = buffer_->copy_on_write();
  }
  const nb::handle wanted = !open_                        ? classes.closed
                            : buffer_->asleep.load() != 0 ? classes.asleep
                            : may_copy_on_write_          ? classes.copy_on_write
                                                          : classes.open;
  if (self.type().is(wanted)) return;
  if (PyObject_SetAttrString(self.ptr(), "__class__", wanted.ptr()) != 0) PyErr_Clear();
}

void TensorCore::fall_asleep(nb::handle self, SleepCore& sleep) {
  if (!open_ || asleep()) return;
  const Operation operation(*this, "Pool.sleep", self);
  sleep.add(buffer_);
}

void TensorCore::wake(nb::handle self) {
  const SoleOperation operation(mutex_, open_, "tensor", "Pool.wake");
  dress(self);
}

void TensorCore::attach(nb::handle self, std::size_t length) {
  Operation operation(*this, "empty");
  const Undressed undressed(*this, self);
  const Caller caller = this->caller("empty");
  if (positions_.empty() && length != 0) {
    detach(self);
    grow(self, caller, length, false, [](std::size_t) {});
  } else {
    publish(self);
  }
}

void TensorCore::require_room(const char* operation, std::size_t n) const {
  const std::size_t used_up = spec_.move_when_full ? 0 : positions_.begin;
  const std::size_t room = spec_.capacity - used_up - length();
  if (n <= room) return;
  throw CapacityExceeded(
      "[" + std::string(operation) + "] need " + std::to_string(n) + " more positions, length is " +
      std::to_string(length()) + " of capacity " + std::to_string(spec_.capacity) +
      (used_up
           ? ", " + std::to_string(used_up) +
                 " used up by front shrinks: make it with when_full=\"move\", which gives them back"
           : ": make it with a larger capacity=") +
      ", or move it with t.reallocate(capacity)");
}

// The part of the `added` positions to zero: in a forked tensor, what its parent had truncated; in
// one made by zeros(), also what the tensor itself had there.
Interval TensorCore::stale_in(Interval added) const {
  if (buffer_->pool()->zero_policy() == ZeroPolicy::never) return spec_.zeroed ? added : Interval{};
  return intersection(added, {0, stale_until_});
}

// Adds `n` positions, or changes nothing. `fill(start)` writes them before torch sees them.
template <typename Fill>
void TensorCore::grow(nb::handle self, const Caller& caller, std::size_t n, bool populate,
                      Fill fill) {
  require_room(caller.operation, n);
  if (n == 0) return;
  const trace::Span span = traced(trace::What::extend, positions_.end, n);
  if (positions_.end + n > spec_.capacity) {
    move_to_front(self, caller, n, populate);
    fill(positions_.end - n);
    return;
  }
  const Interval before = positions_;
  const Interval after{before.begin, before.end + n};
  const Interval stale = stale_in({before.end, after.end});
  const bool within = stale.empty() && buffer_->grow_within(caller, after);
  if (!within) {
    with_memory(*buffer_->pool(), caller, [&] { buffer_->grow(caller, after, populate, stale); });
  }
  positions_ = after;
  try {
    fill(before.end);
    reshape(self);
  } catch (...) {
    positions_ = before;
    retract(caller);
    throw;
  }
  if (spec_.zeroed) stale_until_ = std::max(stale_until_, after.end);
}

void TensorCore::prepare(std::int64_t n) {
  Operation operation(*this, "VTensor.prepare");
  if (n < 0) refuse("VTensor.prepare", "n is " + std::to_string(n) + ": give at least 0");
  require_room("VTensor.prepare", static_cast<std::size_t>(n));
  const std::size_t end = positions_.end + static_cast<std::size_t>(n);
  if (end > spec_.capacity)
    return;  // the tensor will move, and no page of its new range exists yet
  const ReleasedGil released;
  buffer_->prepare(end);
}

void TensorCore::extend(nb::handle self, std::int64_t n) {
  Operation operation(*this, "VTensor.extend", self);
  if (n < 0)
    refuse("VTensor.extend",
           "n is " + std::to_string(n) + ": it must be at least 0; t.shrink(n) makes it shorter");
  grow(self, caller("VTensor.extend"), static_cast<std::size_t>(n), false, [](std::size_t) {});
}

// Copies `n` positions to `start` by memcpy. False if the source's layout or size requires torch's
// copy.
bool TensorCore::fill_from(const TensorFacts& source, std::size_t start, std::size_t n) {
  const RowShape& shape = buffer_->shape();
  const std::size_t bytes = n * shape.item_bytes;
  if (!source.data || source.device.type != 1 || buffer_->pool()->traits().device.type != 1 ||
      shape.rows * bytes > kMemcpyLimit) {
    return false;
  }
  std::int64_t dense = 1;
  for (std::size_t dim = source.shape.size(); dim-- > spec_.grow_dim;) {
    if (source.shape[dim] != 1 && source.strides[dim] != dense) return false;
    dense *= source.shape[dim];
  }
  for (std::size_t row = 0; row < shape.rows; ++row) {
    std::int64_t offset = 0;
    std::size_t rest = row;
    for (std::size_t dim = spec_.grow_dim; dim-- > 0;) {
      const auto size = static_cast<std::size_t>(source.shape[dim]);
      offset += static_cast<std::int64_t>(rest % size) * source.strides[dim];
      rest /= size;
    }
    std::memmove(
        reinterpret_cast<void*>(buffer_->address_of(row, start)),
        static_cast<const char*>(source.data) + offset * static_cast<std::int64_t>(spec_.item_size),
        bytes);
  }
  return true;
}

void TensorCore::append(nb::handle self, nb::handle source) {
  TorchBridge& torch = TorchBridge::get();
  Operation operation(*this, "VTensor.append", self);
  const Caller caller = this->caller("VTensor.append");
  if (!torch.is_tensor(source))
    refuse("VTensor.append", "need a torch.Tensor: torch.as_tensor(x) makes one");
  nb::object dtype = nb::getattr(source, "dtype");
  if (!dtype.is(spec_.dtype)) {
    refuse("VTensor.append", "the tensor holds " + std::string(nb::str(spec_.dtype).c_str()) +
                                 ", the source " + nb::str(dtype).c_str() +
                                 ": convert it with x.to(t.dtype)");
  }
  TensorFacts from;
  if (!torch.read(source, from))
    refuse("VTensor.append", "the source is not strided: make it dense with x.to_dense()");
  bool fits = from.shape.size() == spec_.sizes.size();
  for (std::size_t dim = 0; fits && dim < from.shape.size(); ++dim) {
    fits = dim == spec_.grow_dim || from.shape[dim] == spec_.sizes[dim];
  }
  if (!fits) {
    refuse("VTensor.append", "the source has shape " + shape_text(from.shape) + ", the tensor " +
                                 shape_text(facts_.shape) + ": all but dimension " +
                                 std::to_string(spec_.grow_dim) + " must agree");
  }
  const Device device = buffer_->pool()->traits().device;
  if (from.device.type != device.type || from.device.index != device.index) {
    refuse("VTensor.append",
           "the tensor is on " + std::string(nb::str(spec_.device).c_str()) + ", the source on " +
               nb::str(nb::getattr(source, "device")).c_str() + ": move it with x.to(t.device)");
  }
  nb::object kept = nb::borrow(source);
  if (nb::getattr(source, "requires_grad").is(nb::bool_(true))) {
    if (torch.gradients_enabled()) {
      refuse("VTensor.append",
             "the source requires grad, and a VTensor keeps no graph: append(x.detach()), or work "
             "under torch.no_grad()");
    }
    kept = torch.detach(source);
  }
  const bool resolved =
      torch.is_plain(source) && !torch.is_negative(source) && !torch.is_conjugate(source);
  const auto n = static_cast<std::size_t>(from.shape[spec_.grow_dim]);
  const auto source_at = reinterpret_cast<Address>(from.data);
  if (source_at - buffer_->range().base() < buffer_->range().bytes()) {
    kept = nb::borrow(kept).attr("clone")();  // the new positions may overlap it
    if (!torch.read(kept, from)) refuse("VTensor.append", "the source cannot be read");
  }
  const std::size_t before = length();
  bool copied = n == 0;
  grow(self, caller, n, true,
       [&](std::size_t start) { copied = resolved && fill_from(from, start, n); });
  if (copied) return;
  try {
    torch.copy_into(self, spec_.grow_dim, before, n, kept);
  } catch (...) {
    positions_.end -= n;
    retract(caller);
    reshape(self);
    throw;
  }
}

void TensorCore::shrink(nb::handle self, std::int64_t n, bool front, std::optional<Stream> stream) {
  Operation operation(*this, "VTensor.shrink", self);
  if (n < 0 || static_cast<std::size_t>(n) > length()) {
    refuse("VTensor.shrink", "n is " + std::to_string(n) + ", the length " +
                                 std::to_string(length()) +
                                 ": it must lie between 0 and the length");
  }
  drop_positions(self, caller("VTensor.shrink", stream), n, front);
}

void TensorCore::truncate(nb::handle self, std::int64_t length, std::optional<Stream> stream) {
  Operation operation(*this, "VTensor.truncate", self);
  const auto now = static_cast<std::int64_t>(this->length());
  if (length < 0 || length > now) {
    refuse("VTensor.truncate", "length is " + std::to_string(length) + ", the tensor's " +
                                   std::to_string(now) +
                                   ": it must lie between 0 and that; t.extend(n) makes it longer");
  }
  drop_positions(self, caller("VTensor.truncate", stream), now - length, false);
}

void TensorCore::drop_positions(nb::handle self, const Caller& caller, std::int64_t n, bool front) {
  const auto count = static_cast<std::size_t>(n);
  const Interval before = positions_;
  Interval after = front ? Interval{before.begin + count, before.end}
                         : Interval{before.begin, before.end - count};
  const trace::Span span = traced(trace::What::shrink, front ? before.begin : after.end, count);
  if (after.empty()) after = {};  // an empty tensor has all of its capacity again
  positions_ = after;
  retract(caller);
  try {
    reshape(self);
  } catch (...) {
    positions_ = before;
    // Makes no driver call: the tensor's storage still holds the pages.
    const ReleasedGil released;
    buffer_->grow(caller, before, false);
    throw;
  }
}

void TensorCore::retract(const Caller& caller) {
  const ReleasedGil released;
  buffer_->retract(caller, positions_);
}

nb::object TensorCore::alias(nb::handle self) {
  Operation operation(*this, "VTensor.alias", self);
  return TorchBridge::get().detach(self);
}

void TensorCore::record_stream(Stream stream) {
  Operation operation(*this, "VTensor.record_stream");
  const Caller caller = this->caller("VTensor.record_stream", stream);
  const ReleasedGil released;
  buffer_->use({caller.operation, caller.stream});
}

void TensorCore::close(nb::handle self, std::optional<Stream> stream) {
  if (!open_) return;
  const OperationLock lock(mutex_, "VTensor.close");
  if (!open_) return;
  const Caller caller = this->caller("VTensor.close", stream);
  const trace::Span span = traced(trace::What::shrink, positions_.begin, length());
  const Undressed undressed(*this, self);
  {
    const ReleasedGil released;
    buffer_->use(caller);
  }
  detach(self);
  leave(self);
}

// Releases the buffer and the pool. The tensor must be detached from its storage.
void TensorCore::leave(nb::handle self) {
  open_ = false;
  positions_ = {};
  dress(self);
  const std::shared_ptr<Buffer> left = std::move(buffer_);
  const ReleasedGil released;
  left->abandon();
  const PoolLock settled(
      left->pool());  // waits until this or another thread has settled the buffer
}

}  // namespace vtensor::bind
