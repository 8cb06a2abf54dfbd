// Giving back: what no extent and no generation covers is unmapped once the work that may touch it
// is done, by the mapper or, in a pool without one, at once.
#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"
#include "core/buffer.h"
#include "core/wait.h"

namespace vtensor {

namespace {

// When the mapper tries again what the driver refused; whoever asks tries at once.
constexpr std::chrono::nanoseconds kRetryRefused = std::chrono::milliseconds(250);
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

}  // namespace

void Buffer::touch(Interval slots) {
  if (slots.empty()) return;
  touched_ = touched_.empty() ? slots
                              : Interval{std::min(touched_.begin, slots.begin),
                                         std::max(touched_.end, slots.end)};
}

void Buffer::note(Stream stream) {
  if (!runs_behind(stream)) return;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(stream);
}

// A stream that a caller named may be gone, or its number stand for another, by the time that a
// fence is needed: so that is made now.
void Buffer::note(const Caller& caller) {
  if (caller.named && driver_.traits().asynchronous) {
    try {
      all_passed(after_);
      if (FencePtr fence = driver_.fence(caller.stream)) after_.push_back(std::move(fence));
      return;
    } catch (const Error&) {
      // It is being captured, or the driver refuses: made when it is needed.
    }
  }
  note(caller.stream);
}

void Buffer::use(const Caller& caller) {
  if (!runs_behind(caller.stream)) return;
  PoolLock lock(pool_);
  note(caller);
}

std::vector<FencePtr> Buffer::work() {
  PoolLock lock(pool_);
  return fences();
}

Generation* Buffer::lease(const Caller& caller) {
  Generation* generation = publish();
  PoolLock lock(pool_);
  if (!owned_) {  // by another thread, meanwhile
    pool_->end_locked(generation);
    throw Closed("[lease] a tensor is closed: make a new one");
  }
  if (!driver_.traits().asynchronous) return generation;
  if (caller.named) {
    leased_.push_back(caller.stream);
  } else {
    note(caller.stream);
  }
  return generation;
}

void Buffer::end_lease(const Caller& caller, FencePtr after) {
  if (!driver_.traits().asynchronous) return;
  PoolLock lock(pool_);
  if (!caller.named) return note(caller.stream);
  if (after) {
    try {
      all_passed(after_);
    } catch (const Error&) {
      // They are asked again.
    }
    after_.push_back(std::move(after));
  }
  const auto leased = std::find(leased_.begin(), leased_.end(), caller.stream);
  if (leased != leased_.end()) leased_.erase(leased);
}

// Points behind all work launched so far that may use the pages.
std::vector<FencePtr> Buffer::fences() {
  std::vector<FencePtr> fences = after_;
  fences.insert(fences.end(), ready_after_.begin(), ready_after_.end());
  for (const std::vector<Stream>* streams : {&streams_, &leased_}) {
    for (const Stream stream : *streams) {
      if (FencePtr fence = driver_.fence(stream)) fences.push_back(std::move(fence));
    }
  }
  return fences;
}

bool Buffer::all_passed(std::vector<FencePtr>& fences) {
  // Not erase_if: where the driver refuses to answer, none may be lost on the way.
  for (std::size_t i = 0; i < fences.size();) {
    if (driver_.passed(*fences[i])) {
      std::swap(fences[i], fences.back());
      fences.pop_back();
    } else {
      ++i;
    }
  }
  return fences.empty();
}

// Whether all has passed that the next growth, or the next owner, would have to wait for.
bool Buffer::is_quiet() {
  if (cleaned_after_ && driver_.passed(*cleaned_after_)) cleaned_after_ = nullptr;
  const bool ready = all_passed(ready_after_);
  return all_passed(parked_after_) && ready && !cleaned_after_;
}

bool Buffer::await(const FencePtr& fence) {
  return wait_for(driver_, fence, pool_->options().patience);
}

// Whether all work launched in `stream` so far ends in time. Lets the lock go meanwhile.
bool Buffer::await_work(PoolLock& lock, Stream stream) noexcept {
  bool over = false;
  try {
    const FencePtr fence = driver_.fence(stream);
    lock.let_go();
    try {
      over = await(fence);
    } catch (const Error&) {
    }
    lock.take_again();
  } catch (const Error&) {
  }
  return over;
}

// Waits for the work of all streams that use the pages, without the lock. Requires: busy.
void Buffer::await_streams(PoolLock& lock, const Caller& caller) {
  note(caller);
  const std::vector<FencePtr> all = fences();
  if (all.empty()) return;
  lock.let_go();
  bool passed = true;
  std::exception_ptr error;
  try {
    for (const FencePtr& fence : all) passed = passed && await(fence);
  } catch (...) {
    error = std::current_exception();
  }
  lock.take_again();
  if (error) std::rethrow_exception(error);
  if (passed) return;
  throw TimedOut("[" + std::string(caller.operation) + "] timed out after " +
                 seconds_text(pool_->options().patience) +
                 ": work launched on the device that uses this tensor has not ended; nothing was "
                 "changed");
}

void Buffer::forget(const Generation* generation) noexcept {
  generations_[generation->place] = generations_.back();
  generations_.back()->place = generation->place;
  generations_.pop_back();
  covered_.remove(generation->slots);
  if (!extent_.contains(generation->slots)) touch(generation->slots);
}

void Buffer::retract(const Caller& caller, Interval positions, std::size_t keep) {
  PoolLock lock(pool_);
  note(caller);
  // Not what is only wanted: the mapper may be unmapping it.
  const std::size_t mapped_end = std::max(extent_end(), ready_.end);
  touch(extent_);
  touch(ahead());
  positions_ = positions;
  extent_ = slots_of(positions);
  // What is truncated and soon written again stays, as far as the look-ahead goes.
  std::size_t kept_end = extent_.end;
  if (placed()) {
    if (!extent_.empty())
      kept_end = slots_of({0, std::clamp(keep, positions.end, shape_.capacity)}).end;
    foreign_.end = std::min(foreign_.end, kept_end);
    if (foreign_.empty()) foreign_ = {};
  } else if (pool_->looks_ahead() && !extent_.empty()) {
    kept_end =
        slots_of({positions.begin, limit_lead(positions.end + pace_.lead(pool_->horizon()))}).end;
  }
  want_end_ = 0;
  set_ready(usable(extent_end(), std::min(mapped_end, kept_end)));
  give_back_unused();
}

void Buffer::abandon() noexcept {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  owner_end_->buffer = shared_from_this();
  owner_end_->is_owner = true;
  pool_->end(owner_end_.release());
}

void Buffer::leave() noexcept {
  touch({0, table_.reserved()});
  owned_ = false;
  positions_ = extent_ = foreign_ = {};
  if (std::exchange(wanting_, false)) pool_->unwant(shared_from_this());
  want_end_ = 0;
  set_ready({});
}

std::vector<Interval> Buffer::uncovered() const {
  std::array<Interval, 3> kept{extent_, ahead(), parked_};
  std::sort(kept.begin(), kept.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  std::vector<Interval> rest;
  const auto add = [this, &rest](Interval slots) {
    if (!slots.empty() && count_mapped(slots) != 0) rest.push_back(slots);
  };
  covered_.gaps(touched_, [&kept, &add](Interval gap) {
    for (const Interval interval : kept) {
      if (intersection(interval, gap).empty()) continue;
      add({gap.begin, interval.begin});
      gap.begin = std::max(gap.begin, interval.end);
    }
    add(gap);
  });
  return rest;
}

// Slots that are unmapped by now, or come into use again.
void Buffer::retire_no_more(Interval slots) {
  if (slots.empty() || retiring_.empty()) return;
  std::vector<Interval> rest;
  for (const Interval interval : retiring_) {
    const Interval before{interval.begin, std::min(interval.end, slots.begin)};
    const Interval after{std::max(interval.begin, slots.end), interval.end};
    if (!before.empty()) rest.push_back(before);
    if (!after.empty()) rest.push_back(after);
  }
  retiring_ = std::move(rest);
}

std::size_t Buffer::pages_leaving() const {
  if (refusal_) return 0;
  std::vector<Interval> leaving = touched_.empty() ? std::vector<Interval>{} : uncovered();
  leaving.insert(leaving.end(), retiring_.begin(), retiring_.end());
  std::size_t pages = 0;
  for (const Interval slots : leaving) pages += count_mapped(slots);
  return pages;
}

// Whether something is on its way out. Notes what must be done before it may go.
bool Buffer::begin_retirement() {
  if (!retiring_.empty()) return true;
  if (touched_.empty()) return false;
  std::vector<Interval> slots = uncovered();
  if (!slots.empty()) {
    retiring_after_ = fences();
    for (const Interval interval : slots) {
      trace::event(trace::What::retire, slot_address(0, interval.begin),
                   interval.size() * shape_.rows * page_size_, base_);
    }
  }
  retiring_ = std::move(slots);
  touched_ = {};
  return !retiring_.empty();
}

void Buffer::give_back_unused() noexcept {
  if (busy_) return;  // whoever made it busy comes here again
  if (!owned_ && generations_.empty() && std::exchange(may_park_, false)) try_to_park();
  if (!pool_->looks_ahead()) {
    if (!settle(nullptr)) pool_->settle_later(shared_from_this());
    return;
  }
  refusal_ = nullptr;
  try {
    const bool ends = !owned_ && reserved_ && generations_.empty() && parked_.empty();
    if (begin_retirement() || ends || !ready_after_.empty() || !parked_after_.empty() ||
        cleaned_after_) {
      pool_->settle_later(shared_from_this());
    }
  } catch (...) {
    refused();
    pool_->settle_later(shared_from_this());
  }
}

void Buffer::refused() noexcept {
  refusal_ = std::current_exception();
  retry_at_ = std::chrono::steady_clock::now() + kRetryRefused;
}

bool Buffer::settle(PoolLock* lock) noexcept {
  if (busy_) return false;
  refusal_ = nullptr;
  try {
    const bool quiet = is_quiet();
    while (begin_retirement()) {
      Departure departure;
      if (!claim_departure(departure, kNoLimit)) return false;
      {
        std::optional<Unlocked> unlocked;
        if (lock != nullptr) unlocked.emplace(*lock);
        carry_out(departure);
      }
      enter_back(departure);
      if (refusal_) return false;
    }
    return release_range() && quiet;
  } catch (...) {
    refused();
    return false;
  }
}

// For the mapper: what it can take out, or that it must wait.
Buffer::Claim Buffer::claim_back(Departure& departure, std::size_t pages) noexcept {
  if (busy()) return Claim::waits;
  // Of a closed pool a caller tries again: the process may be about to end, and a
  // device in error refuses for good.
  if (refusal_ && (pool_->retired() || std::chrono::steady_clock::now() < retry_at_))
    return Claim::refused;
  refusal_ = nullptr;
  try {
    const bool quiet = is_quiet();
    if (begin_retirement())
      return claim_departure(departure, pages) ? Claim::claimed : Claim::waits;
    return release_range() && quiet ? Claim::done : Claim::waits;
  } catch (...) {
    refused();
    return Claim::refused;
  }
}

// What unmapping these runs takes, the first `writable` of them writable.
Buffer::Departure Buffer::departing(std::vector<Run> runs, std::size_t writable) {
  Departure departure;
  departure.runs = std::move(runs);
  departure.writable = writable;
  for (const Run& run : departure.runs) {
    const auto of_run = handles(run);
    departure.handles.insert(departure.handles.end(), of_run.begin(), of_run.end());
  }
  departure.stuck.reserve(departure.handles.size());
  return departure;
}

// About `pages` pages of what is retiring. False where the work that may touch them is not done.
bool Buffer::claim_departure(Departure& departure, std::size_t pages) {
  if (!all_passed(retiring_after_)) return false;
  std::vector<Interval> slots;
  for (std::size_t left = std::max<std::size_t>(1, pages / shape_.rows), i = 0;
       i < retiring_.size() && left != 0; ++i) {
    const Interval some{retiring_[i].begin,
                        retiring_[i].begin + std::min(left, retiring_[i].size())};
    slots.push_back(some);
    left -= some.size();
  }
  std::vector<Run> runs;
  std::size_t writable = 0;
  for (const auto wanted : {is_writable, is_guarded}) {
    for (const Interval some : slots) {
      for (std::size_t row = 0; row < shape_.rows; ++row) collect(runs, row, some, wanted);
    }
    if (wanted == is_writable) writable = runs.size();
  }
  departure = departing(std::move(runs), writable);
  departure.slots = std::move(slots);
  busy_ = true;
  return true;
}

void Buffer::carry_out(Departure& departure,
                       std::optional<std::chrono::steady_clock::time_point> until) noexcept {
  const std::size_t at_once = until ? 1 : departure.runs.size();
  try {
    std::vector<PageRun> batch;
    batch.reserve(at_once);
    std::size_t at = 0;
    while (departure.done < departure.runs.size()) {
      if (until && departure.done != 0 && std::chrono::steady_clock::now() >= *until) return;
      const bool writable = departure.done < departure.writable;
      const std::size_t end = writable ? departure.writable : departure.runs.size();
      batch.clear();
      std::size_t pages = 0;
      for (std::size_t i = departure.done; i < std::min(end, departure.done + at_once); ++i) {
        const Run& run = departure.runs[i];
        batch.push_back(
            {address_of(run), std::span(departure.handles).subspan(at + pages, run.slots.size())});
        pages += run.slots.size();
      }
      const trace::Span span(trace::What::unmap, batch.front().at, pages * page_size_, base_);
      driver_.unmap(batch, writable ? Access::writable : Access::guarded);
      departure.done += batch.size();
      at += pages;
    }
  } catch (const UndoFailed& error) {
    departure.error = std::current_exception();
    departure.stuck.assign(error.stuck.begin(), error.stuck.end());
  } catch (...) {
    departure.error = std::current_exception();
  }
}

void Buffer::enter(Departure& departure) {
  for (std::size_t i = 0; i < departure.done; ++i) {
    const Run& run = departure.runs[i];
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
      Entry& entry = table_.at(run.row, slot);
      if (is_guarded(entry)) --guarded_;
      pool_->drop(entry.page, aged_);
      entry = {};
    }
    mapped_ -= run.slots.size();
  }
  std::size_t first = 0;
  auto stuck = departure.stuck.begin();
  for (std::size_t i = departure.done; i < departure.runs.size(); ++i) {
    const Run& run = departure.runs[i];
    std::vector<std::size_t> of_run;
    for (; stuck != departure.stuck.end() && *stuck < first + run.slots.size(); ++stuck)
      of_run.push_back(*stuck - first);
    quarantine(run, of_run);
    first += run.slots.size();
  }
}

void Buffer::enter_back(Departure& departure) {
  busy_ = false;
  enter(departure);
  if (departure.error) {
    refusal_ = departure.error;
    retry_at_ = std::chrono::steady_clock::now() + kRetryRefused;
  } else if (departure.done == departure.runs.size()) {
    for (const Interval slots : departure.slots) retire_no_more(slots);
  }
  pool_->changed();
}

// Frees the range of a buffer that nobody can reach any more. False where something is left in it.
bool Buffer::release_range() {
  if (owned_ || !reserved_ || !generations_.empty() || !parked_.empty()) return true;
  if (mapped_ != 0) return false;
  if (quarantined_ != 0) {
    // The range, or that of its host, is left to the driver's end, the pages to the reference that
    // their quarantine holds.
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
        if (Page* page = table_.at(row, slot).page) pool_->drop(page);
      }
    }
    if (host_ != nullptr) host_->buffer->quarantined_ += quarantined_;
  } else if (host_ == nullptr) {
    driver_.free_range(base_, row_pages_ * shape_.rows);
  }
  if (host_ != nullptr) pool_->end_locked(std::exchange(host_, nullptr));
  for (RowHome& home : homes_) pool_->close_home(home);
  homes_.clear();
  reserved_ = false;
  pool_->remove(this);
  return true;
}

}  // namespace vtensor
