// Reuse: a freed buffer stays mapped for the next tensor of its shape, which takes it whole.
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
// buffer of its own range from the first page on, because its next owner is another
// tensor, which begins there.
void Buffer::try_to_cache() {
  if (range_.quarantined() != 0 || shape_.phase != 0 || !reserved_) return;
  const auto usable = [](const Entry& entry) {
    return is_writable(entry) && entry.page->references == 1;
  };
  const std::size_t end = range_.reserved();
  Interval indices{0, range_.first_not({0, end}, usable)};
  while (host_ != nullptr && indices.empty() && indices.end < end) {
    indices.begin = indices.end + 1;
    indices.end = range_.first_not({indices.begin, end}, usable);
  }
  const std::size_t pages = indices.size() * range_.rows();
  if (pages == 0 || (host_ == nullptr && !pool_->may_cache(pages))) return;
  try {
    cached_after_ = fences();
    pool_->cache(shared_from_this(), pages_to_count(pages));
  } catch (...) {
    return;  // then they go
  }
  cached_ = indices;
  cached_at_ = std::chrono::steady_clock::now();
  unmap_.remove(cached_);
  const bool dirty = pool_->options().zero != ZeroPolicy::never;
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t index = indices.begin; index < indices.end; ++index)
      range_.at(row, index).page->dirty = dirty;
  }
  range_.event(trace::What::cache, indices);
}

void Buffer::evict(bool aged) {
  unmap_.touch(cached_, aged);
  pool_->cached().remove(*this, pages_to_count(cached_.size() * range_.rows()));
  cached_ = {};
  cached_after_.clear();
  if (busy_ || !pool_->looks_ahead()) return give_back_unused();
  unmap_.try_again();
  pool_->settle_later(shared_from_this());  // its fences cost driver calls
}

void Buffer::keep_nothing() {
  may_cache_ = false;
  if (!cached_.empty()) evict();
}

bool Buffer::is_to_zero(const Entry& entry) const {
  return owned_ ? is_writable(entry) && !range_.clean(*entry.page) : entry.page->dirty;
}

bool Buffer::to_clean() const {
  const auto done = [this](const Entry& entry) VT_LOCKED { return !is_to_zero(entry); };
  return range_.first_not(to_zero(), done) < to_zero().end;
}

// Up to `pages` pages that are to be zeroed, once the last owner's work is done.
bool Buffer::claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) {
  if (busy()) return false;
  try {
    if (!all_passed(driver_, owned_ ? ready_after_ : cached_after_)) return false;
  } catch (const Error&) {
    return false;  // the last owner's work cannot be asked about now
  }
  for (std::size_t row = 0; row < range_.rows() && pages != 0; ++row) {
    const Interval indices = to_zero();
    for (std::size_t index = indices.begin; index < indices.end && pages != 0; ++index) {
      const std::size_t first = index;
      while (index < indices.end && pages != 0 && is_to_zero(range_.at(row, index))) {
        ++index;
        --pages;
      }
      if (index > first) runs.push_back({row, {first, index}});
    }
  }
  busy_ = !runs.empty();
  return busy_;
}

FencePtr Buffer::clean(std::span<const Reservation::Run> runs) {
  const Stream stream = driver_.side_stream();
  for (const Reservation::Run& run : runs)
    range_.zero({range_.address(run), run.indices.size() * range_.page_size()}, stream);
  return driver_.fence(stream);
}

void Buffer::enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                            std::exception_ptr error) {
  busy_ = false;
  work_.note(driver_.side_stream());
  if (error && owned_) {
    pool_->cached().unclean.remove(hooks.unclean);
    failed(std::move(error));  // growth zeroes them itself
  } else if (error) {
    if (!cached_.empty()) evict();  // its zeroing is refused: not for the next owner
  } else {
    for (const Reservation::Run& run : runs) {
      for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
        range_.at(run.row, index).page->dirty = false;
    }
    if (owned_) {
      if (zeroed) ready_after_.push_back(std::move(zeroed));
      set_ready(usable(extent_end(), std::max({ready_.end, want_end_, unclean_.end})));
      unclean_.begin = std::max(unclean_.begin, ready_.end);
      if (unclean_.empty()) unclean_ = {};
    } else if (zeroed) {
      cleaned_after_ = std::move(zeroed);
    }
  }
  pool_->changed();
  give_back_unused();
}

bool Buffer::reusable() const {
  return !cached_.empty() && range_.quarantined() == 0 &&
         range_.mapped() == cached_.size() * range_.rows();
}

bool Buffer::reuse_cached(const Caller& caller) {
  PoolLock lock(pool_);
  if (cached_.empty()) return false;
  const Busy busy(*this, lock, caller);  // the mapper may be zeroing a part of it
  if (!reusable()) return false;
  reuse(caller);
  ++pool_->counted.tensors_reused;
  return true;
}

void Buffer::reuse(const Caller& caller) {
  is_quiet();
  unmap_.look_at_nothing();
  unmap_.clear();
  owner_end_ = std::make_unique<Generation>();
  owned_ = may_cache_ = true;
  set_positions({});
  range_.set_owner(pool_->next_id());
  pace_ = {};
  take_error();
  // The last owner's streams are done with, but for what these say.
  ready_after_ = std::exchange(cached_after_, {});
  if (cleaned_after_) ready_after_.push_back(std::exchange(cleaned_after_, nullptr));
  work_.clear();
  work_.note(caller);
  std::size_t clean = range_.first_not(cached_, is_zeroed);
  // What is missing before them, if anything, is mapped before they are reached.
  if (cached_.begin != 0) clean = 0;
  if (clean < cached_.end) unclean_ = {std::max(clean, cached_.begin), cached_.end};
  range_.event(trace::What::reuse, cached_);
  pool_->cached().remove(*this, pages_to_count(cached_.size() * range_.rows()));
  if (placed()) reused_ = cached_;
  cached_ = {};
  set_ready({0, clean});
  if (!ready_after_.empty()) pool_->settle_later(shared_from_this());
}

}  // namespace vtensor
