#include "bind/tensor_core.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/process.h"
#include "base/trace.h"
#include "bind/arguments.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/sharing.h"
#include "policy/sleep.h"

namespace vtensor::bind {

namespace {

struct TensorClasses {
  nb::object open, copy_on_write, asleep, closed;
};
TensorClasses& classes = *new TensorClasses;  // never destroyed: the interpreter may end first

// Above this, torch's parallel copy is faster than one memcpy a row.
constexpr std::size_t kMemcpyLimit = std::size_t{256} << 10;
// On a device, torch's one kernel is faster than more copies.
constexpr std::size_t kMostCopies = 4;

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

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

// Gives the tensor the class without Python hooks for the scope of an operation, because an
// exception from outside in a hook would leave the operation half done (I17). The end of the scope
// sets the class that the tensor's state requires.
class TensorCore::PlainClass {
 public:
  PlainClass(TensorCore& core, nb::handle self) : core_(core), self_(self) {
    // Pool.wake sets the class of a tensor once that is awake.
    if (self.type().is(classes.copy_on_write) || (self.type().is(classes.asleep) && !core.asleep()))
      nb::setattr(self, "__class__", classes.open);
  }
  ~PlainClass() { core_.set_class_at_end(self_); }
  PlainClass& operator=(PlainClass&&) = delete;

 private:
  TensorCore& core_;
  nb::handle self_;
};

// One operation on one tensor. Raises the mapper's error for it, if there is one. If given the
// tensor, restores its storage and shape, and throws, if another library has changed them.
class TensorCore::Operation : public SoleOperation {
 public:
  Operation(TensorCore& core, const char* name, nb::handle self = {},
            std::optional<Stream> stream = {})
      : SoleOperation(core.mutex_, core.buffer_, name, stream), core_(core) {
    core.buffer_->raise_error(name);
    if (!self.is_valid()) return;
    plain_class_.emplace(core, self);
    if (core.is_set(self)) return;
    core.publish(self);
    throw Error(
        "[", name,
        "] the tensor's storage or shape was changed from outside (set_, resize_, .data =, "
        "share_memory_ on a view, ...): what vtensor holds has been put back; repeat the call, and "
        "use t.alias() or t.clone() for what changes tensors in place");
  }
  // Readers in other processes see what the operation has done.
  ~Operation() {
    if (core_.buffer_) core_.buffer_->show_positions();
  }
  Operation& operator=(Operation&&) = delete;

