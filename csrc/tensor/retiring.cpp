// Giving back: what no extent and no generation covers is unmapped once the work that may touch it
// is done, by the mapper or, in a pool without one, at once.
#include <algorithm>
#include <array>
#include <utility>

#include "base/errors.h"
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
  throw TimedOut(caller.operation, pool_->options().patience,
                 "work launched on the device that uses this tensor has not ended; nothing was "
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

void Buffer::give_back_unused() noexcept {
  if (busy_) return;  // the end of that comes here again
  const bool may_cache = !owned_ && generations_.empty() && asleep.load() == 0;
  if (may_cache && std::exchange(may_cache_, false)) try_to_cache();
  RangeClient::give_back_unused();
}

bool Buffer::ends() const { return RangeClient::ends() && cached_.empty(); }

bool Buffer::has_fences() const {
  return RangeClient::has_fences() || !cached_after_.empty() || cleaned_after_;
}

void Buffer::free_range() {
  follower_ = nullptr;
  if (host_ == nullptr) return RangeClient::free_range();
  range_.end(&host_->client->range());
  pool_->end_locked(std::exchange(host_, nullptr));
}

}  // namespace vtensor
