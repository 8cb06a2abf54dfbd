// Parking: a freed buffer stays mapped for the next tensor of its shape, which takes it whole.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "tensor/buffer.h"

namespace vtensor {
namespace {

bool is_zeroed(const Entry& entry) { return !entry.page->dirty; }

}  // namespace

// Keeps the pages that a new owner could use: neighbours, mapped in every row and not shared; in a
// buffer of its own range from the first slot on, because its next owner is another
// tensor, which begins there.
void Buffer::try_to_park() {
  if (range_.quarantined() != 0 || shape_.phase != 0 || !reserved_) return;
  const auto usable = [](const Entry& entry) {
    return is_writable(entry) && entry.page->references == 1;
  };
  const std::size_t end = range_.reserved();
  Interval slots{0, range_.first_not({0, end}, usable)};
  while (host_ != nullptr && slots.empty() && slots.end < end) {
    slots.begin = slots.end + 1;
    slots.end = range_.first_not({slots.begin, end}, usable);
  }
  const std::size_t pages = slots.size() * range_.rows();
  if (pages == 0 || (host_ == nullptr && !pool_->may_park(pages))) return;
  try {
    parked_after_ = fences();
    pool_->park(shared_from_this(), pages_to_count(pages));
  } catch (...) {
    return;  // then they go
  }
  parked_ = slots;
  parked_at_ = std::chrono::steady_clock::now();
  unmap_.remove(parked_);
  const bool dirty = pool_->options().zero != ZeroPolicy::never;
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t slot = slots.begin; slot < slots.end; ++slot)
      range_.at(row, slot).page->dirty = dirty;
  }
  range_.event(trace::What::park, slots);
}

void Buffer::unpark(bool aged) {
  aged_ |= aged;
  unmap_.touch(parked_);
  pool_->parked().remove(*this, pages_to_count(parked_.size() * range_.rows()));
  parked_ = {};
  parked_after_.clear();
  give_back_unused();
}

void Buffer::keep_nothing() {
  may_park_ = false;
  if (!parked_.empty()) unpark();
}

bool Buffer::to_clean() const { return range_.first_not(parked_, is_zeroed) < parked_.end; }

// Up to `pages` parked pages that are to be zeroed, once the last owner's work is done.
bool Buffer::claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) {
  if (busy()) return false;
  try {
    if (!all_passed(driver_, parked_after_)) return false;
  } catch (const Error&) {
    return false;  // the last owner's work cannot be asked about now
  }
  for (std::size_t row = 0; row < range_.rows() && pages != 0; ++row) {
    for (std::size_t slot = parked_.begin; slot < parked_.end && pages != 0; ++slot) {
      const std::size_t first = slot;
      while (slot < parked_.end && pages != 0 && range_.at(row, slot).page->dirty) {
        ++slot;
        --pages;
      }
      if (slot > first) runs.push_back({row, {first, slot}});
    }
  }
  busy_ = !runs.empty();
  return busy_;
}

FencePtr Buffer::clean(std::span<const Reservation::Run> runs) {
  const Stream stream = driver_.side_stream();
  for (const Reservation::Run& run : runs)
    range_.zero({range_.address(run), run.slots.size() * range_.page_size()}, stream);
  return driver_.fence(stream);
}

void Buffer::enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                            std::exception_ptr error) {
  busy_ = false;
  work_.note(driver_.side_stream());
  if (error) {
    if (!parked_.empty()) unpark();  // its zeroing is refused: not for the next owner
  } else {
    for (const Reservation::Run& run : runs) {
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot)
        range_.at(run.row, slot).page->dirty = false;
    }
    if (zeroed) cleaned_after_ = std::move(zeroed);
  }
  pool_->changed();
  give_back_unused();
}

bool Buffer::adoptable() const {
  return !parked_.empty() && range_.quarantined() == 0 &&
         range_.mapped() == parked_.size() * range_.rows();
}

bool Buffer::adopt_parked(const Caller& caller) {
  PoolLock lock(pool_);
  if (parked_.empty()) return false;
  const Busy busy(*this, lock, caller);  // the mapper may be zeroing a part of it
  if (!adoptable()) return false;
  adopt(caller);
  ++pool_->counted.tensors_adopted;
  return true;
}

void Buffer::adopt(const Caller& caller) {
  is_quiet();
  unmap_.look_at_nothing();
  unmap_.clear();
  owner_end_ = std::make_unique<Generation>();
  owned_ = may_park_ = true;
  range_.set_owner(pool_->next_id());
  pace_ = {};
  take_error();
  // The last owner's streams are done with, but for what these say.
  ready_after_ = std::exchange(parked_after_, {});
  if (cleaned_after_) ready_after_.push_back(std::exchange(cleaned_after_, nullptr));
  work_.clear();
  work_.note(caller);
  std::size_t clean = range_.first_not(parked_, is_zeroed);
  // What is missing before them, if anything, is mapped before they are reached.
  if (parked_.begin != 0) clean = 0;
  if (clean < parked_.end) foreign_ = {std::max(clean, parked_.begin), parked_.end};
  range_.event(trace::What::adopt, parked_);
  pool_->parked().remove(*this, pages_to_count(parked_.size() * range_.rows()));
  if (placed()) adopted_ = parked_;
  parked_ = {};
  set_ready({0, clean});
  if (!ready_after_.empty()) pool_->settle_later(shared_from_this());
}

}  // namespace vtensor
