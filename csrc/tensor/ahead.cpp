#include "tensor/ahead.h"

#include <chrono>

namespace vtensor {
namespace {

// Bounds of look-ahead: these bytes and pages of a row in any case, else one part in kShareAhead of
// the tensor's extent.
constexpr std::size_t kLeastAhead = 1 << 20;
constexpr std::size_t kLeastPagesAhead = 4;
constexpr std::size_t kShareAhead = 16;

}  // namespace

void Ahead::mark_pace(std::size_t position) {
  pace_.mark(position, static_cast<std::uint64_t>(
                           std::chrono::steady_clock::now().time_since_epoch().count()));
}

// Bounded by the capacity and by a share of the extent, so that a pool's look-ahead is a share of
// what its tensors store.
std::size_t Ahead::lead(std::size_t position, Interval extent) const {
  const std::size_t index_bytes = range_.rows() * range_.page_size();
  const std::size_t least = std::max(kLeastAhead / index_bytes, kLeastPagesAhead);
  const std::size_t indices = std::min(pool_.options().prefetch / index_bytes,
                                       std::max(least, extent.size() / kShareAhead));
  const std::size_t wanted = position + pace_.lead(pool_.wanting().horizon());
  const std::size_t allowed = geometry_.whole_below(extent.end + indices);
  return std::max(position, std::min({wanted, shape_.capacity, allowed}));
}

std::size_t Ahead::due(std::size_t position, Interval extent) const {
  if (!pool_.looks_ahead() || position + pace_.least(pool_.wanting().horizon()) <= ready_until_)
    return 0;
  const std::size_t end = lead(position, extent);
  // Where the bounds allow less than the pace asks for: ask again once half of it is used up.
  const bool enough = position + (end - position) / 2 <= ready_until_;
  return enough || pool_.store().unused() == 0 ? 0 : end;
}

}  // namespace vtensor
