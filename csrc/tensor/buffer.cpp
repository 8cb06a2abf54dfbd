#include "tensor/buffer.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"
#include "tensor/growing.h"
#include "tensor/row_faults.h"
#include "vmm/copy_on_write.h"
#include "vmm/wait.h"

namespace vtensor {

std::shared_ptr<Buffer> Buffer::create(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                       const Caller& caller) {
  std::shared_ptr<Buffer> cached;
  {
    const PoolLock lock(pool);
    pool->reap();
    // Buffers alone are reusable.
    cached = std::static_pointer_cast<Buffer>(pool->cached().find(shape));
  }
  if (cached && cached->reuse_cached(caller)) return cached;
  return make(pool, shape, caller);
}

std::shared_ptr<Buffer> Buffer::make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                     const Caller& caller, std::unique_ptr<faults::Range> report,
                                     std::size_t backed_rows, std::size_t backed_pages) {
  const std::size_t page = pool->page_size();
  const auto bytes = checked_multiply(shape.capacity, shape.item_bytes);
  const auto too_large = [&] {
    return CapacityExceeded("[", caller.operation, "] capacity of ", shape.capacity,
                            " positions of ", shape.item_bytes, " bytes in ", shape.rows,
                            " rows passes the address space: lower the capacity");
  };
  if (!bytes || *bytes > kMostBytes) throw too_large();
  const std::size_t row_pages = std::max<std::size_t>(1, ceil_div(shape.phase + *bytes, page));
  const auto pages = checked_multiply(row_pages, shape.rows);
  if (!pages || *pages > kMostBytes / page) throw too_large();

  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages), DeleteUnlessForked{});
  if (report == nullptr) {
    auto row_faults = std::make_unique<RowFaults>(shape);
    buffer->row_faults_ = row_faults.get();
    report = std::move(row_faults);
  }
  const Address base =
      pool->driver().reserve(*pages, {.first = backed_pages, .every = backed_rows * row_pages});
  PoolLock lock(pool);
  pool->reap();
  buffer->join(base, std::move(report), caller);
  ++pool->counted.tensors_fresh;
  return buffer;
}

std::shared_ptr<Buffer> Buffer::place(const std::shared_ptr<Buffer>& host, Address base,
                                      const RowShape& shape, const Caller& caller) {
  const std::shared_ptr<PagePool>& pool = host->pool_;
  const std::size_t row_pages =
      RowGeometry(shape, pool->page_size()).indices_of({0, shape.capacity}).end;
  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages), DeleteUnlessForked{});
  std::unique_ptr<Generation> pin(host->publish());
  PoolLock lock(pool);
  buffer->work_.note(caller);
  try {
    buffer->range_.begin(base, pool->add(buffer.get()));
  } catch (...) {
    pool->end_locked(pin.release());
    throw;
  }
  buffer->host_ = pin.release();
  buffer->range_.show_in(host->range_.shared());
  buffer->reserved_ = true;
  return buffer;
}

Buffer::Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages)
    : Client(pool, shape, row_pages),
      geometry_(shape, pool->page_size()),
      ahead_(*pool, range_, shape_, geometry_),
      leftover_(range_) {}

// -- lengths

void Buffer::set_positions(Interval positions) {
  positions_ = positions;
  if (row_faults_ != nullptr) row_faults_->follow(positions, owned_);
  if (!shown_.empty()) show(intersection(shown_, positions));
}

void Buffer::assign(Interval positions, Interval extent, std::size_t ready_end) {
  set_positions(positions);
  extent_ = extent;
  set_ready(ready_end);
}

void Buffer::set_ready(std::size_t end) {
  ahead_.set_ready(std::max(extent_.end, end));
  unmap_.remove({extent_.begin, ahead_.ready_end()});
}

void Buffer::find_ready(std::size_t end) {
  set_ready(range_.first_not({extent_.end, end}, [this](Entry entry) VT_LOCKED {
    return is_writable(entry) && range_.clean(*entry.page());
  }));
}

bool Buffer::is_ready(Interval positions) const {
  const Interval added = indices_of({positions_.end, positions.end});
  if (added.end > ahead_.ready_end()) return false;
  if (added.end > extent_.end && !ready_after_.empty()) return false;
  return !shares() || range_.first_not(added, is_writable) >= added.end;
}

void Buffer::grow_ready(const Caller& caller, Interval positions) {
  work_.note(caller.stream);
  const Interval needed = indices_of(positions);
  if (needed.end > extent_.end) return grow_to(positions, needed, true);
  const std::size_t n = positions.size() - positions_.size();
  set_positions(positions);
  look_ahead(n, false);
}

