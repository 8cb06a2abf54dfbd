#include "core/wanting_buffers.h"

#include <cstdint>
#include <utility>

#include "core/buffer.h"

namespace vtensor {

using std::chrono::steady_clock;

void WantingBuffers::add(const std::shared_ptr<Buffer>& buffer) {
  all_.add(buffer->places.wanting, buffer);
}

void WantingBuffers::remove(Buffer& buffer) noexcept {
  all_.remove(buffer.places.wanting);
  if (all_.empty()) since_.reset();
}

void WantingBuffers::requeue(Buffer& buffer) noexcept {
  if (const auto kept = all_.remove(buffer.places.wanting)) all_.add(buffer.places.wanting, kept);
}

void WantingBuffers::served(Buffer& buffer) noexcept {
  const auto since = since_;
  remove(buffer);
  if (!all_.empty()) return;
  const bool ignored = std::exchange(ignored_, false);
  if (since && !ignored)
    horizon_.served(static_cast<std::uint64_t>((steady_clock::now() - *since).count()));
}

void WantingBuffers::measure() noexcept {
  if (!since_) since_ = steady_clock::now();
}

}  // namespace vtensor
