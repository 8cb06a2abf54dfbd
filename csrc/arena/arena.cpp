#include "arena/arena.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/counted.h"
#include "base/errors.h"
#include "base/fault_report.h"
#include "base/process.h"
#include "base/trace.h"
#include "policy/make_room.h"

namespace vtensor {

namespace {

// One eviction unmaps the oldest cached pages: one part in kEvictedShare, kMostEvicted bytes at
// most.
constexpr std::size_t kEvictedShare = 16;
constexpr std::size_t kMostEvicted = std::size_t{16} << 20;
// How often the mapper is asked for pages during a capture: other threads may take the pages found.
constexpr int kAsked = 4;

constexpr Arena::Words kWords{
    "arena",
    "no page is mapped there, because nothing that map() was given, and unmap() was not, has that "
    "byte: map it first"};

// The intervals in order, overlaps merged: a driver maps neighbours by one call.
std::vector<Interval> joined(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  std::vector<Interval> joined;
  for (const Interval some : all) {
    if (joined.empty() || some.begin > joined.back().end) {
      joined.push_back(some);
    } else {
      joined.back().end = std::max(joined.back().end, some.end);
    }
  }
  return joined;
}

// Reports of faults in an arena.
class ByteFaults final : public faults::Range {
 public:
  ByteFaults(std::size_t bytes, const Arena::Words& words) : bytes_(bytes), words_(words) {}

  void name(faults::Text& text, std::uintptr_t at) const noexcept override {
    text << "byte " << at - base() << " of the " << words_.noun << " of " << bytes_ << " bytes at ";
    text.address(base());
  }
  void explain(faults::Text& text, std::uintptr_t) const noexcept override { text << words_.hole; }

