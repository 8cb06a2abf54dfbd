// The C++ half of a VTensor: its buffer, its length, its operations, and the storage, sizes and
// strides that torch has of it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "base/trace.h"
#include "bind/operation.h"
#include "bind/sharing.h"
#include "bind/torch_bridge.h"
#include "policy/sleep.h"
#include "tensor/buffer.h"

namespace vtensor::bind {

struct TensorSpec {
  std::vector<std::int64_t> sizes;  // sizes[grow_dim] is the initial length
  std::size_t grow_dim = 0;
  std::size_t capacity = 0;
  nb::object dtype;
  nb::object device;
  std::size_t item_size = 0;
  bool zeroed = false;          // positions that extend adds read as zeros
  bool move_when_full = false;  // if front shrinks used up the capacity, move instead of raising

  std::int64_t size(std::size_t dim, std::size_t length) const {
    return dim == grow_dim ? static_cast<std::int64_t>(length) : sizes[dim];
  }
};

// Methods take the VTensor first, and set its class. They are called with the GIL held. Each is one
// call from Python, so no exception from outside interrupts it (I17). They convert Python's
// arguments. Streams default to torch's current one.
class TensorCore {
 public:
  // Sets the Python classes of a VTensor, at the import of vtensor: open, with shared pages at
  // which torch's writes would fault, asleep, and closed.
  static void use_classes(nb::object open, nb::object copy_on_write, nb::object asleep,
                          nb::object closed);

  TensorCore(const std::shared_ptr<PagePool>& pool, TensorSpec spec);
  ~TensorCore();

  // Puts the tensor over this core's memory and grows it to its initial length.
  void attach(nb::handle self, std::size_t length);

  // Makes the mapper prepare the next `n` positions.
  void prepare(nb::handle n);
  void extend(nb::handle self, nb::handle n);
  void append(nb::handle self, nb::handle source);
  void shrink(nb::handle self, nb::handle n, nb::handle front, std::optional<Stream> stream);
  void truncate(nb::handle self, nb::handle length, std::optional<Stream> stream);
  void unshare(nb::handle self, nb::handle start, nb::handle stop);
  struct Reindexing {
    TensorCore* core;
    nb::handle self;
    std::vector<std::int64_t> index;
    std::vector<std::size_t> rows = {};       // that the index selects
    std::shared_ptr<Buffer> moved = nullptr;  // null if the rows stay in place
    nb::object strides = {};                  // of `moved`, a tuple
  };
  // Changes all of them, or none if one is refused. In the same call, updates the first dict of
  // each pair in `states` with the second.
  static void reindex(std::span<Reindexing> tensors,
                      std::span<const std::pair<nb::dict, nb::dict>> states);
  // Moves the tensor to a range of this capacity. The Python object stays.
  void reserve(nb::handle self, nb::handle capacity);
  std::unique_ptr<TensorCore> fork(nb::handle self, std::optional<Stream> stream);
  // Puts `moved`, a VTensor that has no core yet, over these pages, and closes this one.
  void reallocate(nb::handle self, nb::handle moved, nb::handle capacity);
  // Descriptors by which another process reads the tensor: of its shared range and of the pool's
  // memory. The caller closes them.
  ReaderFiles open_for_readers(nb::handle self);
  nb::object alias(nb::handle self);
  void close(nb::handle self, std::optional<Stream> stream);
  // Sets the tensor's class; `wake` once it is awake.
  void fall_asleep(nb::handle self, FallAsleep& sleep);
  void wake(nb::handle self);
  // Records that work in `stream` uses the tensor. Its pages are unmapped only after that work.
  void record_stream(Stream stream);
  // Holds the pages that the tensor has now for work that will be launched in the caller's stream.
  Generation* lease(const Caller& caller);