bool Buffer::grow_within(const Caller& caller, Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock || !is_ready(positions)) return false;
  grow_ready(caller, positions);
  return true;
}

void Buffer::grow(const Caller& caller, Interval positions, bool populate, Interval stale) {
  const Interval added{std::max(positions_.end, positions.begin), positions.end};
  const Growth growth{this, positions, added, stale};
  grow_all(caller, {&growth, 1}, populate);
}

void Buffer::grow_to(Interval positions, Interval extent, bool ready) {
  const Interval added = extent_.empty() ? extent : Interval{extent_.end, extent.end};
  const std::size_t n = positions.size() - positions_.size();
  if (!added.empty()) {
    ++(ready ? pool_->counted.growths_ready : pool_->counted.growths_mapped);
    if (ready) range_.event(trace::What::revive, added);
  }
  assign(positions, extent, ahead_.ready_end());
  leftover_.clean_below(extent.end);
  look_ahead(n, !added.empty());
}

void Buffer::look_ahead(std::size_t added, bool crossed) {
  if (placed()) return;  // its host says how far
  ahead_.grew(added, positions_.end, crossed);
  const std::size_t end = ahead_.due(positions_.end, extent_);
  if (end == 0) return;
  want(indices_of({positions_.begin, end}).end, true);
  if (hooks.wanting.linked()) pool_->wanting().measure();
}

void Buffer::retract(const Caller& caller, Interval positions, std::size_t keep) {
  PoolLock lock(pool_);
  work_.note(caller);
  // Not want_end: the mapper may be unmapping pages that were only wanted.
  const std::size_t mapped_end = ahead_.ready_end();
  unmap_.touch(hull(extent_, ahead()));
  ahead_.want_nothing();
  const Interval extent = indices_of(positions);
  assign(positions, extent);
  // Truncated pages that the look-ahead would want again stay ready.
  std::size_t kept_end = extent.end;
  if (placed()) {
    if (!extent.empty())
      kept_end = indices_of({0, std::clamp(keep, positions.end, shape_.capacity)}).end;
    leftover_.cut(kept_end);
  } else if (pool_->looks_ahead() && !extent.empty()) {
    kept_end = indices_of({positions.begin, ahead_.lead(positions.end, extent)}).end;
  }
  find_ready(std::min(mapped_end, kept_end));
  give_back_unused();
}

void Buffer::leave() noexcept {
  if (range_.shared() && !placed()) {
    range_.shared()->close();
    leftover_.keep_nothing();  // readers would see the next owner's bytes
  }
  unmap_.touch({0, range_.reserved()});
  owned_ = false;
  expected_.reset();
  leftover_.forget();
  pool_->wanting().remove(*this);
  ahead_.want_nothing();
  assign({}, {});
}

void Buffer::zero(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  for (const Reservation::Bytes bytes : bytes_of(positions)) range_.zero(bytes, caller.stream);
}

std::vector<Reservation::Bytes> Buffer::bytes_of(Interval positions) const {
  std::vector<Reservation::Bytes> bytes;
  for (std::size_t row = 0; !positions.empty() && row < range_.rows(); ++row)
    bytes.push_back({address_of(row, positions.begin), geometry_.bytes(positions)});
  return bytes;
}

void Buffer::give_back(const Caller& caller, Interval indices) {
  work_.note(caller);
  unmap_.touch(indices);
}

// -- publication

Generation* Buffer::publish() {
  const PoolLock lock(pool_);
  return publish_locked(extent_);
}

Generation* Buffer::try_publish() {
  const PoolLock lock(pool_, std::try_to_lock);
  return lock ? publish_locked(extent_) : nullptr;
}

bool Buffer::published() {
  PoolLock lock(pool_);
  pool_->reap();
  return !generations_.empty();
}

void Buffer::forget(const Generation* generation) noexcept {
  generations_.remove(generation);
  if (!extent_.contains(generation->indices)) unmap_.touch(generation->indices);
}

std::vector<FencePtr> Buffer::work() {
  const PoolLock lock(pool_);
  return fences();
}