 private:
  const std::size_t bytes_;
  const Arena::Words words_;
};

}  // namespace

std::shared_ptr<Arena> Arena::make(const std::shared_ptr<PagePool>& pool, std::size_t bytes,
                                   bool zeros, const Caller& caller) {
  return make_for({}, pool, bytes, caller, kWords, {.first = zeros ? 1u : 0u});
}

std::shared_ptr<Arena> Arena::make_for(std::optional<std::uint64_t> owner,
                                       const std::shared_ptr<PagePool>& pool, std::size_t bytes,
                                       const Caller& caller, const Words& words, Backed backed) {
  const std::size_t page = pool->page_size();
  // State links cached pages by 32-bit indices.
  const std::size_t limit = std::min<std::size_t>(kMostBytes, kNone * page);
  if (bytes == 0 || bytes > limit - page) {
    throw CapacityExceeded("[", caller.operation, "] ", bytes,
                           " bytes cannot be reserved in pages of ", page,
                           ": ask for at least 1 and at most ", limit - page);
  }
  const std::size_t pages = ceil_div(bytes, page);
  std::shared_ptr<Arena> arena(new Arena(pool, bytes, pages, words.noun), DeleteUnlessForked{});
  auto report = std::make_unique<ByteFaults>(bytes, words);
  const Address base = pool->driver().reserve(pages, backed);
  {
    PoolLock lock(pool);
    pool->reap();
    const std::uint64_t own = arena->join(base, std::move(report), caller);
    arena->range_.set_owner(owner.value_or(own));
    arena->of_several_ = owner.has_value();
    if (arena->of_several_) arena->range_.stitch();
  }
  return arena;
}

Arena::Arena(const std::shared_ptr<PagePool>& pool, std::size_t bytes, std::size_t pages,
             const char* noun)
    : Client(pool, {.rows = 1, .item_bytes = 1, .capacity = bytes}, pages), noun_(noun) {}

void Arena::have_states(std::span<const Interval> pages) {
  for (const Interval some : pages) {
    range_.reserve(some);
    states_.reserve(some.begin, some.end);
  }
}

Interval Arena::pages_of(Interval bytes) const {
  if (bytes.empty()) return {};
  return {bytes.begin / range_.page_size(), ceil_div(bytes.end, range_.page_size())};
}

std::vector<Interval> Arena::pages_of(std::span<const Interval> intervals) const {
  std::vector<Interval> pages(intervals.size());
  std::transform(intervals.begin(), intervals.end(), pages.begin(),
                 [this](Interval bytes) { return pages_of(bytes); });
  return pages;
}

// -- blocks

std::vector<char> Arena::map(const Caller& caller, std::span<const Interval> intervals,
                             std::span<const std::uint64_t> since) {
  return map(caller, intervals, since, false);
}

void Arena::map_in_capture(const Caller& caller, Interval bytes) {
  map(caller, {&bytes, 1}, {}, true);
}

bool Arena::map_ready(const Caller& caller, Interval bytes) {
  if (busy_ || !ready_after_.empty()) return false;
  const Interval pages = pages_of(bytes);
  for (std::size_t i = pages.begin; i < pages.end; ++i) {
    if (!is_mapped(range_.at(0, i)) || states_[i].idle == Idle::leaving) return false;
  }
  work_.note(caller);
  begin_use({&pages, 1});
  ++pool_->counted.growths_ready;
  return true;
}

void Arena::keep(std::span<const Interval> pages) {
  for (const Interval some : pages) {
    for (std::size_t i = some.begin; i < some.end; ++i) {
      const std::size_t first = i;
      while (i < some.end && states_[i].idle == Idle::leaving) ++i;
      if (i == first) continue;
      unmap_.touch({first, i});
      unmap_.remove({first, i});
    }
  }
}

std::vector<char> Arena::map(const Caller& caller, std::span<const Interval> intervals,
                             std::span<const std::uint64_t> since, bool in_capture) {
  const std::vector<Interval> pages = pages_of(intervals);
  PoolLock lock(pool_);
  pool_->reap();
  have_states(pages);
  keep(pages);
  begin_use(pages);  // first, so that making room evicts none of them
  const Counted mapping(mapping_);
  try {
    return map_missing(lock, caller, pages, since, in_capture);
  } catch (...) {
    count_back(pages);
    throw;
  }
}

void Arena::begin_use(std::span<const Interval> pages) noexcept {
  for (const Interval some : pages) {
    for (std::size_t i = some.begin; i < some.end; ++i) {
      State& state = states_.reserved(i);
      if (state.idle == Idle::cached) uncache(i);
      set_idle(i, Idle::no);
      ++state.uses;
    }
  }
}

// Unmapped page runs of `pages`, overlaps merged.
std::vector<Reservation::Run> Arena::missing(std::span<const Interval> pages) const {
  std::vector<Reservation::Run> runs;
  for (const Interval some : joined({pages.begin(), pages.end()}))
    range_.collect(runs, 0, some, is_unmapped);
  return runs;
}

bool Arena::kept(Interval pages, std::span<const std::uint64_t> since, std::size_t n) const {
  const std::uint64_t then = since.empty() ? clock_ : since[n];
  for (std::size_t i = pages.begin; i < pages.end; ++i) {
    Entry entry = range_.at(0, i);
    if (!is_mapped(entry) || !is_awake(entry) || states_[i].mapped_at > then) return false;
  }
  return true;
}

std::uint64_t Arena::now() {
  const PoolLock lock(pool_);
  return clock_;
}

std::vector<char> Arena::map_missing(PoolLock& lock, const Caller& caller,
                                     std::span<const Interval> pages,
                                     std::span<const std::uint64_t> since, bool in_capture) {
  if (in_capture) have_mapped(lock, caller, pages);
  Reservation::Arrival arrival;
  std::size_t count = 0;
  do {
    raise_if_asleep();
    await_turn(lock, caller);
    raise_if_asleep();
    arrival.runs = missing(pages);
    count = 0;
    for (const Reservation::Run& run : arrival.runs) count += run.indices.size();
  } while (MakeRoom(*pool_).ready(lock, caller.operation, count));
  std::vector<char> kept;
  for (std::size_t n = 0; n < pages.size(); ++n) kept.push_back(this->kept(pages[n], since, n));
  const bool unordered = !is_quiet();
  if (count != 0 || unordered) require_no_capture(caller);
  work_.note(caller);
  if (unordered) order(caller.stream);
  ++(count == 0 ? pool_->counted.growths_ready : pool_->counted.growths_mapped);
  if (count == 0) return kept;
  const Busy busy(*this, lock, caller);
  range_.map(lock, arrival, caller.stream, true);
  note_arrival(arrival);
  return kept;
}

// During a capture of the caller's stream.
void Arena::have_mapped(PoolLock& lock, const Caller& caller, std::span<const Interval> pages) {
  for (int asked = 0;;) {
    raise_if_asleep();
    await_turn(lock, caller);
    const std::vector<Reservation::Run> runs = missing(pages);
    if (runs.empty() && is_quiet()) return;
    if (!driver_.traits().asynchronous || !driver_.capturing(caller.operation, caller.stream))
      return;
    if (asked == kAsked) {
      throw OutOfPages("[", caller.operation, "] ", runs.size(),
                       " runs of pages are missing, and the mapper, which maps during a capture, "
                       "could not map them: run the step once before it is captured");
    }
    std::size_t count = 0;
    for (const Reservation::Run& run : runs) count += run.indices.size();
    if (MakeRoom(*pool_).ready(lock, caller.operation, count)) continue;
    for (const Reservation::Run& run : runs) wanted_.push_back(run.indices);
    wanted_ = joined(std::move(wanted_));
    pool_->wanting().ignore();
    if (count != 0) {
      pool_->want(shared_from_this());
      pool_->wanting().announce(*this, count);
    }
    pool_->wake_mapper();
    ++asked;
    {
      const Counted awaits(awaiting_);
      pool_->await(lock, caller.operation, "the mapper, which maps during a capture",
                   [this]() VT_LOCKED { return wanted_.empty() && !busy_ && is_quiet(); });
    }
    if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
  }
}

void Arena::note_arrival(const Reservation::Arrival& arrival) {
  ++clock_;
  for (const Reservation::Run& run : arrival.runs) {
    for (std::size_t i = run.indices.begin; i < run.indices.end; ++i)
      states_.reserved(i).mapped_at = clock_;
  }
}

void Arena::lose_contents() noexcept {
  ++clock_;
  each_state([this](std::size_t i, State& state) VT_LOCKED {
    if (is_mapped(range_.at(0, i))) state.mapped_at = clock_;
  });
}

void Arena::unmap(const Caller& caller, std::span<const Interval> intervals) {
  pool_->store().raise_if_broken();
  const std::vector<Interval> pages = pages_of(intervals);
  const PoolLock lock(pool_);
  work_.note(caller);
  const auto count_back = [this](std::size_t i) VT_LOCKED { ++states_.reserved(i).uses; };
  for (std::size_t n = 0; n < pages.size(); ++n) {
    for (std::size_t i = pages[n].begin; i < pages[n].end; ++i) {
      if (states_[i].uses != 0) {
        --states_.reserved(i).uses;
        continue;
      }
      for (std::size_t back = pages[n].begin; back < i; ++back) count_back(back);
      for (std::size_t m = 0; m < n; ++m) {
        for (std::size_t back = pages[m].begin; back < pages[m].end; ++back) count_back(back);
      }
      throw InvalidArgument("[", caller.operation, "] page ", i,
                            " is unmapped more often than it was mapped: nothing was changed");
    }
  }
  end_use(pages);
}

void Arena::unmap_mapped(const Caller& caller, Interval bytes) {
  const Interval pages = pages_of(bytes);
  work_.note(caller);
  count_back({&pages, 1});
}

void Arena::count_back(std::span<const Interval> pages) noexcept {
  for (const Interval some : pages) {
    for (std::size_t i = some.begin; i < some.end; ++i) --states_.reserved(i).uses;
  }
  end_use(pages);
}

// Caches the pages of `pages` that have no uses left, or lets them leave.
void Arena::end_use(std::span<const Interval> pages) noexcept {
  const bool keep = may_cache();
  bool goes = false;
  for (const Interval some : pages) {
    for (std::size_t i = some.begin; i < some.end; ++i) {
      if (states_[i].uses != 0 || states_[i].idle != Idle::no || !is_mapped(range_.at(0, i)))
        continue;
      if (keep) {
        cache(i);
      } else {
        let_go(i);
        goes = true;
      }
    }
  }
  if (goes) give_back_unused();
}

void Arena::prepare(std::span<const Interval> intervals) {
  const std::vector<Interval> pages = pages_of(intervals);
  PoolLock lock(pool_);
  have_states(pages);
  for (const Interval some : pages) {
    if (range_.count_mapped(some) == some.size()) continue;
    trace::event(trace::What::prepare, range_.address(0, some.begin),
                 some.size() * range_.page_size(), range_.base());
    wanted_.push_back(some);
  }
  if (wanted_.empty()) return;
  wanted_ = joined(std::move(wanted_));
  pool_->wanting().ignore();
  pool_->want(shared_from_this());
  pool_->wake_mapper();
}

std::size_t Arena::trim(const Caller& caller, std::span<const Interval> intervals) {
  pool_->store().raise_if_broken();
  PoolLock lock(pool_);
  pool_->reap();
  if (awaiting_ == 0) wanted_.clear();
  await_turn(lock, caller);
  std::size_t pages = 0;
  for (const Interval some : intervals) {
    const Interval within = pages_of(some);
    for (std::size_t i = within.begin; i < within.end; ++i) {
      if (states_[i].idle != Idle::cached && states_[i].idle != Idle::prefetched) continue;
      let_go(i);
      ++pages;
    }
  }
  give_back_unused();
  return pages;
}

std::vector<char> Arena::holds(std::span<const Interval> intervals,
                               std::span<const std::uint64_t> since) {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<char> held;
  held.reserve(intervals.size());
  for (std::size_t n = 0; n < intervals.size(); ++n) {
    const Interval pages = pages_of(intervals[n]);
    bool stays = kept(pages, since, n);
    for (std::size_t i = pages.begin; i < pages.end && stays; ++i)
      stays = states_[i].idle != Idle::leaving;
    held.push_back(stays);
  }
  return held;
}

// -- what no block needs

// Cached pages come back without zeroing, which ZeroPolicy::always forbids.
bool Arena::may_cache() const {
  return owned_ && asleep.load() == 0 && pool_->options().cache != 0 &&
         pool_->zero_policy() != ZeroPolicy::always && !pool_->retired();
}

// Puts the page at the end of the list of cached pages, and the arena on the pool's list.
void Arena::cache(std::size_t page) noexcept {
  State& state = states_.reserved(page);
  set_idle(page, Idle::cached);
  state.older = newest_;
  state.newer = kNone;
  (newest_ == kNone ? oldest_ : states_.reserved(newest_).newer) = static_cast<std::uint32_t>(page);
  newest_ = static_cast<std::uint32_t>(page);
  if (!hooks.cached.linked()) pool_->cached().add_evictable(shared_from_this());
}

void Arena::uncache(std::size_t page) noexcept {
  const State& state = states_[page];
  (state.older == kNone ? oldest_ : states_.reserved(state.older).newer) = state.newer;
  (state.newer == kNone ? newest_ : states_.reserved(state.newer).older) = state.older;
  set_idle(page, Idle::no);
  if (oldest_ == kNone) pool_->cached().remove(*this, 0);
}

void Arena::set_idle(std::size_t page, Idle idle) noexcept {
  State& state = states_.reserved(page);
  --count_of(state.idle);
  ++count_of(idle);
  state.idle = idle;
}

void Arena::let_go(std::size_t page) noexcept {
  if (states_[page].idle == Idle::cached) uncache(page);
  set_idle(page, Idle::leaving);
  unmap_.touch({page, page + 1});
}

void Arena::evict() {
  std::size_t left =
      std::min(count_of(Idle::cached) / kEvictedShare, kMostEvicted / range_.page_size());
  left = std::max<std::size_t>(1, left);
  for (; left != 0 && oldest_ != kNone; --left, ++evicted_) let_go(oldest_);
  give_back_unused();
}

std::size_t Arena::drop_ahead() {
  if (busy_) return 0;
  if (awaiting_ == 0) wanted_.clear();
  const std::size_t pages = count_of(Idle::prefetched);
  if (pages == 0) return 0;
  each_state([this](std::size_t i, const State& state) VT_LOCKED {
    if (state.idle == Idle::prefetched) let_go(i);
  });
  give_back_unused();
  return pages;
}

std::vector<Interval> Arena::uncovered() const {
  const Interval touched = unmap_.touched();
  std::vector<Interval> leaving;
  for (std::size_t i = touched.begin; i < touched.end; ++i) {
    const std::size_t first = i;
    while (i < touched.end && (states_[i].idle == Idle::leaving || is_leaving(range_.at(0, i))))
      ++i;
    if (i != first) leaving.push_back({first, i});
  }
  return leaving;
}

void Arena::enter_back(Departure& departure) {
  Client::enter_back(departure);
  for (const Reservation::Run& run : departure.runs) {
    for (std::size_t i = run.indices.begin; i < run.indices.end; ++i) {
      if (is_mapped(range_.at(0, i))) continue;
      if (states_[i].idle == Idle::cached) uncache(i);  // a map took it back and was refused
      if (states_[i].idle == Idle::leaving) set_idle(i, Idle::no);
    }
  }
  // Also after a departure that was cut short: unmapped pages may be mapped again before the others
  // leave.
  for (std::size_t run = 0; run < departure.done; ++run) unmap_.remove(departure.runs[run].indices);
}

std::size_t Arena::pages_leaving() const {
  if (unmap_.refusal()) return 0;
  return count_of(Idle::leaving) + range_.leaving();
}

// -- ahead

std::size_t Arena::missing_ahead() const {
  std::size_t pages = 0;
  for (const Interval some : wanted_) pages += some.size() - range_.count_mapped(some);
  return pages;
}

void Arena::find_missing(Reservation::Arrival& arrival, std::size_t pages) {
  for (const Interval some : wanted_) add_missing(arrival, some, pages);
}

void Arena::arrived_ahead(const Reservation::Arrival& arrival) {
  note_arrival(arrival);
  if (arrival.error) wanted_.clear();
  for (const Reservation::Run& run : arrival.runs) {
    for (std::size_t i = run.indices.begin; i < run.indices.end; ++i) {
      if (!is_mapped(range_.at(0, i)) || states_[i].uses != 0) continue;
      set_idle(i, Idle::prefetched);
      if (!owned_) let_go(i);
    }
  }
  std::erase_if(wanted_, [this](Interval some)
                             VT_LOCKED { return range_.count_mapped(some) == some.size(); });
}

// -- ends

Generation* Arena::publish(Interval bytes) {
  const PoolLock lock(pool_);
  return publish_locked({}, bytes);
}

void Arena::forget(const Generation* generation) noexcept {
  generations_.remove(generation);
  if (generation->bytes.empty()) return;
  const Interval pages = pages_of(generation->bytes);
  count_back({&pages, 1});
  if (listener_ != nullptr) listener_->use_ended(generation->bytes.begin);
}

void Arena::leave() noexcept {
  if (range_.shared()) range_.shared()->close();
  owned_ = false;
  wanted_.clear();
  pool_->wanting().remove(*this);
  each_state([](std::size_t, State& state) { state.uses = 0; });
  for (const Generation* generation : generations_) {
    const Interval pages = pages_of(generation->bytes);
    for (std::size_t i = pages.begin; i < pages.end; ++i) ++states_.reserved(i).uses;
  }
  each_state([this](std::size_t i, const State& state) VT_LOCKED {
    if (state.uses == 0 && is_mapped(range_.at(0, i)) && state.idle != Idle::leaving) let_go(i);
  });
}

// -- reports

ArenaCounts Arena::counts_now() const {
  ArenaCounts counts;
  counts.cached = count_of(Idle::cached);
  counts.prefetched = count_of(Idle::prefetched);
  counts.pinned = count_of(Idle::leaving) + range_.leaving();
  counts.active = range_.mapped() - counts.cached - counts.prefetched - counts.pinned;
  counts.evicted = evicted_;
  return counts;
}

ArenaCounts Arena::counts() {
  PoolLock lock(pool_);
  pool_->reap();
  PoolCounts awake;
  count(awake);
  ArenaCounts counts = counts_now();
  counts.active = awake.active;
  counts.prefetched = awake.prefetched;
  counts.cached = awake.cached;
  counts.pinned = awake.pinned;
  return counts;
}

const char* Arena::why_mapped(std::size_t index) const {
  static constexpr const char* kIdle[] = {nullptr, "cached", "prefetched", "pinned"};
  return kIdle[static_cast<std::size_t>(states_[index].idle)];
}

void Arena::add_to(PoolCounts& counts) const {
  const ArenaCounts now = counts_now();
  counts.mapped += range_.mapped();
  counts.prefetched += now.prefetched;
  counts.cached += now.cached;
  counts.pinned += now.pinned;
  if (owned_) {
    counts.active += now.active;
    counts.buffers += !of_several_;
  } else {  // storages need the pages that have uses
    counts.pinned += now.active;
    counts.orphaned += now.active + now.pinned;
  }
  if (reserved_) counts.reserved_pages += range_.row_pages();
}

void Arena::check(std::unordered_map<const Page*, PageUse>& uses) const {
  std::size_t listed = 0;
  for (std::uint32_t i = oldest_; i != kNone; i = states_[i].newer) ++listed;
  decltype(counted_) counted{};
  for (std::size_t i = states_.next(0); i < range_.row_pages(); i = states_.next(i + 1)) {
    const State& state = states_[i];
    const EntryState entry = range_.at(0, i).state();
    const std::string page = "page " + std::to_string(i) + " of an arena ";
    if (state.uses != 0 && state.idle != Idle::no)
      throw Error("I3: ", page, "is needed by a block and may go");
    const bool mapped = entry != EntryState::empty && entry != EntryState::leaving;
    if (state.uses != 0 && !mapped && mapping_ == 0)
      throw Error("I3: ", page, "is needed by a block and is not mapped");
    if (state.idle != Idle::no && !is_mapped(range_.at(0, i)))
      throw Error("I4: ", page, "is counted as mapped and is not");
    if (state.uses == 0 && state.idle == Idle::no && is_mapped(range_.at(0, i)))
      throw Error("I4: ", page, "is mapped, and nothing says why");
    if (entry == EntryState::arriving && !busy_)
      throw Error("I8: ", page, "waits for a page that no thread maps");
    ++counted[static_cast<std::size_t>(state.idle)];
  }
  if (hooks.cached.linked() != (listed != 0))
    throw Error("I15: an arena has cached pages that the pool does not look for, or none");
  counted[static_cast<std::size_t>(Idle::no)] = count_of(Idle::no);  // absent states have it too
  if (counted != counted_ || listed != count_of(Idle::cached))
    throw Error("I4: an arena's counts, or its list of cached pages, are not what its pages say");
  range_.check(uses, owned_ || !generations_.empty());
}

}  // namespace vtensor
