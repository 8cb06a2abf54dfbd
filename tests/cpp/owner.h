// An owner of a buffer as TensorCore is one: its operations follow one another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "policy/page_pool.h"
#include "tensor/buffer.h"

namespace vtensor {

// A generation over all that a buffer's owner has.
inline Generation* publish(Buffer& buffer) {
  return buffer.publish(buffer.indices_of(buffer.positions()));
}

class Owner {
 public:
  Owner(const std::shared_ptr<PagePool>& pool, const Caller& caller, const RowShape& shape)
      : caller_(caller), shape_(shape), buffer_(Buffer::create(pool, shape, caller)) {}
  ~Owner() { buffer_->abandon(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  std::size_t length() const { return positions_.size(); }

  // By `n` positions, or to the capacity. Returns the new ones.
  Interval grow(std::size_t n, bool populate) {
    buffer_->raise_error(caller_.operation);
    const Interval after{positions_.begin, std::min(shape_.capacity, positions_.end + n)};
    if (!buffer_->grow_within(caller_, after)) buffer_->grow(caller_, after, populate);
    const Interval added{positions_.end, after.end};
    positions_ = after;
    return added;
  }
  void shrink(std::size_t n, bool front) {
    n = std::min(n, length());
    positions_ = front ? Interval{positions_.begin + n, positions_.end}
                       : Interval{positions_.begin, positions_.end - n};
    if (positions_.empty()) positions_ = {};
    buffer_->use(caller_);
    buffer_->shrink_to(positions_);
  }
  void prepare(std::size_t n) { buffer_->prepare(std::min(shape_.capacity, positions_.end + n)); }

 protected:
  const Caller caller_;
  const RowShape shape_;
  const std::shared_ptr<Buffer> buffer_;
  Interval positions_;
};

}  // namespace vtensor
