#include "bind/tensor_core.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/process.h"

namespace vtensor::bind {

namespace {

// Above this, torch's parallel copy is faster than one memcpy a row.
constexpr std::size_t kMemcpyLimit = std::size_t{256} << 10;

[[noreturn]] void refuse(const char* operation, const std::string& message) {
  throw InvalidArgument("[VTensor." + std::string(operation) + "] " + message);
}

std::string name_of(const char* operation) { return "VTensor." + std::string(operation); }

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

std::vector<std::size_t> every_row(const RowShape& shape) {
  std::vector<std::size_t> rows(shape.rows);
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  return rows;
}

}  // namespace

// One operation on one tensor: refused in a forked child, on a closed tensor and beside another
// operation.
class TensorCore::Operation {
 public:
  Operation(TensorCore& core, const char* name) : core_(core) {
    refuse_in_forked_child(name);
    core.mutex_.lock(name);
    if (core.closed_) {
      core.mutex_.unlock();
      throw Closed("[VTensor." + std::string(name) + "] the tensor is closed: make a new one");
    }
  }
  // Also notices where the tensor's storage or shape was changed behind our back, and puts it back.
  Operation(TensorCore& core, const char* name, nb::handle self) : Operation(core, name) {
    if (core.is_ours(self)) return;
    core.publish(self);
    throw Error("[VTensor." + std::string(name) +
                "] the tensor's storage or shape was changed from outside (set_, resize_, .data =, "
                "share_memory_ on a view, ...): what vtensor holds has been put back; repeat the "
                "call, and use t.snapshot() or t.clone() for what changes tensors in place");
  }
  ~Operation() { core_.mutex_.unlock(); }

 private:
  TensorCore& core_;
};

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
  std::shared_ptr<Buffer> buffer;
  {
    nb::gil_scoped_release released;
    buffer = Buffer::create(pool, shape);
  }
  use(std::move(buffer));
}

TensorCore::TensorCore(std::shared_ptr<Buffer> buffer, TensorSpec spec, std::size_t length,
                       bool foreign)
    : spec_(std::move(spec)), positions_{0, length} {
  if (foreign || spec_.zeroed) stale_until_ = buffer->reach(positions_);
  use(std::move(buffer));
}

TensorCore::~TensorCore() {
  if (!closed_) buffer_->abandon();
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

// Takes over a buffer, and the strides that its rows make.
void TensorCore::use(std::shared_ptr<Buffer> buffer) {
  buffer_ = std::move(buffer);
  const std::size_t dims = spec_.sizes.size();
  stride_values_.assign(dims, 1);
  for (std::size_t dim = dims; dim-- > 0;) {
    if (dim + 1 == spec_.grow_dim) {
      stride_values_[dim] = static_cast<std::int64_t>(buffer_->row_bytes() / spec_.item_size);
    } else if (dim + 1 < dims) {
      stride_values_[dim] = stride_values_[dim + 1] * spec_.sizes[dim + 1];
    }
  }
  nb::object strides = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(dims)));
  for (std::size_t dim = 0; dim < dims; ++dim) {
    PyTuple_SET_ITEM(strides.ptr(), static_cast<Py_ssize_t>(dim),
                     PyLong_FromLongLong(stride_values_[dim]));
  }
  strides_ = std::move(strides);
}

nb::object TensorCore::sizes(std::size_t length) const {
  nb::object sizes = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(spec_.sizes.size())));
  if (!sizes.is_valid()) throw nb::python_error();
  for (std::size_t dim = 0; dim < spec_.sizes.size(); ++dim) {
    const auto size = dim == spec_.grow_dim ? static_cast<std::int64_t>(length) : spec_.sizes[dim];
    PyTuple_SET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(dim), PyLong_FromLongLong(size));
  }
  return sizes;
}