  bool closed() const { return !buffer_; }
  bool asleep() const { return buffer_ && buffer_->asleep.load(std::memory_order_acquire) != 0; }
  std::size_t length() const { return positions_.size(); }
  const TensorSpec& spec() const { return spec_; }
  Address address() const { return buffer_ ? buffer_->address_of(0, positions_.begin) : 0; }
  // Null if the tensor is closed.
  const std::shared_ptr<Buffer>& buffer() const { return buffer_; }

 private:
  class Operation;
  class PlainClass;

  // Without a buffer. It is made before one, so that what then throws leaves none without an owner.
  explicit TensorCore(TensorSpec spec) : spec_(std::move(spec)) {}

  void shrink_buffer() noexcept;
  void drop_positions(nb::handle self, const Caller& caller, std::size_t n, bool front);
  RowShape row_shape(std::size_t capacity) const;
  std::shared_ptr<Buffer> share(const Caller& caller, std::size_t capacity, bool moves);
  trace::Span traced(trace::What what, std::size_t first, std::size_t n) const;
  void require_room(const char* operation, std::size_t n) const;
  std::size_t checked_capacity(const char* operation, std::int64_t capacity) const;
  Interval stale_in(Interval added, std::size_t stale_until) const;
  // `stale_until_` in a buffer in which the positions begin at 0.
  std::size_t stale_until_moved() const { return sub_sat(stale_until_, positions_.begin); }
  bool grow(nb::handle self, const Operation& operation, std::size_t n, bool populate = false,
            const TensorFacts* source = nullptr);
  bool fill_from(const Caller& caller, const TensorFacts& source, std::size_t start, std::size_t n);
  void move_to_front(nb::handle self, const Operation& operation, std::size_t capacity,
                     std::size_t n, bool populate);
  template <typename Body>
  void while_detached(nb::handle self, const Body& body);
  // Torch's stride of a dimension over the buffer's rows, in elements; and the tuple of all. Throws
  // what Python does.
  std::int64_t stride(const Buffer& buffer, std::size_t dim) const;
  nb::object strides_of(const Buffer& buffer) const;
  // Whether torch has the storage, sizes and strides that were set last; facts_ is then what it
  // has.
  bool is_set(nb::handle self);
  // Publishes a generation over the positions, and sets it as the tensor's storage.
  void publish(nb::handle self);
  // `publish`, unless the present generation covers the positions.
  void update(nb::handle self);
  // Takes the tensor off its storage, so that only views hold generations of the buffer.
  void detach(nb::handle self);
  void set(nb::handle self, nb::object storage, Interval indices, std::size_t length);
  void begin_sharing(nb::handle self);
  void set_class(nb::handle self);
  void set_class_at_end(nb::handle self) noexcept;
  void leave(nb::handle self);
  // The buffer, and its capacity, are the tensor's from now on, and the one before is abandoned. If
  // the strides cannot be made, `buffer` is abandoned, and nothing is changed.
  void use(std::shared_ptr<Buffer> buffer);
  void use(std::shared_ptr<Buffer> buffer, nb::object strides) noexcept;
  // `use` of pages shared with another buffer. `stale_until`: as below (I7).
  void use_shared(std::shared_ptr<Buffer> buffer, std::size_t length, std::size_t stale_until);
  std::vector<std::size_t> chosen_rows(std::span<const std::int64_t> index) const;
  void take_rows(Reindexing& tensor) noexcept;

  std::shared_ptr<Buffer> buffer_;  // null once closed
  TensorSpec spec_;
  Interval positions_;
  nb::object strides_;  // of the buffer's rows, a tuple
  nb::object storage_;
  Interval published_;              // page indices under storage_
  TensorFacts facts_, source_;      // of the tensor, and of the last append; kept for their memory
  std::size_t stale_until_ = 0;     // positions below this may hold bytes that growth must not show
  bool may_copy_on_write_ = false;  // whether a page may be shared and a write to it fault
  OperationMutex mutex_{"tensor"};
};

}  // namespace vtensor::bind
