// Giving back: what no extent and no generation covers is unmapped once the work that may touch it
// is done, by the mapper or, in a pool without one, at once.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "tensor/buffer.h"
#include "vmm/wait.h"

namespace vtensor {

std::vector<FencePtr> Buffer::work() {
  const PoolLock lock(pool_);
  return fences();
}

Generation* Buffer::lease(const Caller& caller) {
  Generation* generation = publish();
  const PoolLock lock(pool_);
  if (!owned_) {  // by another thread, meanwhile
    pool_->end_locked(generation);
    throw Closed("[lease] a tensor is closed: make a new one");
  }
  try {
    raise_if_asleep();
  } catch (...) {
    pool_->end_locked(generation);
    throw;
  }
  generation->is_lease = true;
  if (driver_.traits().asynchronous) work_.begin_lease(caller);
  return generation;
}

void Buffer::end_lease(const Caller& caller, FencePtr after) {
  if (!driver_.traits().asynchronous) return;
  const PoolLock lock(pool_);
  work_.end_lease(caller, std::move(after));
}

bool Buffer::is_quiet() {
  if (cleaned_after_ && driver_.passed(*cleaned_after_)) cleaned_after_ = nullptr;
  const bool ready = all_passed(driver_, ready_after_);
  return all_passed(driver_, cached_after_) && ready && !cleaned_after_;
}

// Waits for the work of all streams that use the pages. Requires: busy.
void Buffer::await_streams(PoolLock& lock, const Caller& caller) {
  work_.note(caller);
  const std::vector<FencePtr> all = fences();
  if (all.empty()) return;
  bool passed = true;
  {
    const Waiting waiting(lock);
    for (const FencePtr& fence : all)
      passed = passed && wait_for(driver_, fence, pool_->options().patience);
  }
  if (passed) return;
  throw TimedOut("[" + std::string(caller.operation) + "] timed out after " +
                 seconds_text(pool_->options().patience) +
                 ": work launched on the device that uses this tensor has not ended; nothing was "
                 "changed");
}

void Buffer::forget(const Generation* generation) noexcept {
  generations_.remove(generation);
  if (!extent_.contains(generation->indices)) unmap_.touch(generation->indices);
}

void Buffer::retract(const Caller& caller, Interval positions, std::size_t keep) {
  PoolLock lock(pool_);
  work_.note(caller);
  // Not what is only wanted: the mapper may be unmapping it.
  const std::size_t mapped_end = std::max(extent_end(), ready_.end);
  unmap_.touch(extent_);
  unmap_.touch(ahead());
  set_positions(positions);
  extent_ = indices_of(positions);
  // What is truncated and soon written again stays, as far as the look-ahead goes.
  std::size_t kept_end = extent_.end;
  if (placed()) {
    if (!extent_.empty())
      kept_end = indices_of({0, std::clamp(keep, positions.end, shape_.capacity)}).end;
    unclean_.end = std::min(unclean_.end, kept_end);
    if (unclean_.empty()) unclean_ = {};
  } else if (pool_->looks_ahead() && !extent_.empty()) {
    kept_end = indices_of({positions.begin,
                           limit_lead(positions.end + pace_.lead(pool_->wanting().horizon()))})
                   .end;
  }
  want_end_ = 0;
  set_ready(usable(extent_end(), std::min(mapped_end, kept_end)));
  give_back_unused();
}

void Buffer::leave() noexcept {
  unmap_.touch({0, range_.reserved()});
  forget_expected();
  owned_ = false;
  set_positions({});
  extent_ = unclean_ = {};
  if (std::exchange(wanting_, false)) pool_->wanting().remove(*this);
  want_end_ = 0;
  set_ready({});
}

std::vector<Interval> Buffer::uncovered() const {
  if (unmap_.touched().empty()) return {};
  std::array<Interval, 3> kept{extent_, ahead(), cached_};
  std::sort(kept.begin(), kept.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  std::vector<Interval> rest;
  generations_.covered().gaps(unmap_.touched(), [&kept, &rest](Interval gap) {
    for (const Interval interval : kept) {
      if (intersection(interval, gap).empty()) continue;
      rest.push_back({gap.begin, interval.begin});
      gap.begin = std::max(gap.begin, interval.end);
    }
    rest.push_back(gap);
  });
  std::erase_if(rest, [this](Interval indices) VT_LOCKED {
    return indices.empty() || range_.count_mapped(indices) == 0;
  });
  return rest;
}

std::size_t Buffer::pages_leaving() const { return pages_leaving({0, range_.reserved()}); }

std::size_t Buffer::pages_leaving(Interval within) const {
  if (unmap_.refusal()) return 0;
  std::vector<Interval> leaving = unmap_.indices();
  for (const Interval indices : uncovered()) leaving.push_back(indices);
  std::size_t pages = 0;
  for (const Interval indices : leaving)
    pages += range_.count_mapped(intersection(indices, within));
  return pages;
}

bool Buffer::begin_unmapping() {
  if (!unmap_.indices().empty()) return true;
  std::vector<Interval> indices = uncovered();
  std::vector<FencePtr> after;
  if (!indices.empty()) after = fences();
  for (const Interval interval : indices) range_.event(trace::What::retire, interval);
  unmap_.begin(std::move(indices), std::move(after));
  return !unmap_.indices().empty();
}

void Buffer::give_back_unused() noexcept {
  if (busy_) return;  // the end of that comes here again
  const bool may_cache = !owned_ && generations_.empty() && asleep.load() == 0;
  if (may_cache && std::exchange(may_cache_, false)) try_to_cache();
  if (!pool_->looks_ahead()) {
    if (!settle(nullptr)) pool_->settle_later(shared_from_this());
    return;
  }
  unmap_.try_again();
  try {
    const bool ends = !owned_ && reserved_ && generations_.empty() && cached_.empty();
    if (begin_unmapping() || ends || !ready_after_.empty() || !cached_after_.empty() ||
        cleaned_after_) {
      pool_->settle_later(shared_from_this());
    }
  } catch (...) {
    unmap_.refused(std::current_exception());
    pool_->settle_later(shared_from_this());
  }
}

bool Buffer::release_range() {
  if (owned_ || !reserved_ || !generations_.empty() || !cached_.empty()) return true;
  if (range_.mapped() != 0) return false;
  known_.reset();
  follower_ = nullptr;
  if (range_.quarantined() == 0 && host_ == nullptr)
    driver_.free_range(range_.base(), range_.row_pages() * range_.rows());
  range_.end(host_ == nullptr ? nullptr : &host_->client->range());
  if (host_ != nullptr) pool_->end_locked(std::exchange(host_, nullptr));
  reserved_ = false;
  pool_->remove(this);
  return true;
}

}  // namespace vtensor