bool TensorCore::is_ours(nb::handle self) {
  if (!TorchFace::get().read(self, facts_) || facts_.shape.size() != spec_.sizes.size())
    return false;
  for (std::size_t dim = 0; dim < facts_.shape.size(); ++dim) {
    const auto size =
        dim == spec_.grow_dim ? static_cast<std::int64_t>(length()) : spec_.sizes[dim];
    // torch leaves the stride of a dimension of size 1 open
    if (facts_.shape[dim] != size || (size > 1 && facts_.strides[dim] != stride_values_[dim]))
      return false;
  }
  return length() == 0 || reinterpret_cast<Address>(facts_.data) == address();
}

// Puts a new generation under the tensor.
void TensorCore::publish(nb::handle self) {
  const Interval slots = buffer_->slots_of(positions_);
  if (slots.empty()) {
    detach(self);
    return;
  }
  const Address first = buffer_->slot_address(0, slots.begin);
  const Address end = buffer_->slot_address(buffer_->shape().rows - 1, slots.end);
  Generation* generation;
  {
    nb::gil_scoped_release released;
    generation = buffer_->publish();
  }
  TorchFace& torch = TorchFace::get();
  nb::object storage =
      torch.storage_over(generation, first, end - first, buffer_->pool()->traits().device);
  torch.set(self, storage, (address() - first) / spec_.item_size, sizes(length()), strides_);
  published_ = slots;
}

// Tells torch of a new length or first element; within the present generation where that covers it.
void TensorCore::reshape(nb::handle self) {
  const Interval slots = buffer_->slots_of(positions_);
  if (slots.empty() || !(slots == published_)) {
    publish(self);
    return;
  }
  const Address first = buffer_->slot_address(0, slots.begin);
  TorchFace::get().as_strided(self, sizes(length()), strides_,
                              (address() - first) / spec_.item_size);
}

// Takes the tensor off its storage, so that only views hold generations of the buffer.
void TensorCore::detach(nb::handle self) {
  TorchFace& torch = TorchFace::get();
  torch.set(self, torch.empty_storage(spec_.device), 0, sizes(0), strides_);
  published_ = {};
}

void TensorCore::attach(nb::handle self, std::size_t length) {
  Operation operation(*this, "empty");
  if (positions_.empty() && length != 0) {
    detach(self);
    grow(self, "empty", length, false, [](std::size_t) {});
  } else {
    publish(self);
  }
}

void TensorCore::require_room(const char* operation, std::size_t n) const {
  const std::size_t used_up = spec_.move_when_full ? 0 : positions_.begin;
  const std::size_t room = spec_.capacity - used_up - length();
  if (n <= room) return;
  throw CapacityExceeded(
      "[" + name_of(operation) + "] need " + std::to_string(n) + " more positions, length is " +
      std::to_string(length()) + " of capacity " + std::to_string(spec_.capacity) +
      (used_up ? ", " + std::to_string(used_up) + " used up by front shrinks" : "") +
      ": make it with a larger capacity=, or move it with t.reallocate(capacity)");
}

// What of `added` positions must be zeroed: of a forked tensor what its parent had truncated, of
// one made by zeros() also what it had itself there.
Interval TensorCore::stale_in(Interval added) const {
  if (buffer_->pool()->zero_policy() == ZeroPolicy::never) return spec_.zeroed ? added : Interval{};
  return intersection(added, {0, stale_until_});
}

// Adds `n` positions. `fill(start)` writes them before torch is told of them. Whole or nothing.
// True where the tensor moved.
template <typename Fill>
bool TensorCore::grow(nb::handle self, const char* operation, std::size_t n, bool populate,
                      Fill fill) {
  require_room(operation, n);
  if (n == 0) return false;
  if (positions_.end + n > spec_.capacity) {
    move_to_front(self, operation, n, populate);
    fill(positions_.end - n);
    return true;
  }
  const Interval before = positions_;
  const Interval after{before.begin, before.end + n};
  const Interval stale = stale_in({before.end, after.end});
  const bool within = stale.empty() && !before.empty() && buffer_->grow_within(after);
  if (!within) {
    const std::string name = name_of(operation);
    nb::gil_scoped_release released;
    buffer_->grow(name.c_str(), after, populate, stale);
  }
  positions_ = after;
  try {
    fill(before.end);
    if (within) {
      TorchFace::get().as_strided(self, sizes(length()), strides_);
    } else {
      reshape(self);
    }
  } catch (...) {
    positions_ = before;
    buffer_->retract(before);
    throw;
  }
  if (spec_.zeroed) stale_until_ = std::max(stale_until_, after.end);
  return false;
}