Generation* Buffer::lease(const Caller& caller) {
  pool_->store().raise_if_broken();
  Generation* generation = publish();
  const PoolLock lock(pool_);
  try {
    // By another thread, meanwhile.
    if (!owned_) throw Closed("[lease] a tensor is closed: make a new one");
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

// -- shared pages

bool Buffer::copy_on_write() {
  PoolLock lock(pool_);
  return shares();
}

const Page* Buffer::shared_at(std::size_t row, std::size_t index) const {
  if (expected_ != nullptr && expected_->indices.contains(index)) return expected_->at(row, index);
  const bool shared = index < range_.reserved() && is_copy_on_write(range_.at(row, index));
  return shared ? range_.at(row, index).page() : nullptr;
}

std::size_t Buffer::shared_with(const Buffer& other) const {
  if (extent_.begin != other.extent_.begin) return 0;
  Interval same{extent_.begin, std::min(extent_.end, other.extent_.end)};
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    std::size_t index = same.begin;
    while (index < same.end && range_.at(row, index).page() == other.range_.at(row, index).page())
      ++index;
    same.end = index;
  }
  return same.size();
}

std::size_t Buffer::writable_until(std::size_t position) const {
  std::size_t index = indices_of({position, position + 1}).begin;
  index =
      shares() ? range_.first_not({index, extent_.end}, is_writable) : std::max(index, extent_.end);
  return geometry_.whole_below(index);
}

void Buffer::await_streams(PoolLock& lock, const Caller& caller) {
  require_no_capture(caller);
  const Busy busy(*this, lock, caller);
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

void Buffer::unshare(PoolLock& lock, const Caller& caller, std::span<const Reservation::Run> runs,
                     Interval stale) {
  try {
    unshare_pages(range_, lock, runs, bytes_of(stale), caller.stream);
  } catch (const TimedOut&) {
    // Pages that the copies read stay mapped until the side stream has passed.
    work_.note(driver_.side_stream());
    throw;
  }
}

// All expected pages at once: the owner has a whole prefix, or none of it.
Reservation::Arrival Buffer::find_expected() const {
  return range_.shared(expected_->indices, expected_->references.pages());
}

void Buffer::enter_expected() {
  assign(expected_->positions, expected_->indices);
  expected_.reset();
  range_.event(trace::What::fork, extent_);
}

// -- readers in other processes

void Buffer::show_positions() {
  if (range_.shared() && !(shown_ == positions_)) show(positions_);
}

void Buffer::show(Interval positions) noexcept {
  shown_ = positions;
  range_.shared()->set_words(0, std::array<std::uint64_t, 2>{positions.begin, positions.end});
}

// -- look-ahead

Interval Buffer::ahead() const {
  if (!owned_) return {};
  const Interval unclean = leftover_.unclean();
  return {extent_.end,
          std::max({ahead_.ready_end(), ahead_.want_end(), unclean.empty() ? 0 : unclean.end})};
}

void Buffer::prepare(std::size_t end) {
  PoolLock lock(pool_);
  trace::event(trace::What::prepare, range_.address(0, extent_.end),
               geometry_.bytes({positions_.end, end}) * range_.rows(), range_.base());
  want_until(end, true);
}

void Buffer::want_until(std::size_t end, bool soon) {
  pool_->wanting().ignore();
  if (end > positions_.begin) want(indices_of({positions_.begin, end}).end, soon);
}

void Buffer::announce(std::size_t end) {
  want_until(end, true);
  if (hooks.wanting.linked()) pool_->wanting().announce(*this, missing_ahead());
  if (to_clean()) pool_->cached().add_unclean(shared_from_this());
}

void Buffer::want(std::size_t index_end, bool soon) {
  if (index_end <= ahead_.ready_end()) return;
  try {
    range_.reserve({0, index_end});
    pool_->want(shared_from_this());
    ahead_.want(index_end);
    if (soon) pool_->wake_mapper();
  } catch (const std::bad_alloc&) {
    // Growth that needs the pages raises it.
  }
}

std::size_t Buffer::missing_ahead() const {
  const Interval wanted{std::max(owned_until(), ahead_.ready_end()), ahead_.want_end()};
  return wanted.empty() ? 0 : wanted.size() * range_.rows() - range_.count_mapped(wanted);
}

void Buffer::find_missing(Reservation::Arrival& arrival, std::size_t pages) {
  if (expected_ != nullptr) {
    arrival = find_expected();
    return;
  }
  const Interval wanted{ahead_.ready_end(), ahead_.want_end()};
  unmap_.remove(wanted);
  add_missing(arrival, wanted, pages);
}

void Buffer::arrived_ahead(const Reservation::Arrival& arrival) {
  for (const Reservation::Run& run : arrival.runs)
    unmap_.touch(run.indices);  // they may no longer be wanted
  unmap_.touch(ahead());        // nor those that came before
  if (arrival.error) ahead_.want_nothing();
  if (!owned_) return;
  if (expected_ == nullptr) {
    find_ready(std::max(ahead_.ready_end(), ahead_.want_end()));
    if (ahead_.ready_end() >= ahead_.want_end()) ahead_.want_nothing();
  } else if (arrival.given && !arrival.error) {
    enter_expected();
  }
}

void Buffer::give_up_ahead() {
  unmap_.touch(ahead());  // indices that are mapped in some rows only
  const std::size_t end = std::max(ahead_.ready_end(), ahead_.want_end());
  ahead_.want_nothing();
  // Pages past unclean ones become ready with them.
  leftover_.follow(end);
  if (owned_) find_ready(end);
  give_back_unused();
}

std::size_t Buffer::drop_ahead() {
  if (busy_ || !owned_ || ahead().empty()) return 0;
  const std::size_t pages = range_.count_mapped(ahead());
  unmap_.touch(ahead());
  ahead_.want_nothing();
  leftover_.cut(0);
  set_ready(0);
  if (pages != 0) give_back_unused();
  return pages;
}

// -- giving back

std::vector<Interval> Buffer::uncovered() const {
  std::vector<Interval> rest;
  if (unmap_.touched().empty()) return rest;
  // Between the ready pages and those that the last owner left nothing is kept: pages of an
  // operation that failed may lie there.
  const std::size_t ahead_end = std::max(ahead_.ready_end(), ahead_.want_end());
  const Interval own = owned_ ? Interval{extent_.begin, ahead_end} : Interval{};
  Interval left = owned_ ? leftover_.unclean() : cached();
  if (left.empty()) left = {};  // its end may lie before its beginning
  generations_.covered().gaps(unmap_.touched(), [&](Interval gap) {
    for (const Interval part : difference(gap, own)) {
      for (const Interval free : difference(part, left)) rest.push_back(free);
    }
  });
  std::erase_if(rest, [this](Interval part)
                          VT_LOCKED { return part.empty() || range_.count_mapped(part) == 0; });
  return rest;
}

std::vector<Interval> Buffer::leaving() const {
  if (unmap_.refusal()) return {};
  std::vector<Interval> leaving = unmap_.indices();
  for (const Interval indices : uncovered()) leaving.push_back(indices);
  return leaving;
}

std::size_t Buffer::pages_leaving() const {
  std::size_t pages = 0;
  for (const Interval indices : leaving()) pages += range_.count_mapped(indices);
  return pages;
}

std::size_t Buffer::pages_coming(Interval within) const {
  std::size_t pages = 0;
  for (const Interval indices : leaving())
    pages += range_.count_sole(intersection(indices, within));
  return pages;
}

void Buffer::give_back_unused() noexcept {
  if (busy_) return;  // end_hold calls it again
  const bool ends = !owned_ && generations_.empty() && asleep.load() == 0;
  if (ends && leftover_.may_keep()) try_to_cache();
  Client::give_back_unused();
}

bool Buffer::ends() const { return Client::ends() && cached().empty(); }

void Buffer::free_range() {
  row_faults_ = nullptr;
  if (!placed()) return Client::free_range();
  range_.end();
  pool_->end_locked(std::exchange(host_, nullptr));
}

// -- reuse

// Caches the pages that the next owner can use: those from page 0 on, where another tensor begins;
// in a placed buffer any run.
void Buffer::try_to_cache() {
  if (shape_.phase != 0 || !reserved_) return;
  const Interval usable = leftover_.usable(placed());
  if (usable.empty() || (!placed() && !pool_->may_cache(pages_to_count(usable)))) return;
  try {
    ready_after_ = fences();
    pool_->cache(shared_from_this(), pages_to_count(usable));
  } catch (...) {
    return;  // the pages are unmapped then
  }
  leftover_.keep(usable, pool_->options().zero != ZeroPolicy::never, pool_->next_id());
  unmap_.remove(usable);
  range_.event(trace::What::cache, usable);
}

void Buffer::evict() {
  const Interval cached = leftover_.drop();
  unmap_.touch(cached);
  pool_->cached().remove(*this, pages_to_count(cached));
  if (busy_ || !pool_->looks_ahead()) return give_back_unused();
  unmap_.try_again();
  pool_->settle_later(shared_from_this());  // its fences cost driver calls
}

void Buffer::keep_nothing() {
  leftover_.keep_nothing();
  if (!cached().empty()) evict();
}

bool Buffer::reusable() const {
  return !cached().empty() && range_.mapped() == cached().size() * range_.rows();
}

bool Buffer::reuse_cached(const Caller& caller) {
  PoolLock lock(pool_);
  if (cached().empty()) return false;
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
  owned_ = true;
  ahead_.forget_pace();
  take_error();
  // ready_after_ has the last owner's fences.
  work_.clear();
  work_.note(caller);
  range_.event(trace::What::reuse, cached());
  pool_->cached().remove(*this, pages_to_count(cached()));
  assign({}, {}, leftover_.take(placed()));
  if (!ready_after_.empty()) pool_->settle_later(shared_from_this());
}

bool Buffer::to_clean() const { return !range_.unclean_in(leftover_.unclean(), 1).empty(); }

bool Buffer::claim_cleaning(std::vector<Reservation::Run>& runs, std::size_t pages) {
  if (busy()) return false;
  try {
    if (!is_quiet()) return false;  // the last owner's work may not be done
  } catch (const Error&) {
    return false;  // a capture forbids asking
  }
  runs = range_.unclean_in(leftover_.unclean(), pages);
  busy_ = !runs.empty();
  return busy_;
}

FencePtr Buffer::clean(std::span<const Reservation::Run> runs) {
  const Stream stream = driver_.side_stream();
  range_.zero(runs, stream);
  return driver_.fence(stream);
}

void Buffer::enter_cleaning(std::span<const Reservation::Run> runs, FencePtr zeroed,
                            std::exception_ptr error) {
  busy_ = false;
  work_.note(driver_.side_stream());
  if (!error) {
    leftover_.cleaned(runs);
    if (zeroed) ready_after_.push_back(std::move(zeroed));
    if (owned_) find_ready(ahead().end);
    leftover_.clean_below(ahead_.ready_end());
  } else if (owned_) {
    pool_->cached().unclean.remove(hooks.unclean);
    failed(std::move(error));  // growth zeroes the pages itself
  } else if (!cached().empty()) {
    evict();  // pages that cannot be zeroed are not for the next owner
  }
  pool_->changed();
  give_back_unused();
}

// -- reports

std::size_t Buffer::mapped_pages() {
  PoolLock lock(pool_);
  pool_->reap();
  PoolCounts counts;
  count(counts);
  return counts.mapped;
}

const char* Buffer::why_mapped(std::size_t index) const {
  if (extent_.contains(index)) return nullptr;
  if (cached().contains(index) || intersection(ahead(), leftover_.reused()).contains(index))
    return "cached";
  return ahead().contains(index) ? "prefetched" : "pinned";
}

void Buffer::add_to(PoolCounts& counts) const {
  const std::size_t needed = extent_.size() * range_.rows();
  // Pages taken over from a slot's last owner count as cached until the extent reaches them.
  const std::size_t reused = range_.count_mapped(intersection(ahead(), leftover_.reused()));
  const std::size_t prefetched = range_.count_mapped(ahead()) - reused;
  const std::size_t cached = range_.count_mapped(this->cached()) + reused;
  const std::size_t pinned = range_.mapped() - needed - prefetched - cached;
  counts.mapped += range_.mapped();
  counts.active += needed;
  counts.prefetched += prefetched;
  counts.cached += cached;
  counts.pinned += pinned;
  if (!owned_) counts.orphaned += pinned;
  if (placed()) return;
  if (owned_) ++counts.buffers;
  if (reserved_) counts.reserved_pages += range_.row_pages() * range_.rows();
}

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  std::vector<Interval> covered{owned_ ? Interval{extent_.begin, ahead_.ready_end()} : cached()};
  for (const Generation* generation : generations_) covered.push_back(generation->indices);
  for (const Interval leaving : unmap_.indices()) {
    for (const Interval used : covered) {
      if (intersection(leaving, used).empty()) continue;
      throw Error("I3: indices ", leaving.begin, " to ", leaving.end,
                  " are in use and wait to be unmapped");
    }
  }
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    for (std::size_t index = 0; index < range_.reserved(); ++index) {
      const EntryState state = range_.at(row, index).state();
      const auto covers = [index](Interval indices) { return indices.contains(index); };
      const bool mapped = state != EntryState::empty && state != EntryState::leaving;
      if (!mapped && std::any_of(covered.begin(), covered.end(), covers)) {
        throw Error("I3: index ", index, " of row ", row,
                    " is covered by an extent or a generation and is not mapped");
      }
      if (state == EntryState::arriving && !busy_) {
        throw Error("I8: index ", index, " of row ", row, " waits for a page that no thread maps");
      }
    }
  }
  range_.check(uses, owned_ || !generations_.empty());
}

}  // namespace vtensor
