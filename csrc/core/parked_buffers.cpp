#include "core/parked_buffers.h"

#include <algorithm>

#include "core/buffer.h"

namespace vtensor {

std::shared_ptr<Buffer> ParkedBuffers::oldest_unplaced() const {
  const auto found =
      std::find_if(all_.begin(), all_.end(), [](const auto& buffer) { return !buffer->placed(); });
  return found == all_.end() ? nullptr : *found;
}

std::shared_ptr<Buffer> ParkedBuffers::find(const RowShape& shape) const {
  const auto alike = by_shape_.find(shape);
  if (alike == by_shape_.end()) return nullptr;
  std::shared_ptr<Buffer> busy;
  for (const std::shared_ptr<Buffer>& buffer : alike->second) {
    if (!buffer->adoptable()) continue;
    if (!buffer->busy()) return buffer;
    if (!busy) busy = buffer;
  }
  return busy;
}

void ParkedBuffers::add(const std::shared_ptr<Buffer>& buffer, std::size_t pages, bool unclean) {
  by_shape_[buffer->shape()].add_first(buffer->places.parked_alike, buffer);
  all_.add(buffer->places.parked, buffer);
  if (unclean) this->unclean.add(buffer->places.unclean, buffer);
  pages_ += pages;
}

void ParkedBuffers::remove(Buffer& buffer, std::size_t pages) {
  const std::shared_ptr<Buffer> kept = all_.remove(buffer.places.parked);
  const auto alike = by_shape_.find(buffer.shape());
  alike->second.remove(buffer.places.parked_alike);
  if (alike->second.empty()) by_shape_.erase(alike);
  unclean.remove(buffer.places.unclean);
  pages_ -= pages;
}

}  // namespace vtensor
