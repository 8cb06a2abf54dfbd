// Looking ahead: which pages should be ready before they are needed, and what the mapper does for
// that.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "tensor/buffer.h"

namespace vtensor {
namespace {

// What may be ahead of a tensor: so many bytes and pages of a row in any case, and beyond that one
// part in so many of what it stores.
constexpr std::size_t kLeastAhead = 1 << 20;
constexpr std::size_t kLeastPagesAhead = 4;
constexpr std::size_t kShareAhead = 16;

}  // namespace

// The pages behind the extent that are kept or made ready.
Interval Buffer::ahead() const {
  if (!owned_) return {};
  const Interval indices{extent_end(), std::max({ready_.end, want_end_, unclean_.end})};
  return indices.empty() ? Interval{} : indices;
}

void Buffer::set_ready(Interval indices) {
  ready_ = indices.empty() ? Interval{} : indices;
  unmap_.remove(ready_);
  const std::size_t end = std::max(extent_end(), ready_.end);
  ready_until_ = end == 0 ? 0 : (end * range_.page_size() - shape_.phase) / shape_.item_bytes;
}

// The pages from `begin` on, up to `end`, that are mapped writable in every row and show nothing
// of others.
Interval Buffer::usable(std::size_t begin, std::size_t end) const {
  end = range_.first_not({begin, end}, [this](const Entry& entry) VT_LOCKED {
    return is_writable(entry) && range_.clean(*entry.page);
  });
  return begin < end ? Interval{begin, end} : Interval{};
}

// The last position to look ahead to: within the capacity, and what the pool allows a tensor. That
// is bounded by what the tensor stores, so that a pool's look-ahead is a share of what it stores.
std::size_t Buffer::limit_lead(std::size_t position) const {
  const std::size_t index_bytes = range_.rows() * range_.page_size();
  const std::size_t least = std::max(kLeastAhead / index_bytes, kLeastPagesAhead);
  const std::size_t indices = std::min(pool_->options().prefetch / index_bytes,
                                       std::max(least, extent_.size() / kShareAhead));
  const std::size_t end = (extent_end() + indices) * range_.page_size();
  const std::size_t allowed = end > shape_.phase ? (end - shape_.phase) / shape_.item_bytes : 0;
  return std::max(positions_.end, std::min({position, shape_.capacity, allowed}));
}

void Buffer::mark_pace() {
  if (!pool_->looks_ahead()) return;
  pace_.mark(positions_.end, static_cast<std::uint64_t>(
                                 std::chrono::steady_clock::now().time_since_epoch().count()));
}

// Asks for more where the growth to come would soon pass what is ready, and there is more to be
// had. Where less is allowed than the growth asks for, once half of that is used up.
void Buffer::look_ahead() {
  if (!pool_->looks_ahead() ||
      positions_.end + pace_.least(pool_->wanting().horizon()) <= ready_until_)
    return;
  const std::size_t end = limit_lead(positions_.end + pace_.lead(pool_->wanting().horizon()));
  if (positions_.end + (end - positions_.end) / 2 <= ready_until_) return;
  if (pool_->store().unused() == 0) return;
  want(indices_of({positions_.begin, end}).end, true);
  if (wanting_) pool_->wanting().measure();
}

void Buffer::want(std::size_t index_end, bool soon) {
  if (index_end <= std::max(extent_end(), ready_.end)) return;
  try {
    range_.reserve(index_end);
    pool_->want(shared_from_this());
    wanting_ = true;
    want_end_ = std::max(want_end_, index_end);
    if (soon) pool_->wake_mapper();
  } catch (const std::bad_alloc&) {
    // Whoever needs the pages will say.
  }
}

void Buffer::prepare(std::size_t end) {
  PoolLock lock(pool_);
  trace::event(trace::What::prepare, range_.address(0, extent_end()),
               (end - positions_.end) * shape_.item_bytes * range_.rows(), range_.base());
  want_until(end, true);
}

void Buffer::want_until(std::size_t end, bool soon) {
  pool_->wanting().ignore();
  if (end > positions_.begin) want(indices_of({positions_.begin, end}).end, soon);
}

void Buffer::announce(std::size_t end) {
  want_until(end, true);
  if (wanting_) pool_->wanting().announce(*this, missing_ahead());
  if (to_clean()) pool_->cached().add_unclean(shared_from_this());
}

std::size_t Buffer::missing_ahead() const {
  const Interval wanted{std::max(owned_until(), ready_.end), std::max(want_end_, ready_.end)};
  return wanted.empty() ? 0 : wanted.size() * range_.rows() - range_.count_mapped(wanted);
}

void Buffer::give_up_ahead() {
  wanting_ = false;
  unmap_.touch(ahead());  // rows that came part of the way
  const std::size_t end = std::max(ready_.end, std::exchange(want_end_, 0));
  // What came behind pages that are not clean yet waits for these.
  if (!unclean_.empty())
    unclean_.end = std::max(unclean_.end, range_.first_not({unclean_.begin, end}, is_writable));
  if (owned_) set_ready(usable(extent_end(), end));
  give_back_unused();
}

bool Buffer::find_missing(Reservation::Arrival& arrival, std::size_t pages) {
  if (expected_ != nullptr) return find_expected(arrival);
  std::vector<Reservation::Run> missing;
  const Interval wanted{std::max(extent_end(), ready_.end), want_end_};
  unmap_.remove(wanted);
  for (std::size_t row = 0; row < range_.rows() && pages != 0; ++row) {
    missing.clear();
    range_.collect(missing, row, wanted, is_unmapped);
    for (Reservation::Run& run : missing) {
      if (range_.at(row, run.indices.begin).state != EntryState::empty) return false;
      run.indices.end = std::min(run.indices.end, run.indices.begin + pages);
      pages -= run.indices.size();
      if (!run.indices.empty()) arrival.runs.push_back(run);
    }
  }
  return true;
}

void Buffer::enter_ahead(Reservation::Arrival& arrival) {
  busy_ = false;
  range_.enter(arrival);
  for (const Reservation::Run& run : arrival.runs)
    unmap_.touch(run.indices);  // they may no longer be wanted
  unmap_.touch(ahead());        // nor what came before them
  if (arrival.zeroing) work_.note(driver_.side_stream());
  if (arrival.error) {
    want_end_ = 0;
    refused_ahead(arrival);
  }
  if (owned_ && expected_ != nullptr) {
    if (arrival.given && !arrival.error) enter_expected();
  } else if (owned_) {
    set_ready(usable(extent_end(), std::max(ready_.end, want_end_)));
    if (arrival.zeroed) ready_after_.push_back(std::move(arrival.zeroed));
    if (ready_.end >= want_end_) want_end_ = 0;
  }
  wanting_ = want_end_ != 0;
  pool_->changed();
  give_back_unused();
}

std::size_t Buffer::drop_ahead() {
  if (busy_ || !owned_ || ahead().empty()) return 0;
  const std::size_t pages = range_.count_mapped(ahead());
  unmap_.touch(ahead());
  want_end_ = 0;
  unclean_ = {};
  set_ready({});
  if (pages != 0) give_back_unused();
  return pages;
}

}  // namespace vtensor
