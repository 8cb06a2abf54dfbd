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

// One eviction unmaps the oldest of the cached pages: one part in kEvictedShare, but at most
// kMostEvicted bytes.
constexpr std::size_t kEvictedShare = 16;
constexpr std::size_t kMostEvicted = std::size_t{16} << 20;
// How often map() asks the mapper during a capture: other threads may take the pages meanwhile.
constexpr int kAsked = 4;

constexpr const char* kHole =
    "no page is mapped there, because nothing that map() was given, and unmap() was not, has that "
    "byte: map it first";

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

class ByteFaults final : public faults::Range {
 public:
  ByteFaults(std::size_t bytes, const char* noun, const char* hole)
      : bytes_(bytes), noun_(noun), hole_(hole) {}

  void name(faults::Text& text, std::uintptr_t at) const noexcept override {
    text << "byte " << at - base() << " of the " << noun_ << " of " << bytes_ << " bytes at ";
    text.address(base());
  }
  void explain(faults::Text& text, std::uintptr_t) const noexcept override { text << hole_; }

 private:
  const std::size_t bytes_;
  const char *const noun_, *const hole_;
};

}  // namespace

std::shared_ptr<Arena> Arena::make(const std::shared_ptr<PagePool>& pool, std::size_t bytes,
                                   bool zeros, const Caller& caller) {
  std::shared_ptr<Arena> arena(new Arena(pool, bytes, caller, "arena", kHole),
                               DeleteUnlessForked{});
  arena->open({}, {.first = zeros ? 1u : 0u}, caller);
  return arena;
}

Arena::Arena(const std::shared_ptr<PagePool>& pool, std::size_t bytes, const Caller& caller,
             const char* noun, const char* hole)
    : Client(pool, {.rows = 1, .item_bytes = 1, .capacity = bytes}, pages_for(*pool, bytes, caller),
             noun, "map the blocks before the capture"),
      hole_(hole) {}

std::size_t Arena::pages_for(const PagePool& pool, std::size_t bytes, const Caller& caller) {
  const std::size_t page = pool.page_size();
  if (bytes == 0 || bytes > kMostBytes - page) {
    throw CapacityExceeded("[", caller.operation, "] ", bytes,
                           " bytes cannot be reserved in pages of ", page,
                           ": ask for at least 1 and at most ", kMostBytes - page);
  }
  return ceil_div(bytes, page);
}

void Arena::open(std::optional<std::uint64_t> owner, Backed backed, const Caller& caller) {
  Client::open(caller, std::make_unique<ByteFaults>(bytes(), noun_, hole_), backed, owner);
}