// Moves the tensor to the start of a fresh range, which gives back what front shrinks used up, and
// adds `n`.
void TensorCore::move_to_front(nb::handle self, const char* operation, std::size_t n,
                               bool populate) {
  const std::string name = name_of(operation);
  const std::size_t length = positions_.size();
  // Of a tensor made by zeros() all that is new; else what the pages hold of a parent's, now
  // counted from the front.
  const std::size_t stale =
      spec_.zeroed ? length + n : stale_until_ - std::min(stale_until_, positions_.begin);
  detach(self);
  std::shared_ptr<Buffer> moved;
  try {
    const RowShape shape = row_shape(spec_.capacity, phase_of_first());
    const std::vector<std::size_t> rows = every_row(shape);
    nb::gil_scoped_release released;
    moved = buffer_->share(name.c_str(), shape, rows, !buffer_->published());
    try {
      moved->grow(name.c_str(), {0, length + n}, populate);
      moved->zero({length, std::max(length, std::min(length + n, stale))});
    } catch (...) {
      moved->abandon();
      throw;
    }
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

void TensorCore::check_room(std::int64_t n) {
  Operation operation(*this, "prepare");
  if (n < 0) refuse("prepare", "n is " + std::to_string(n) + ": give at least 0");
  require_room("prepare", static_cast<std::size_t>(n));
}

bool TensorCore::extend(nb::handle self, std::int64_t n) {
  Operation operation(*this, "extend", self);
  if (n < 0)
    refuse("extend",
           "n is " + std::to_string(n) + ": it must be at least 0; t.shrink(n) makes it shorter");
  return grow(self, "extend", static_cast<std::size_t>(n), false, [](std::size_t) {});
}

// Copies `n` positions at `start` by memcpy; false where the source's layout or size asks for
// torch's copy.
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

bool TensorCore::append(nb::handle self, nb::handle source) {
  TorchFace& torch = TorchFace::get();
  Operation operation(*this, "append", self);
  if (!torch.is_tensor(source))
    refuse("append", "need a torch.Tensor: torch.as_tensor(x) makes one");
  nb::object dtype = nb::getattr(source, "dtype");
  if (!dtype.is(spec_.dtype)) {
    refuse("append", "the tensor holds " + std::string(nb::str(spec_.dtype).c_str()) +
                         ", the source " + nb::str(dtype).c_str() +
                         ": convert it with x.to(t.dtype)");
  }
  TensorFacts from;
  if (!torch.read(source, from))
    refuse("append", "the source is not strided: make it dense with x.to_dense()");
  bool fits = from.shape.size() == spec_.sizes.size();
  for (std::size_t dim = 0; fits && dim < from.shape.size(); ++dim) {
    fits = dim == spec_.grow_dim || from.shape[dim] == spec_.sizes[dim];
  }
  if (!fits) {
    refuse("append", "the source has shape " + shape_text(from.shape) + ", the tensor " +
                         shape_text(facts_.shape) + ": all but dimension " +
                         std::to_string(spec_.grow_dim) + " must agree");
  }
  const Device device = buffer_->pool()->traits().device;
  if (from.device.type != device.type || from.device.index != device.index) {
    refuse("append", "the tensor is on " + std::string(nb::str(spec_.device).c_str()) +
                         ", the source on " + nb::str(nb::getattr(source, "device")).c_str() +
                         ": move it with x.to(t.device)");
  }
  nb::object kept = nb::borrow(source);
  if (nb::getattr(source, "requires_grad").is(nb::bool_(true))) {
    if (torch.gradients_enabled()) {
      refuse("append",
             "the source requires grad, and a VTensor keeps no graph: append(x.detach()), or work "
             "under torch.no_grad()");
    }
    kept = torch.detach(source);
  }
  const bool resolved =
      torch.is_plain(source) && !torch.is_negative(source) && !torch.is_conjugate(source);
  const auto n = static_cast<std::size_t>(from.shape[spec_.grow_dim]);
  const auto source_at = reinterpret_cast<Address>(from.data);
  if (source_at - buffer_->slot_address(0, 0) < buffer_->reserved_bytes()) {
    kept = nb::borrow(kept).attr("clone")();  // it may lie where the new positions come to lie
    if (!torch.read(kept, from)) refuse("append", "the source cannot be read");
  }
  const std::size_t before = length();
  bool copied = n == 0;
  const bool moved = grow(self, "append", n, true, [&](std::size_t start) {
    copied = resolved && fill_from(from, start, n);
  });
  if (copied) return moved;
  try {
    torch.copy_into(self, spec_.grow_dim, before, n, kept);
  } catch (...) {
    positions_.end -= n;
    buffer_->retract(positions_);
    reshape(self);
    throw;
  }
  return moved;
}

void TensorCore::shrink(nb::handle self, std::int64_t n, bool front, const char* name) {
  Operation operation(*this, name, self);
  if (n < 0 || static_cast<std::size_t>(n) > length()) {
    refuse(name, "n is " + std::to_string(n) + ", the length " + std::to_string(length()) +
                     ": it must lie between 0 and the length");
  }
  const auto count = static_cast<std::size_t>(n);
  const Interval before = positions_;
  Interval after = front ? Interval{before.begin + count, before.end}
                         : Interval{before.begin, before.end - count};
  if (after.empty()) after = {};  // nothing lives, so all of the capacity is there again
  positions_ = after;
  {
    nb::gil_scoped_release released;
    buffer_->retract(after);
  }
  try {
    reshape(self);
  } catch (...) {
    positions_ = before;
    buffer_->grow(name, before,
                  false);  // makes no driver call: the tensor's storage still holds the pages
    throw;
  }
}

void TensorCore::truncate(nb::handle self, std::int64_t length) {
  const auto now = static_cast<std::int64_t>(this->length());
  if (length < 0 || length > now) {
    refuse("truncate", "length is " + std::to_string(length) + ", the tensor's " +
                           std::to_string(now) +
                           ": it must lie between 0 and that; t.extend(n) makes it longer");
  }
  shrink(self, now - length, false, "truncate");
}

void TensorCore::own(nb::handle self, std::int64_t start, std::int64_t stop) {
  Operation operation(*this, "own", self);
  if (start < 0 || stop < start || static_cast<std::size_t>(stop) > length()) {
    refuse("own", "start, stop are " + std::to_string(start) + ", " + std::to_string(stop) +
                      ", the length " + std::to_string(length()) +
                      ": need 0 <= start <= stop <= length");
  }
  const Interval positions{positions_.begin + static_cast<std::size_t>(start),
                           positions_.begin + static_cast<std::size_t>(stop)};
  nb::gil_scoped_release released;
  buffer_->own("VTensor.own", positions);
}

void TensorCore::reindex(nb::handle self, const std::vector<std::int64_t>& index) {
  Operation operation(*this, "reindex", self);
  if (spec_.grow_dim == 0)
    refuse("reindex", "dimension 0 is the one that grows: there are no rows to choose from");
  if (index.empty()) refuse("reindex", "the index is empty: a tensor has at least one row");
  const std::int64_t batch = spec_.sizes[0];
  const std::size_t inner = buffer_->shape().rows / static_cast<std::size_t>(batch);
  std::vector<std::size_t> rows;
  for (std::int64_t i : index) {
    if (i < -batch || i >= batch) {
      refuse("reindex", "index " + std::to_string(i) + " is out of range for dimension 0 of size " +
                            std::to_string(batch) + ": give one from -size to size - 1");
    }
    if (i < 0) i += batch;
    for (std::size_t row = 0; row < inner; ++row)
      rows.push_back(static_cast<std::size_t>(i) * inner + row);
  }
  detach(self);
  std::shared_ptr<Buffer> chosen;
  const std::size_t phase = phase_of_first();
  try {
    nb::gil_scoped_release released;
    const bool in_place =
        rows.size() == buffer_->shape().rows && buffer_->pool()->traits().remaps_in_one_step;
    if (in_place && !buffer_->published()) {
      buffer_->reindex("VTensor.reindex", rows);
    } else {
      RowShape shape = row_shape(spec_.capacity, phase);
      shape.rows = rows.size();
      chosen = buffer_->share("VTensor.reindex", shape, rows, false);
    }
  } catch (...) {
    publish(self);
    throw;
  }
  if (chosen) {
    spec_.sizes[0] = static_cast<std::int64_t>(index.size());
    buffer_->abandon();
    use(std::move(chosen));
    const std::size_t reached = stale_until_ - std::min(stale_until_, positions_.begin);
    positions_ = {0, length()};
    stale_until_ = spec_.zeroed ? buffer_->reach(positions_) : reached;
  }
  publish(self);
}

std::unique_ptr<TensorCore> TensorCore::fork(nb::handle self) {
  Operation operation(*this, "fork", self);
  const RowShape shape = row_shape(spec_.capacity, phase_of_first());
  const std::vector<std::size_t> rows = every_row(shape);
  std::shared_ptr<Buffer> child;
  {
    nb::gil_scoped_release released;
    child = buffer_->share("VTensor.fork", shape, rows, false);
  }
  return std::make_unique<TensorCore>(std::move(child), spec_, length(), true);
}

std::unique_ptr<TensorCore> TensorCore::reallocate(nb::handle self, std::int64_t capacity) {
  Operation operation(*this, "reallocate", self);
  if (capacity < 0 || static_cast<std::size_t>(capacity) < length()) {
    throw CapacityExceeded("[VTensor.reallocate] capacity of " + std::to_string(capacity) +
                           " does not hold the length of " + std::to_string(length()) +
                           ": raise it");
  }
  const RowShape shape = row_shape(static_cast<std::size_t>(capacity), phase_of_first());
  const std::vector<std::size_t> rows = every_row(shape);
  detach(self);
  std::shared_ptr<Buffer> moved;
  try {
    nb::gil_scoped_release released;
    moved = buffer_->share("VTensor.reallocate", shape, rows, !buffer_->published());
  } catch (...) {
    publish(self);
    throw;
  }
  TensorSpec spec = spec_;
  spec.capacity = static_cast<std::size_t>(capacity);
  return std::make_unique<TensorCore>(std::move(moved), std::move(spec), length(),
                                      stale_until_ > positions_.end);
}

void TensorCore::restore(nb::handle self) {
  Operation operation(*this, "restore");
  publish(self);
}

nb::object TensorCore::snapshot(nb::handle self) {
  Operation operation(*this, "snapshot", self);
  return TorchFace::get().detach(self);
}

void TensorCore::close(nb::handle self) {
  refuse_in_forked_child("VTensor.close");
  mutex_.lock("VTensor.close");
  const std::unique_ptr<OperationMutex, void (*)(OperationMutex*)> unlock(
      &mutex_, [](OperationMutex* mutex) { mutex->unlock(); });
  if (closed_) return;
  detach(self);
  leave();
}

// Lets the buffer, and with it the pool, go.
void TensorCore::leave() {
  closed_ = true;
  positions_ = {};
  const std::shared_ptr<Buffer> left = std::move(buffer_);
  nb::gil_scoped_release released;
  left->abandon();
  const PoolLock settled(left->pool());  // whoever held the lock has settled it by now
}

}  // namespace vtensor::bind
