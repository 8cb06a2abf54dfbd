#include "bind/slot_range.h"

#include <utility>

#include "base/errors.h"
#include "bind/arguments.h"
#include "bind/torch_bridge.h"

namespace vtensor::bind {

namespace {

constexpr const char* kMark = "_vtensor_slot_range";  // an attribute of a storage

}  // namespace

CacheReading::CacheReading(OpenCache& open)
    : lock_(open.mutex.hold("KVCache")), cache_(open.cache.get()) {
  if (cache_ == nullptr) throw Closed("[KVCache] the cache is closed: make a new one");
}

SlotRange::SlotRange(std::shared_ptr<OpenCache> open, std::size_t group, nb::object cache)
    : open_(std::move(open)), cache_(std::move(cache)), group_(group) {
  const SlotBuffers& buffers = open_->cache->buffers();
  const Buffer& range = *buffers.range(group);
  begin_ = range.range().base();
  slots_ = buffers.shape().slots;
  row_bytes_ = range.range().row_bytes();
  item_bytes_ = buffers.group(group).item_bytes;
}

void SlotRange::mark(nb::handle storage, SlotRange range) {
  nb::setattr(storage, kMark, nb::cast(std::move(range)));
}

nb::object SlotRange::of(nb::handle tensor) {
  try {
    return nb::getattr(TorchBridge::get().storage(tensor), kMark, nb::none());
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return nb::none();  // torch.func's wrappers have no storage
  }
}

std::optional<SlotRows> SlotRange::rows(const TensorFacts& tensor,
                                        std::size_t positions_dim) const {
  const auto at = reinterpret_cast<Address>(tensor.data);
  if (at < begin_) return {};  // an empty tensor, which has no address
  const auto bytes = [&](std::size_t dim) {
    return static_cast<std::size_t>(tensor.strides[dim]) * tensor.item_bytes;
  };
  const std::size_t apart = positions_dim != 0 && tensor.shape[0] > 1 ? bytes(0) : 0;
  const std::size_t step = tensor.shape[positions_dim] > 1 ? bytes(positions_dim) : item_bytes_;
  if (apart % row_bytes_ != 0 || step % item_bytes_ != 0) return {};
  const std::size_t offset = at - begin_;
  return SlotRows{slots_, offset / row_bytes_, apart / row_bytes_,
                  static_cast<std::int64_t>(offset % row_bytes_ / item_bytes_),
                  static_cast<std::int64_t>(step / item_bytes_)};
}

void SlotRange::require(const char* operation, const SlotRows& rows,
                        std::span<const RowNeed> needed) const {
  const CacheReading cache(*open_);
  for (const RowNeed& need : needed) {
    const std::size_t slot = rows.slot(need.row);
    const std::int64_t tokens = rows.tokens(need.positions), has = cache->length_here(slot, group_);
    if (tokens > has)
      refuse(operation, tokens, " tokens of slot ", slot,
             " are to be read or written, step() has made ", has,
             " ready: call step(lengths) with those that are appended first, or pass fewer");
  }
}

nb::object SlotRange::open_cache() const {
  nb::object cache = cache_();
  if (open_->cache == nullptr || cache.is_none())
    throw Closed("[KVCache] the cache whose layer this is has been closed: make a new one");
  return cache;
}

}  // namespace vtensor::bind