void Arena::have_uses(std::span<const Interval> pages) {
  for (const Interval some : pages) {
    range_.reserve(some);
    uses_.reserve(some.begin, some.end);
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

bool Arena::map_ready(const Caller& caller, Interval bytes) {
  if (busy_ || !ready_after_.empty()) return false;
  const Interval pages = pages_of(bytes);
  if (range_.first_not(pages, is_mapped) != pages.end) return false;
  work_.note(caller);
  begin_use({&pages, 1});
  ++pool_->counted.growths_ready;
  return true;
}

std::vector<char> Arena::map(const Caller& caller, std::span<const Interval> intervals,
                             std::span<const std::uint64_t> since, bool in_capture) {
  const std::vector<Interval> pages = pages_of(intervals);
  PoolLock lock(pool_);
  have_uses(pages);
  begin_use(pages);  // first, so that eviction spares them
  const Counted mapping(mapping_);
  try {
    std::vector<char> kept = map_missing(lock, caller, pages, since, in_capture);
    for (const Interval some : pages) {
      for (std::size_t i = some.begin; i < some.end; ++i) uses_.reserved(i).ahead = false;
    }
    return kept;
  } catch (...) {
    count_back(pages);
    throw;
  }
}

void Arena::begin_use(std::span<const Interval> pages) noexcept {
  for (const Interval some : pages) {
    for (std::size_t i = some.begin; i < some.end; ++i) {
      ++uses_.reserved(i).blocks;
      if (range_.why(i) == Why::cached) uncache(i);
    }
    // A leaving page, of a call that failed, is unmapped before the index is mapped again.
    range_.each_run(
        0, some, [](Entry entry) { return !is_leaving(entry); },
        [this](const Reservation::Run& run, bool)
            VT_LOCKED { range_.set_why(run.indices, Why::needed); });
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
    if (!is_mapped(entry) || !is_awake(entry) || uses_[i].mapped_at > then) return false;
    if (uses_[i].ahead) return false;
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
  Reservation::Arrival arrival;
  std::size_t count = 0;
  for (int asked = 0;;) {
    await_turn(lock, caller);
    raise_if_asleep(caller.operation);
    arrival.runs = missing(pages);
    count = Reservation::pages_of(arrival.runs);
    if (MakeRoom(*pool_).ready(lock, caller.operation, count)) continue;
    if (!in_capture || (count == 0 && is_quiet()) || !driver_.traits().asynchronous ||
        !driver_.capturing(caller.operation, caller.stream))
      break;
    if (asked++ == kAsked) {
      throw OutOfPages("[", caller.operation, "] ", arrival.runs.size(),
                       " runs of pages are missing, and the mapper, which maps during a capture, "
                       "could not map them: run the step once before it is captured");
    }
    await_mapper(lock, caller, arrival.runs);
  }
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
  arrived(arrival);
  return kept;
}

void Arena::await_mapper(PoolLock& lock, const Caller& caller,
                         std::span<const Reservation::Run> runs) {
  for (const Reservation::Run& run : runs) range_.set_why(run.indices, Why::prefetched);
  if (wants()) pool_->want_first(shared_from_this());
  pool_->wake_mapper();
  {
    const Counted awaits(awaiting_);
    pool_->await(lock, caller.operation, "the mapper, which maps during a capture",
                 [this]() VT_LOCKED { return !wants() && !busy_ && is_quiet(); });
  }
  if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
}

void Arena::arrived(const Reservation::Arrival& arrival) {
  ++clock_;
  for (const Reservation::Run& run : arrival.runs) {
    for (std::size_t i = run.indices.begin; i < run.indices.end; ++i) {
      Use& use = uses_.reserved(i);
      use.mapped_at = clock_;
      use.ahead = arrival.ahead;
      if (use.blocks != 0 && is_mapped(range_.at(0, i))) set_why(i, used());
    }
  }
}

void Arena::lose_contents() noexcept {
  ++clock_;
  each_use([this](std::size_t i, Use& use) VT_LOCKED {
    if (is_mapped(range_.at(0, i))) use.mapped_at = clock_;
  });
}

void Arena::unmap(const Caller& caller, std::span<const Interval> intervals) {
  pool_->store().raise_if_broken();
  const std::vector<Interval> pages = pages_of(intervals);
  const PoolLock lock(pool_);
  work_.note(caller);
  const auto count_back = [this](std::size_t i) VT_LOCKED { ++uses_.reserved(i).blocks; };
  for (std::size_t n = 0; n < pages.size(); ++n) {
    for (std::size_t i = pages[n].begin; i < pages[n].end; ++i) {
      if (uses_[i].blocks != 0) {
        --uses_.reserved(i).blocks;
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
    for (std::size_t i = some.begin; i < some.end; ++i) --uses_.reserved(i).blocks;
  }
  end_use(pages);
}

// Caches the pages of `pages` that have no uses left, or lets them leave.
void Arena::end_use(std::span<const Interval> pages) noexcept {
  const bool keep = may_cache();
  const Why used = this->used();
  bool goes = false;
  for (const Interval some : pages) {
    Interval cached;
    for (std::size_t i = some.begin; i < some.end; ++i) {
      if (uses_.reserved(i).blocks != 0 || range_.why(i) != used) continue;
      if (const Entry entry = range_.at(0, i); keep && is_mapped(entry)) {
        cache(i, entry.page());
        if (i != cached.end) range_.set_why(std::exchange(cached, {i, i}), Why::cached);
        ++cached.end;
      } else {
        set_why(i, Why::unneeded);
        goes = true;
      }
    }
    range_.set_why(cached, Why::cached);
  }
  if (goes) give_back_unused();
}

void Arena::prepare(std::span<const Interval> intervals) {
  const std::vector<Interval> pages = pages_of(intervals);
  PoolLock lock(pool_);
  have_uses(pages);
  for (const Interval some : pages) {
    if (range_.count_mapped(some) == some.size()) continue;
    trace::event(trace::What::prepare, range_.address(0, some.begin),
                 some.size() * range_.page_size(), range_.base());
    range_.change_why(some, [](PageTable::Index index) {
      return index.why() == Why::nothing ? Why::prefetched : index.why();
    });
  }
  if (!wants()) return;
  pool_->want(shared_from_this());
  pool_->wake_mapper();
}

std::size_t Arena::trim(const Caller& caller, std::span<const Interval> intervals) {
  pool_->store().raise_if_broken();
  PoolLock lock(pool_);
  if (awaiting_ == 0) give_up_ahead();
  await_turn(lock, caller);
  std::size_t pages = 0;
  for (const Interval some : intervals) {
    const Interval within = pages_of(some);
    for (std::size_t i = uses_.next(within.begin); i < within.end; i = uses_.next(i + 1)) {
      if (!is_mapped(range_.at(0, i))) continue;
      if (range_.why(i) != Why::cached && range_.why(i) != Why::prefetched) continue;
      set_why(i, Why::unneeded);
      ++pages;
    }
  }
  give_back_unused();
  return pages;
}

std::vector<char> Arena::holds(std::span<const Interval> intervals,
                               std::span<const std::uint64_t> since) {
  PoolLock lock(pool_);
  std::vector<char> held;
  held.reserve(intervals.size());
  for (std::size_t n = 0; n < intervals.size(); ++n) {
    const Interval pages = pages_of(intervals[n]);
    bool stays = kept(pages, since, n);
    for (std::size_t i = pages.begin; i < pages.end && stays; ++i)
      stays = range_.why(i) != Why::unneeded && range_.why(i) != Why::fenced;
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

void Arena::cache(std::size_t i, Page* page) noexcept {
  page->index = i;
  cached_.push(page);
  if (!hooks.cached.linked()) pool_->cache(shared_from_this(), false);
}

void Arena::uncache(std::size_t i) noexcept {
  cached_.remove(range_.at(0, i).page());
  if (cached_.size() == 0) pool_->uncache(*this);
}

void Arena::set_why(std::size_t page, Why why) noexcept {
  if (range_.why(page) == Why::cached) uncache(page);
  range_.set_why(page, why);
}

void Arena::evict() {
  std::size_t left = std::min(cached_.size() / kEvictedShare, kMostEvicted / range_.page_size());
  left = std::max<std::size_t>(1, left);
  for (; left != 0 && cached_.size() != 0; --left, ++evicted_)
    set_why(cached_.oldest()->index, Why::unneeded);
  give_back_unused();
}

void Arena::enter_back(const Reservation::Departure& departure) {
  for (const Reservation::Run& run : std::span(departure.runs).first(departure.done)) {
    for (std::size_t i = run.indices.begin; i < run.indices.end; ++i) {
      // A map() that was refused meanwhile may have made the page a cached one again.
      if (range_.why(i) == Why::cached) set_why(i, Why::unneeded);
    }
  }
  Client::enter_back(departure);
}

// -- ends

Generation* Arena::publish(Interval bytes) {
  const PoolLock lock(pool_);
  return publish_locked({}, bytes);
}

void Arena::forget(const Generation* generation) noexcept {
  Client::forget(generation);
  if (generation->bytes.empty()) return;
  const Interval pages = pages_of(generation->bytes);
  count_back({&pages, 1});
}

void Arena::leave() noexcept {
  if (range_.shared()) range_.shared()->close();
  owned_ = false;
  pool_->want_no_more(*this);
  each_use([](std::size_t, Use& use) { use.blocks = 0; });
  for (const Generation* generation : generations_) {
    const Interval pages = pages_of(generation->bytes);
    for (std::size_t i = pages.begin; i < pages.end; ++i) ++uses_.reserved(i).blocks;
  }
  each_use([this](std::size_t i, const Use& use) VT_LOCKED {
    if (range_.why(i) != Why::fenced) set_why(i, use.blocks != 0 ? used() : Why::unneeded);
  });
}

// -- reports

void Arena::check(std::unordered_map<const Page*, PageUse>& uses) const {
  for (const Page* page = cached_.oldest(); page != nullptr; page = page->newer) {
    if (range_.why(page->index) != Why::cached || range_.at(0, page->index).page() != page)
      throw Error("I4: page ", page->index, " of an arena is listed as cached, and is not");
  }
  for (std::size_t i = uses_.next(0); i < range_.row_pages(); i = uses_.next(i + 1)) {
    Entry entry = range_.at(0, i);
    const std::string page = "page " + std::to_string(i) + " of an arena ";
    if (uses_[i].blocks == 0) {
      if (range_.why(i) == used()) throw Error("I4: ", page, "is mapped, and nothing says why");
      continue;
    }
    if (!is_mapped(entry) && entry.state() != EntryState::arriving && mapping_ == 0)
      throw Error("I3: ", page, "is needed by a block and is not mapped");
    if (is_mapped(entry) && range_.why(i) != used())
      throw Error("I3: ", page, "is needed by a block and may go");
  }
  if (hooks.cached.linked() != (cached_.size() != 0))
    throw Error("I15: an arena has cached pages that the pool does not look for, or none");
  if (cached_.size() != range_.mapped(Why::cached))
    throw Error("I4: an arena's list of cached pages is not what its pages say");
  Client::check(uses);
}

}  // namespace vtensor