 private:
  TensorCore& core_;
  std::optional<PlainClass> plain_class_;  // sets the class before another operation may begin
};

void TensorCore::use_classes(nb::object open, nb::object copy_on_write, nb::object asleep,
                             nb::object closed) {
  classes = {std::move(open), std::move(copy_on_write), std::move(asleep), std::move(closed)};
}

TensorCore::TensorCore(const std::shared_ptr<PagePool>& pool, TensorSpec spec)
    : TensorCore(std::move(spec)) {
  for (std::size_t i = 0; i < spec_.sizes.size(); ++i) {
    if (spec_.sizes[i] < (i == spec_.grow_dim ? 0 : 1))
      refuse("empty", "sizes ", shape_text(spec_.sizes),
             " cannot be: give at least 1 everywhere, and at least 0 along grow_dim");
  }
  if (static_cast<std::size_t>(spec_.sizes[spec_.grow_dim]) > spec_.capacity)
    throw CapacityExceeded("[empty] length of ", spec_.sizes[spec_.grow_dim],
                           " passes capacity of ", spec_.capacity, ": raise capacity=");
  refuse_in_forked_child("empty");
  const RowShape shape = row_shape(spec_.capacity);
  const Caller caller = caller_of("empty", {}, *pool);
  use(with_memory(*pool, caller, [&] { return Buffer::create(pool, shape, caller); }));
}

TensorCore::~TensorCore() {
  if (buffer_) buffer_->abandon();
}

// The shape of the rows in a range of this capacity, if their pages stay the same.
RowShape TensorCore::row_shape(std::size_t capacity) const {
  std::size_t rows = 1, item_bytes = spec_.item_size, phase = 0;
  for (std::size_t dim = 0; dim < spec_.sizes.size(); ++dim) {
    if (dim == spec_.grow_dim) continue;
    std::size_t& product = dim < spec_.grow_dim ? rows : item_bytes;
    const auto next = checked_multiply(product, static_cast<std::size_t>(spec_.sizes[dim]));
    if (!next)
      throw CapacityExceeded("[empty] sizes ", shape_text(spec_.sizes), " overflow: lower them");
    product = *next;
  }
  if (buffer_)
    phase = (buffer_->shape().phase + positions_.begin * item_bytes) % buffer_->pool()->page_size();
  return {rows, item_bytes, capacity, phase, spec_.zeroed};
}

// A span for `n` positions of every row. Its address is that of position `first` of row 0.
trace::Span TensorCore::traced(trace::What what, std::size_t first, std::size_t n) const {
  const RowShape& shape = buffer_->shape();
  return {what, buffer_->address_of(0, first), n * shape.rows * shape.item_bytes,
          buffer_->range().base()};
}

void TensorCore::use(std::shared_ptr<Buffer> buffer) {
  nb::object strides;
  try {
    strides = strides_of(*buffer);
  } catch (...) {
    buffer->abandon();
    throw;
  }
  use(std::move(buffer), std::move(strides));
}

void TensorCore::use(std::shared_ptr<Buffer> buffer, nb::object strides) noexcept {
  buffer_.swap(buffer);
  spec_.capacity = buffer_->shape().capacity;
  strides_ = std::move(strides);
  if (buffer) buffer->abandon();
}

void TensorCore::use_shared(std::shared_ptr<Buffer> buffer, std::size_t length,
                            std::size_t stale_until) {
  use(std::move(buffer));
  positions_ = {0, length};
  may_copy_on_write_ = true;
  stale_until_ = stale_until;
}

// Runs `body` with the tensor off its storage, and publishes its positions again if that throws.
template <typename Body>
void TensorCore::while_detached(nb::handle self, const Body& body) {
  begin_sharing(self);
  detach(self);
  try {
    body();
  } catch (...) {
    publish(self);
    throw;
  }
}

// Pages may be shared from now on. If the class that the tensor then needs cannot be set, that is
// found here, before anything has changed. Requires: the plain class.
void TensorCore::begin_sharing(nb::handle self) {
  if (!buffer_->pool()->traits().kernel_copies_on_write) {
    nb::setattr(self, "__class__", classes.copy_on_write);
    nb::setattr(self, "__class__", classes.open);
  }
  may_copy_on_write_ = true;
}

// Sets the class that the tensor's state requires. Throws what Python refuses it with: an audit
// hook's exception, MemoryError.
void TensorCore::set_class(nb::handle self) {
  if (!buffer_ || buffer_->pool()->traits().kernel_copies_on_write) may_copy_on_write_ = false;
  if (may_copy_on_write_)
    may_copy_on_write_ = without_gil([this] { return buffer_->copy_on_write(); });
  const nb::handle wanted = !buffer_                      ? classes.closed
                            : buffer_->asleep.load() != 0 ? classes.asleep
                            : may_copy_on_write_          ? classes.copy_on_write
                                                          : classes.open;
  if (!self.type().is(wanted)) nb::setattr(self, "__class__", wanted);
}

// `set_class` where nothing can be thrown. A tensor that lacks the hooks of its class has no memory
// until the next operation, so that no write reaches shared pages (I6).
void TensorCore::set_class_at_end(nb::handle self) noexcept {
  try {
    set_class(self);
  } catch (nb::python_error& refused) {
    refused.discard_as_unraisable(self);
    try {
      detach(self);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(self);
    }
  }
}

void TensorCore::fall_asleep(nb::handle self, FallAsleep& sleep) {
  if (closed() || asleep()) return;
  const Operation operation(*this, "Pool.sleep", self);
  sleep.add(buffer_);
}

void TensorCore::wake(nb::handle self) {
  const SoleOperation operation(mutex_, buffer_, "Pool.wake");
  set_class(self);
}

void TensorCore::attach(nb::handle self, std::size_t length) {
  const Operation operation(*this, "empty");
  const PlainClass plain_class(*this, self);
  if (may_copy_on_write_) begin_sharing(self);
  if (positions_.empty() && length != 0) {
    detach(self);
    grow(self, operation, length);
  } else {
    publish(self);
  }
}

void TensorCore::require_room(const char* operation, std::size_t n) const {
  const std::size_t used_up = spec_.move_when_full ? 0 : positions_.begin;
  if (n <= spec_.capacity - used_up - length()) return;
  const std::string remedy =
      used_up == 0 ? ": make it with a larger capacity="
                   : text(", ", used_up,
                          " used up by front shrinks: make it with when_full=\"move\", which gives "
                          "them back");
  throw CapacityExceeded("[", operation, "] need ", n, " more positions, length is ", length(),
                         " of capacity ", spec_.capacity, remedy,
                         ", or move it with t.reallocate(capacity)");
}

std::size_t TensorCore::checked_capacity(const char* operation, std::int64_t capacity) const {
  const auto checked = static_cast<std::size_t>(capacity);
  if (capacity >= 0 && checked >= length()) return checked;
  throw CapacityExceeded("[", operation, "] capacity of ", capacity,
                         " does not hold the length of ", length(), ": raise it");
}

// The positions to be zeroed of those that growth adds: in a forked tensor, what its parent had
// truncated; in one made by zeros(), also what the tensor itself had there.
Interval TensorCore::stale_in(Interval added, std::size_t stale_until) const {
  if (buffer_->pool()->zero_policy() != ZeroPolicy::never)
    return intersection(added, {0, stale_until});
  return spec_.zeroed ? added : Interval{};
}

// Adds `n` positions, or changes nothing. False if `source` is still to be copied there.
bool TensorCore::grow(nb::handle self, const Operation& operation, std::size_t n, bool populate,
                      const TensorFacts* source) {
  const Caller& caller = operation.caller();
  require_room(caller.operation, n);
  if (n == 0) return true;
  const trace::Span span = traced(trace::What::extend, positions_.end, n);
  if (positions_.end + n > spec_.capacity) {
    move_to_front(self, operation, spec_.capacity, n, populate);
    return false;
  }
  const Interval before = positions_;
  const Interval after{before.begin, before.end + n};
  const Interval stale = stale_in({before.end, after.end}, stale_until_);
  if (!stale.empty() || !buffer_->grow_within(caller, after))
    operation.with_memory([&] { buffer_->grow(caller, after, populate, stale); });
  positions_ = after;
  // First, because a refused copy may have written a part.
  if (spec_.zeroed) stale_until_ = std::max(stale_until_, after.end);
  bool copied = false;
  try {
    copied = source != nullptr && fill_from(caller, *source, before.end, n);
    update(self);
  } catch (...) {
    positions_ = before;
    shrink_buffer();
    throw;
  }
  return copied;
}

void TensorCore::prepare(nb::handle given) {
  const std::int64_t n = integer("VTensor.prepare", "n", given);
  const Operation operation(*this, "VTensor.prepare");
  if (n < 0) refuse("VTensor.prepare", "n is ", n, ": give at least 0");
  require_room("VTensor.prepare", static_cast<std::size_t>(n));
  const std::size_t end = positions_.end + static_cast<std::size_t>(n);
  // If the tensor is to move, no page of its new range exists yet.
  if (end <= spec_.capacity) without_gil([&] { buffer_->prepare(end); });
}

void TensorCore::extend(nb::handle self, nb::handle given) {
  const std::int64_t n = integer("VTensor.extend", "n", given);
  const Operation operation(*this, "VTensor.extend", self);
  if (n < 0)
    refuse("VTensor.extend", "n is ", n, ": it must be at least 0; t.shrink(n) makes it shorter");
  grow(self, operation, static_cast<std::size_t>(n));
}

// Copies `n` positions to `start`, on the host by memcpy, on a device by a copy for each row in the
// caller's stream. False if torch's copy is faster, or the source's layout requires it.
bool TensorCore::fill_from(const Caller& caller, const TensorFacts& source, std::size_t start,
                           std::size_t n) {
  const RowShape& shape = buffer_->shape();
  const std::size_t bytes = n * shape.item_bytes;
  const bool on_host = buffer_->pool()->traits().device.on_host();
  if (!source.data || (on_host ? shape.rows * bytes > kMemcpyLimit : shape.rows > kMostCopies))
    return false;
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
    const Address from =
        reinterpret_cast<Address>(source.data) + static_cast<std::size_t>(offset) * spec_.item_size;
    const Address to = buffer_->address_of(row, start);
    if (on_host) {
      std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    } else {
      // A launch waits while the stream's queue is full, perhaps for another thread.
      without_gil([&] {
        buffer_->range().driver().copy(CopyDirection::within, to, reinterpret_cast<void*>(from),
                                       bytes, caller.stream);
      });
    }
  }
  return true;
}

void TensorCore::append(nb::handle self, nb::handle source) {
  constexpr const char* name = "VTensor.append";
  TorchBridge& torch = TorchBridge::get();
  const Operation operation(*this, name, self);
  if (!torch.is_tensor(source)) refuse(name, "need a torch.Tensor: torch.as_tensor(x) makes one");
  TensorFacts& from = source_;
  if (!torch.read(source, from))
    refuse(
        name,
        "the source is not strided: make it dense, with x.to_dense(), or x.to_padded_tensor(0.0) "
        "if it is nested");
  // Asking torch for an attribute costs as much as reading all the facts.
  if (!from.has_dtype_of(facts_)) {
    if (nb::object dtype = nb::getattr(source, "dtype"); !dtype.is(spec_.dtype))
      refuse(name, "the tensor holds ", text(spec_.dtype), ", the source ", text(dtype),
             ": convert it with x.to(t.dtype)");
  }
  bool fits = from.shape.size() == spec_.sizes.size();
  for (std::size_t dim = 0; fits && dim < from.shape.size(); ++dim)
    fits = dim == spec_.grow_dim || from.shape[dim] == spec_.sizes[dim];
  if (!fits)
    refuse(name, "the source has shape ", shape_text(from.shape), ", the tensor ",
           shape_text(facts_.shape), ": all but dimension ", spec_.grow_dim, " must agree");
  if (!(from.device == buffer_->pool()->traits().device))
    refuse(name, "the tensor is on ", text(spec_.device), ", the source on ",
           text(nb::getattr(source, "device")), ": move it with x.to(t.device)");
  if (!from.has_memory())
    refuse(name, "the source has no memory (", type_text(source), "): give one with contents");
  if (nb::getattr(source, "requires_grad").is(nb::bool_(true)) && torch.gradients_enabled())
    refuse(name,
           "the source requires grad, and a VTensor keeps no graph: append(x.detach()), or work "
           "under torch.no_grad()");
  nb::object kept = nb::borrow(source);
  const bool resolved = torch.is_plain(source) && !torch.is_negative(source) &&
                        !(from.may_be_complex() && torch.is_conjugate(source));
  const auto n = static_cast<std::size_t>(from.shape[spec_.grow_dim]);
  const auto source_at = reinterpret_cast<Address>(from.data);
  if (source_at - buffer_->range().base() < buffer_->range().bytes()) {
    kept = kept.attr("clone")();  // the new positions may overlap it
    if (!torch.read(kept, from)) refuse(name, "the source cannot be read");
  }
  const std::size_t before = length();
  if (grow(self, operation, n, true, resolved ? &from : nullptr)) return;
  try {
    torch.copy_into(self, spec_.grow_dim, before, n, kept);
  } catch (...) {
    positions_.end -= n;
    shrink_buffer();
    update(self);
    throw;
  }
}

void TensorCore::shrink(nb::handle self, nb::handle given, nb::handle at_front,
                        std::optional<Stream> stream) {
  constexpr const char* name = "VTensor.shrink";
  const std::int64_t n = integer(name, "n", given);
  const bool front = truth(name, "front", at_front);
  const Operation operation(*this, name, self, stream);
  if (n < 0 || static_cast<std::size_t>(n) > length())
    refuse(name, "n is ", n, ", the length ", length(), ": it must lie between 0 and the length");
  drop_positions(self, operation.caller(), static_cast<std::size_t>(n), front);
}

void TensorCore::truncate(nb::handle self, nb::handle given, std::optional<Stream> stream) {
  constexpr const char* name = "VTensor.truncate";
  const std::int64_t kept = integer(name, "length", given);
  const Operation operation(*this, name, self, stream);
  if (kept < 0 || static_cast<std::size_t>(kept) > length())
    refuse(name, "length is ", kept, ", the tensor's ", length(),
           ": it must lie between 0 and that; t.extend(n) makes it longer");
  drop_positions(self, operation.caller(), length() - static_cast<std::size_t>(kept), false);
}

void TensorCore::drop_positions(nb::handle self, const Caller& caller, std::size_t n, bool front) {
  const Interval before = positions_;
  Interval after =
      front ? Interval{before.begin + n, before.end} : Interval{before.begin, before.end - n};
  const trace::Span span = traced(trace::What::shrink, front ? before.begin : after.end, n);
  if (after.empty()) after = {};  // an empty tensor has all of its capacity again
  without_gil([&] { buffer_->use(caller); });
  positions_ = after;
  try {
    update(self);
  } catch (...) {
    positions_ = before;
    throw;
  }
  shrink_buffer();
}

void TensorCore::shrink_buffer() noexcept {
  without_gil([&] { buffer_->shrink_to(positions_); });
}

nb::object TensorCore::alias(nb::handle self) {
  const Operation operation(*this, "VTensor.alias", self);
  return TorchBridge::get().detach(self);
}

void TensorCore::record_stream(Stream stream) {
  const Operation operation(*this, "VTensor.record_stream", {}, stream);
  without_gil([&] { buffer_->use(operation.recorded()); });
}

Generation* TensorCore::lease(const Caller& caller) {
  const SoleOperation operation(mutex_, buffer_, caller);
  return without_gil([&] { return buffer_->lease(caller); });
}

void TensorCore::close(nb::handle self, std::optional<Stream> stream) {
  if (closed()) return;
  const auto lock = mutex_.hold("VTensor.close");
  if (closed()) return;
  const Caller caller = caller_of("VTensor.close", stream, *buffer_->pool());
  const trace::Span span = traced(trace::What::shrink, positions_.begin, length());
  const PlainClass plain_class(*this, self);
  without_gil([&] { buffer_->use(caller); });
  if (!buffer_->pool()->keeps_mapped()) detach(self);
  leave(self);
}

// Releases the buffer and the pool. The tensor is detached from its storage, or the pool keeps it
// mapped.
void TensorCore::leave(nb::handle self) {
  const std::shared_ptr<Buffer> left = std::move(buffer_);
  positions_ = {};
  set_class_at_end(self);
  const ReleasedGil released;
  left->abandon();
  // Waits until the buffer's end has taken effect, in this thread or another.
  const PoolLock ended(left->pool());
}

// -- what torch has: a storage over mapped pages, sizes and strides

std::int64_t TensorCore::stride(const Buffer& buffer, std::size_t dim) const {
  const bool of_rows = dim < spec_.grow_dim;
  auto stride = static_cast<std::int64_t>(of_rows ? buffer.range().row_bytes() / spec_.item_size
                                                  : std::size_t{1});
  const std::size_t end = of_rows ? spec_.grow_dim : spec_.sizes.size();
  while (++dim < end) stride *= spec_.sizes[dim];
  return stride;
}

nb::object TensorCore::strides_of(const Buffer& buffer) const {
  return tuple_of(spec_.sizes.size(), [&](std::size_t dim) { return stride(buffer, dim); });
}

bool TensorCore::is_set(nb::handle self) {
  const auto& [data, item_bytes, dtype, device, shape, strides] = facts_;
  if (!TorchBridge::get().read(self, facts_) || shape.size() != spec_.sizes.size()) return false;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    const std::int64_t size = spec_.size(dim, positions_.size());
    // torch does not define the stride of a dimension of size 1.
    if (shape[dim] != size || (size > 1 && strides[dim] != stride(*buffer_, dim))) return false;
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
  TorchBridge::get().set(self, storage, offset, sizes, strides_);
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

// -- sharing pages with another tensor, or moving them to another range

// A buffer over the same pages: see Buffer::share_rows.
std::shared_ptr<Buffer> TensorCore::share(const Caller& caller, std::size_t capacity, bool moves) {
  const RowShape shape = row_shape(capacity);
  std::vector<std::size_t> rows(shape.rows);
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  return buffer_->share_rows(caller, shape, rows, moves);
}

// Moves the tensor to the start of a new range of this capacity, which gives back what front
// shrinks used up, and adds `n` positions.
void TensorCore::move_to_front(nb::handle self, const Operation& operation, std::size_t capacity,
                               std::size_t n, bool populate) {
  const Caller& caller = operation.caller();
  const std::size_t kept = length();
  const std::size_t stale_until = stale_until_moved();
  while_detached(self, [&] {
    use(operation.with_memory([&] {
      std::shared_ptr<Buffer> buffer = share(caller, capacity, true);
      try {
        buffer->grow(caller, {0, kept + n}, populate, stale_in({kept, kept + n}, stale_until));
      } catch (...) {
        buffer->abandon();
        throw;
      }
      return buffer;
    }));
  });
  positions_ = {0, kept + n};
  stale_until_ = spec_.zeroed ? std::max(stale_until, kept + n) : stale_until;
  try {
    publish(self);
  } catch (...) {
    positions_.end = kept;
    shrink_buffer();
    throw;
  }
}

void TensorCore::unshare(nb::handle self, nb::handle given_start, nb::handle given_stop) {
  constexpr const char* name = "VTensor.unshare";
  const std::int64_t start = integer(name, "start", given_start);
  const std::int64_t stop = integer(name, "stop", given_stop);
  const Operation operation(*this, name, self);
  if (start < 0 || stop < start || static_cast<std::size_t>(stop) > length())
    refuse(name, "start, stop are ", start, ", ", stop, ", the length ", length(),
           ": need 0 <= start <= stop <= length");
  const Interval positions{positions_.begin + static_cast<std::size_t>(start),
                           positions_.begin + static_cast<std::size_t>(stop)};
  operation.with_memory([&] { buffer_->unshare(operation.caller(), positions); });
}

// The rows that `index`, of dimension 0, selects.
std::vector<std::size_t> TensorCore::chosen_rows(std::span<const std::int64_t> index) const {
  constexpr const char* name = "VTensor.reindex";
  if (spec_.grow_dim == 0)
    refuse(name, "dimension 0 is the one that grows: there are no rows to choose from");
  if (index.empty()) refuse(name, "the index is empty: a tensor has at least one row");
  const std::int64_t batch = spec_.sizes[0];
  const std::size_t inner = buffer_->shape().rows / static_cast<std::size_t>(batch);
  std::vector<std::size_t> rows;
  for (const std::int64_t i : index) {
    if (i < -batch || i >= batch)
      refuse(name, "index ", i, " is out of range for dimension 0 of size ", batch,
             ": give one from -size to size - 1");
    for (std::size_t row = 0; row < inner; ++row)
      rows.push_back(static_cast<std::size_t>(i < 0 ? i + batch : i) * inner + row);
  }
  return rows;
}

void TensorCore::reindex(std::span<Reindexing> tensors,
                         std::span<const std::pair<nb::dict, nb::dict>> states) {
  // In one order, independent of the caller's, so that two threads never wait for each other.
  std::sort(tensors.begin(), tensors.end(),
            [](const Reindexing& a, const Reindexing& b) { return a.core < b.core; });
  std::vector<std::unique_ptr<Operation>> operations;
  bool one_pool = true;
  for (Reindexing& tensor : tensors) {
    operations.push_back(std::make_unique<Operation>(*tensor.core, "VTensor.reindex", tensor.self));
    tensor.rows = tensor.core->chosen_rows(tensor.index);
    one_pool &= tensor.core->buffer_->pool() == tensors.front().core->buffer_->pool();
  }
  try {
    for (const Reindexing& tensor : tensors) {
      tensor.core->begin_sharing(tensor.self);
      tensor.core->detach(tensor.self);
    }
    std::vector<Buffer::Reindexing> in_place;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto& [core, self, index, rows, moved, strides] = tensors[i];
      Buffer& buffer = *core->buffer_;
      RowShape shape = core->row_shape(core->spec_.capacity);
      const bool may_stay =
          one_pool && rows.size() == shape.rows && buffer.pool()->traits().kernel_copies_on_write;
      shape.rows = rows.size();
      operations[i]->with_memory([&] {
        if (may_stay && !buffer.published()) {
          in_place.emplace_back(&buffer, rows);
        } else {
          moved = buffer.share_rows(operations[i]->caller(), shape, rows, true);
        }
      });
      if (moved) strides = core->strides_of(*moved);
    }
    if (!in_place.empty()) {
      const Operation& first = *operations.front();
      first.with_memory([&] { Buffer::reindex(first.caller(), in_place); });
    }
  } catch (...) {
    for (const Reindexing& tensor : tensors) {
      if (tensor.moved) tensor.moved->abandon();
    }
    for (const Reindexing& tensor : tensors) tensor.core->publish(tensor.self);
    throw;
  }
  for (Reindexing& tensor : tensors) {
    if (tensor.moved) tensor.core->take_rows(tensor);
  }
  for (const auto& [state, changes] : states) {
    if (PyDict_Update(state.ptr(), changes.ptr()) != 0) throw nb::python_error();
  }
  for (const Reindexing& tensor : tensors) tensor.core->publish(tensor.self);
}

// Takes over a buffer with the same positions, and the inner rows once for each index.
void TensorCore::take_rows(Reindexing& tensor) noexcept {
  spec_.sizes[0] = static_cast<std::int64_t>(tensor.index.size());
  use(std::move(tensor.moved), std::move(tensor.strides));
  stale_until_ = stale_until_moved();
  positions_ = {0, length()};
}

void TensorCore::reserve(nb::handle self, nb::handle given) {
  constexpr const char* name = "VTensor.reserve";
  const std::int64_t capacity = integer(name, "capacity", given);
  const Operation operation(*this, name, self);
  move_to_front(self, operation, checked_capacity(name, capacity), 0, false);
}

ReaderFiles TensorCore::open_for_readers(nb::handle self) {
  const Operation operation(*this, "share", self);
  const char* const name = operation.caller().operation;
  without_gil([&] { buffer_->share(name, 2); });
  // At a write through a view the kernel copies a page that a fork shares: readers would not see
  // that.
  operation.with_memory([&] { buffer_->unshare(operation.caller(), positions_); });
  buffer_->show_positions();
  return reader_files(name, std::array{buffer_});
}

std::unique_ptr<TensorCore> TensorCore::fork(nb::handle self, std::optional<Stream> stream) {
  const Operation operation(*this, "VTensor.fork", self, stream);
  begin_sharing(self);
  std::unique_ptr<TensorCore> child(new TensorCore(spec_));
  child->use_shared(
      operation.with_memory([&] { return share(operation.caller(), spec_.capacity, false); }),
      length(), buffer_->first_past(positions_) - positions_.begin);
  return child;
}

void TensorCore::reallocate(nb::handle self, nb::handle moved, nb::handle given) {
  constexpr const char* name = "VTensor.reallocate";
  const std::int64_t capacity = integer(name, "capacity", given);
  const Operation operation(*this, name, self);
  TensorSpec spec = spec_;
  spec.capacity = checked_capacity(name, capacity);
  without_gil([&] { buffer_->use(operation.caller()); });
  while_detached(self, [&] {
    std::unique_ptr<TensorCore> core(new TensorCore(spec));
    core->use_shared(
        operation.with_memory([&] { return share(operation.caller(), spec.capacity, true); }),
        length(), stale_until_moved());
    core->attach(moved, length());
    nb::setattr(moved, "_core", nb::cast(std::move(core)));
  });
  leave(self);
}

}  // namespace vtensor::bind
