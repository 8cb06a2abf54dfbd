#include "tensor/buffer.h"

#include <algorithm>
#include <string>

#include "base/align.h"
#include "base/errors.h"
#include "base/trace.h"
#include "tensor/row_faults.h"

namespace vtensor {

std::shared_ptr<Buffer> Buffer::create(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                       const Caller& caller) {
  std::shared_ptr<Buffer> cached;
  {
    const PoolLock lock(pool);
    pool->reap();
    // Buffers alone are reusable.
    cached = std::static_pointer_cast<Buffer>(pool->cached().find(shape));
  }
  if (cached && cached->reuse_cached(caller)) return cached;
  return make(pool, shape, caller);
}

std::shared_ptr<Buffer> Buffer::make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                     const Caller& caller, std::unique_ptr<faults::Range> told) {
  const std::size_t page = pool->page_size();
  const auto bytes = checked_multiply(shape.capacity, shape.item_bytes);
  const auto too_large = [&] {
    return CapacityExceeded(
        "[" + std::string(caller.operation) + "] capacity of " + std::to_string(shape.capacity) +
        " positions of " + std::to_string(shape.item_bytes) + " bytes in " +
        std::to_string(shape.rows) + " rows passes the address space: lower the capacity");
  };
  // 2^47 bytes are the addresses of a process on x86-64.
  constexpr std::size_t limit = std::size_t{1} << 47;
  if (!bytes || *bytes > limit) throw too_large();
  const std::size_t row_pages = std::max<std::size_t>(1, ceil_div(shape.phase + *bytes, page));
  const auto pages = checked_multiply(row_pages, shape.rows);
  if (!pages || *pages > limit / page) throw too_large();

  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages));
  if (told == nullptr) {
    auto follower = std::make_unique<RowFaults>(shape);
    buffer->follower_ = follower.get();
    told = std::move(follower);
  }
  PoolLock lock(pool);
  pool->reap();
  const Address base = pool->driver().reserve(*pages);
  buffer->reserved_ = true;
  buffer->known_ =
      faults::know(std::move(told), base, *pages * page, !pool->traits().device.on_host());
  buffer->range_.begin(base, pool->add(buffer.get()));
  buffer->work_.note(caller);
  ++pool->counted.tensors_fresh;
  return buffer;
}

std::shared_ptr<Buffer> Buffer::place(const std::shared_ptr<Buffer>& host, Address base,
                                      const RowShape& shape, const Caller& caller) {
  const std::shared_ptr<PagePool>& pool = host->pool_;
  const std::size_t row_pages =
      ceil_div(shape.phase + shape.capacity * shape.item_bytes, pool->page_size());
  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages));
  std::unique_ptr<Generation> pin(host->publish());
  PoolLock lock(pool);
  buffer->work_.note(caller);
  try {
    buffer->range_.begin(base, pool->add(buffer.get()));
  } catch (...) {
    pool->end_locked(pin.release());
    throw;
  }
  buffer->host_ = pin.release();
  buffer->reserved_ = true;
  return buffer;
}

Buffer::Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages)
    : RangeClient(pool, shape, row_pages) {}

Interval Buffer::indices_of(Interval positions) const {
  if (positions.empty()) return {};
  return {(shape_.phase + positions.begin * shape_.item_bytes) / range_.page_size(),
          ceil_div(shape_.phase + positions.end * shape_.item_bytes, range_.page_size())};
}

void Buffer::set_positions(Interval positions) {
  positions_ = positions;
  if (follower_ != nullptr) follower_->follow(positions, owned_);
}

bool Buffer::is_ready(Interval positions) const {
  const Interval added = indices_of({positions_.end, positions.end});
  if (!extent_.contains(added) && (added.end > ready_.end || !ready_after_.empty())) return false;
  for (std::size_t row = 0; range_.copy_on_write() != 0 && row < range_.rows(); ++row) {
    for (std::size_t index = added.begin; index < added.end; ++index) {
      if (!is_writable(range_.at(row, index))) return false;
    }
  }
  return true;
}

void Buffer::grow_ready(const Caller& caller, Interval positions) {
  work_.note(caller.stream);
  if (!placed()) pace_.step(positions.end - positions_.end);
  set_positions(positions);
  const Interval wanted = indices_of(positions);
  if (wanted.end > extent_end()) {
    range_.event(trace::What::revive, {extent_end(), wanted.end});
    extent_ = wanted;
    ++pool_->counted.growths_ready;
    set_ready({wanted.end, ready_.end});
    if (!placed()) mark_pace();
  }
  if (!placed()) look_ahead();
}

bool Buffer::grow_within(const Caller& caller, Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock || !is_ready(positions)) return false;
  grow_ready(caller, positions);
  return true;
}

Generation* Buffer::publish() {
  const PoolLock lock(pool_);
  return publish_locked(extent_);
}

Generation* Buffer::try_publish() {
  const PoolLock lock(pool_, std::try_to_lock);
  return lock ? publish_locked(extent_) : nullptr;
}

bool Buffer::published() {
  PoolLock lock(pool_);
  pool_->reap();
  return !generations_.empty();
}

std::vector<Reservation::Bytes> Buffer::bytes_of(Interval positions) const {
  std::vector<Reservation::Bytes> bytes;
  for (std::size_t row = 0; !positions.empty() && row < range_.rows(); ++row)
    bytes.push_back({address_of(row, positions.begin), positions.size() * shape_.item_bytes});
  return bytes;
}

void Buffer::zero(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  for (const Reservation::Bytes bytes : bytes_of(positions)) range_.zero(bytes, caller.stream);
}

bool Buffer::copy_on_write() {
  PoolLock lock(pool_);
  return range_.copy_on_write() != 0;
}

void Buffer::require_whole(const char* operation) const {
  if (const std::size_t lost = range_.count_quarantined(extent_)) {
    throw Error(
        "[" + std::string(operation) + "] " + std::to_string(lost) +
        " pages of the tensor were lost in a driver call that could not be undone: close it");
  }
}

}  // namespace vtensor
