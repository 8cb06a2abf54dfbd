// The C++ half of a VTensor: its buffer, its length, and the storage and shape that torch has.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "base/trace.h"
#include "bind/operation_lock.h"
#include "bind/torch_bridge.h"
#include "tensor/buffer.h"

namespace vtensor::bind {

class SleepCore;

struct TensorSpec {
  std::vector<std::int64_t> sizes;  // sizes[grow_dim] is the initial length
  std::size_t grow_dim = 0;
  std::size_t capacity = 0;
  nb::object dtype;
  nb::object device;
  std::size_t item_size = 0;
  bool zeroed = false;          // positions that extend adds read as zeros
  bool move_when_full = false;  // if front shrinks used up the capacity, move instead of raising
};

// The Python classes of a VTensor: open, with shared pages at which torch's writes would fault,
// asleep, and closed.
struct TensorClasses {
  nb::object open, copy_on_write, asleep, closed;
};

// Methods take the VTensor first, and set its class. They are called with the GIL held. Each is one
// call from Python, so no exception from outside interrupts it (I17).
class TensorCore {
 public:
  // Called once, at the import of vtensor.
  static void use_classes(TensorClasses classes);

  TensorCore(const std::shared_ptr<PagePool>& pool, TensorSpec spec);
  // Over pages shared with another buffer. `unclean`: bytes past `length` in them are not this
  // tensor's (I7).
  TensorCore(std::shared_ptr<Buffer> buffer, TensorSpec spec, std::size_t length, bool unclean);
  ~TensorCore();
  TensorCore(const TensorCore&) = delete;
  TensorCore& operator=(const TensorCore&) = delete;

  // Puts the tensor over this core's memory and grows it to its initial length.
  void attach(nb::handle self, std::size_t length);

  // Streams default to torch's current one.

  // Makes the mapper prepare the next `n` positions.
  void prepare(std::int64_t n);
  void extend(nb::handle self, std::int64_t n);
  void append(nb::handle self, nb::handle source);
  void shrink(nb::handle self, std::int64_t n, bool front, std::optional<Stream> stream);
  void truncate(nb::handle self, std::int64_t length, std::optional<Stream> stream);
  void unshare(nb::handle self, std::int64_t start, std::int64_t stop);
  struct Reindexing {
    TensorCore* core;
    nb::handle self;
    std::vector<std::int64_t> index;
  };
  // Changes all of them, or none if one is refused. In the same call, updates the first dict of
  // each pair in `states` with the second.
  static void reindex(std::span<Reindexing> tensors,
                      std::span<const std::pair<nb::dict, nb::dict>> states);
  // Moves the tensor to a range of this capacity. The Python object stays.
  void reserve(nb::handle self, std::int64_t capacity);
  std::unique_ptr<TensorCore> fork(nb::handle self, std::optional<Stream> stream);
  // Puts `moved`, a VTensor that has no core yet, over these pages, and closes this one.
  void reallocate(nb::handle self, nb::handle moved, std::int64_t capacity);
  nb::object alias(nb::handle self);
  void close(nb::handle self, std::optional<Stream> stream);
  // Sets the tensor's class; `wake` once it is awake.
  void fall_asleep(nb::handle self, SleepCore& sleep);
  void wake(nb::handle self);
  // Records that work in `stream` uses the tensor. Its pages are unmapped only after that work.
  void record_stream(Stream stream);

  bool closed() const { return !open_; }
  bool asleep() const { return open_ && buffer_->asleep.load(std::memory_order_acquire) != 0; }
  std::size_t length() const { return positions_.size(); }
  std::size_t capacity() const { return spec_.capacity; }
  const TensorSpec& spec() const { return spec_; }
  Address address() const { return open_ ? buffer_->address_of(0, positions_.begin) : 0; }
  const std::shared_ptr<Buffer>& buffer() const { return buffer_; }

 private:
  class Operation;
  class Undressed;

  Caller caller(const char* operation, std::optional<Stream> stream = {}) const;
  void retract(const Caller& caller);
  void drop_positions(nb::handle self, const Caller& caller, std::int64_t n, bool front);
  nb::object sizes(std::size_t length) const;
  RowShape row_shape(std::size_t capacity, std::size_t phase) const;
  Interval stale_in(Interval added) const;
  std::size_t phase_of_first() const;
  trace::Span traced(trace::What what, std::size_t first, std::size_t n) const;
  bool is_ours(nb::handle self);
  void require_room(const char* operation, std::size_t n) const;
  template <typename Fill>
  void grow(nb::handle self, const Caller& caller, std::size_t n, bool populate, Fill fill);
  void move_to_front(nb::handle self, const Caller& caller, std::size_t n, bool populate);
  void publish(nb::handle self);
  void reshape(nb::handle self);
  void detach(nb::handle self);
  void dress(nb::handle self) noexcept;
  void leave(nb::handle self);
  void use(std::shared_ptr<Buffer> buffer);
  std::vector<std::size_t> chosen_rows(std::span<const std::int64_t> index) const;
  void take_rows(std::shared_ptr<Buffer> rows, std::size_t batch);
  bool fill_from(const TensorFacts& source, std::size_t start, std::size_t n);

  std::shared_ptr<Buffer> buffer_;
  TensorSpec spec_;
  nb::object strides_;
  std::vector<std::int64_t> stride_values_;
  Interval positions_;
  nb::object storage_;           // the tensor's
  Interval published_;           // slots under storage_
  std::size_t stale_until_ = 0;  // positions below this may hold bytes that growth must not show
  bool open_ = true;
  bool may_copy_on_write_ = false;  // whether a page may be shared and a write to it fault
  OperationMutex mutex_;
  TensorFacts facts_;  // from the last is_ours(), under mutex_
};

}  // namespace vtensor::bind
