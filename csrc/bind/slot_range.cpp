#include "bind/slot_range.h"

#include <utility>

#include "bind/torch_face.h"

namespace vtensor::bind {

namespace {

constexpr const char* kMark = "_vtensor_slot_range";  // of a storage

}  // namespace

SlotRange::SlotRange(std::shared_ptr<const SlotCacheView> view, std::size_t kind, nb::object cache)
    : view_(std::move(view)), cache_(std::move(cache)) {
  const SlotCacheShape& shape = view_->cache->shape();
  const Buffer& range = *view_->cache->range(kind);
  begin_ = range.range().base();
  slots_ = shape.slots;
  row_bytes_ = range.range().row_bytes();
  item_bytes_ = shape.kinds[kind].item_bytes;
}

void SlotRange::mark(nb::handle storage, SlotRange range) {
  nb::setattr(storage, kMark, nb::cast(std::move(range)));
}

nb::object SlotRange::of(nb::handle tensor) {
  return nb::getattr(TorchFace::get().storage(tensor), kMark, nb::none());
}

std::optional<SlotRows> SlotRange::rows(std::size_t offset, std::size_t item_size,
                                        std::span<const std::int64_t> sizes,
                                        std::span<const std::int64_t> strides,
                                        std::size_t positions_dim) const {
  if (sizes.size() != strides.size() || positions_dim >= sizes.size()) return {};
  const std::size_t apart =
      positions_dim != 0 && sizes[0] > 1 ? static_cast<std::size_t>(strides[0]) * item_size : 0;
  const std::size_t step = sizes[positions_dim] > 1
                               ? static_cast<std::size_t>(strides[positions_dim]) * item_size
                               : item_bytes_;
  if (apart % row_bytes_ != 0 || step % item_bytes_ != 0) return {};
  return SlotRows{slots_, offset / row_bytes_, apart / row_bytes_,
                  static_cast<std::int64_t>(offset % row_bytes_ / item_bytes_),
                  static_cast<std::int64_t>(step / item_bytes_)};
}

std::optional<SlotRows> SlotRange::rows(const dlpack::Tensor& tensor,
                                        std::size_t positions_dim) const {
  const Address at = reinterpret_cast<Address>(tensor.data) + tensor.byte_offset;
  if (at < begin_) return {};  // an empty tensor, which says no address
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  return rows(at - begin_, tensor.dtype.bits / 8, {tensor.shape, rank}, {tensor.strides, rank},
              positions_dim);
}

bool SlotRange::ready(const SlotRows& rows, std::span<const std::int64_t> lengths,
                      std::int64_t added, std::size_t count) const {
  if (closed() || !view_->mutex->try_lock()) return false;
  const std::span<const std::int64_t> has = view_->cache->lengths();
  bool ready = true;
  for (std::size_t i = 0; i < count && ready; ++i)
    ready = rows.tokens(lengths[lengths.size() == 1 ? 0 : i] + added) <= has[rows.slot(i)];
  view_->mutex->unlock();
  return ready;
}

}  // namespace vtensor::bind
