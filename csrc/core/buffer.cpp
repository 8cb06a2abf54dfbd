#include "core/buffer.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"

namespace vtensor {

std::shared_ptr<Buffer> Buffer::create(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                       const Caller& caller) {
  {
    PoolLock lock(pool);
    pool->reap();
    if (std::shared_ptr<Buffer> parked = pool->find_parked(shape)) {
      const Busy busy(*parked, lock, caller);  // the mapper may be zeroing a part of it
      if (parked->adoptable()) {
        parked->adopt(caller);
        ++pool->counted.tensors_adopted;
        return parked;
      }
    }
  }
  return make(pool, shape, caller);
}

std::shared_ptr<Buffer> Buffer::make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                     const Caller& caller) {
  const std::size_t page = pool->page_size();
  const auto bytes = checked_multiply(shape.capacity, shape.item_bytes);
  const auto too_large = [&] {
    return CapacityExceeded("[empty] capacity of " + std::to_string(shape.capacity) +
                            " positions of " + std::to_string(shape.item_bytes) + " bytes in " +
                            std::to_string(shape.rows) +
                            " rows passes the address space: lower capacity=");
  };
  // 2^47 bytes are the addresses of a process on x86-64.
  constexpr std::size_t limit = std::size_t{1} << 47;
  if (!bytes || *bytes > limit) throw too_large();
  const std::size_t row_pages = std::max<std::size_t>(1, ceil_div(shape.phase + *bytes, page));
  const auto pages = checked_multiply(row_pages, shape.rows);
  if (!pages || *pages > limit / page) throw too_large();

  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages));
  PoolLock lock(pool);
  pool->reap();
  buffer->base_ = pool->driver().reserve(*pages);
  buffer->reserved_ = true;
  buffer->id_ = pool->add(buffer.get());
  buffer->note(caller.stream);
  ++pool->counted.tensors_fresh;
  try {
    buffer->homes_.reserve(shape.rows);
    for (std::size_t row = 0; row < shape.rows; ++row)
      buffer->homes_.push_back(pool->open_home(row_pages));
  } catch (...) {
    buffer->owned_ = false;
    if (!buffer->settle()) pool->settle_later(buffer);
    throw;
  }
  return buffer;
}

Buffer::Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages)
    : pool_(pool),
      driver_(pool->driver()),
      shape_(shape),
      page_size_(pool->page_size()),
      row_pages_(row_pages),
      table_(shape.rows) {}

// Nothing to give back: settle() did, or the process is a forked child.
Buffer::~Buffer() = default;

void Buffer::await_turn(PoolLock& lock, const Caller& caller) {
  ++waiting_;
  try {
    pool_->await(lock, caller.operation, "the mapper's driver call for this tensor",
                 [this] { return !busy_; });
  } catch (...) {
    --waiting_;
    throw;
  }
  --waiting_;
}

Buffer::Busy::Busy(Buffer& buffer, PoolLock& lock, const Caller& caller) : buffer_(buffer) {
  buffer.await_turn(lock, caller);
  buffer.busy_ = true;
}

Buffer::Busy::~Busy() {
  buffer_.busy_ = false;
  buffer_.pool_->changed();
  buffer_.give_back_unused();  // what views left meanwhile
}

Interval Buffer::slots_of(Interval positions) const {
  if (positions.empty()) return {};
  return {(shape_.phase + positions.begin * shape_.item_bytes) / page_size_,
          ceil_div(shape_.phase + positions.end * shape_.item_bytes, page_size_)};
}

void Buffer::collect(std::vector<Run>& runs, std::size_t row, Interval slots,
                     bool (*wanted)(const Entry&)) const {
  const std::size_t end = std::min(slots.end, table_.reserved());
  if (slots.begin >= end) return;
  const Entry* const entries = &table_.at(row, 0);
  for (std::size_t slot = slots.begin; slot < end;) {
    const EntryState state = entries[slot].state;
    const std::size_t first = slot;
    while (slot < end && entries[slot].state == state) ++slot;
    if (wanted(entries[first])) runs.push_back({row, {first, slot}});
  }
}

std::span<const Handle> Buffer::handles(const Run& run) {
  scratch_.clear();
  for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
    scratch_.push_back(table_.at(run.row, slot).page->handle);
  }
  return scratch_;
}

void Buffer::raise_error() {
  PoolLock lock(pool_, std::try_to_lock);
  if (!lock || !error_) return;  // the next operation will tell
  std::rethrow_exception(std::exchange(error_, nullptr));
}

void Buffer::require_no_capture(const Caller& caller) {
  if (!driver_.traits().asynchronous || !driver_.capturing(caller.stream)) return;
  throw Error("[" + std::string(caller.operation) +
              "] this needs driver calls, and the current stream is being captured into a CUDA "
              "graph: grow before the capture, or extend(n) and truncate(length) once so that the "
              "pages are ready");
}

bool Buffer::grow_within(const Caller& caller, Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock) return false;
  const Interval added = slots_of({positions_.end, positions.end});
  const bool crosses = !extent_.contains(added);
  if (crosses && (added.end > ready_.end || !ready_after_.empty())) return false;
  if (guarded_ != 0) {
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      for (std::size_t slot = added.begin; slot < added.end; ++slot) {
        if (!is_writable(table_.at(row, slot))) return false;
      }
    }
  }
  note(caller.stream);
  pace_.step(positions.end - positions_.end);
  positions_ = positions;
  if (crosses) {
    const Interval wanted = slots_of(positions);
    trace::event(trace::What::revive, slot_address(0, extent_end()),
                 (wanted.end - extent_end()) * shape_.rows * page_size_, base_);
    extent_ = wanted;
    ++pool_->counted.growths_ready;
    set_ready({wanted.end, ready_.end});
    mark_pace();
  }
  look_ahead();
  return true;
}

void Buffer::require_ready(PoolLock& lock, const Caller& caller,
                           const std::function<std::pair<std::size_t, std::size_t>()>& missing) {
  bool again;
  do {
    await_turn(lock, caller);
    const auto [pages, parted] = missing();
    again = pool_->require_ready(lock, caller.operation, pages, parted);
  } while (again);
}

void Buffer::grow(const Caller& caller, Interval positions, bool populate, Interval stale) {
  PoolLock lock(pool_);
  pool_->reap();
  const Interval wanted = slots_of(positions);
  const Interval added = slots_of({std::max(positions_.end, positions.begin), positions.end});
  const Interval searched = extent_.empty() ? wanted : Interval{extent_.end, wanted.end};
  table_.reserve(wanted.end);

  Arrival arrival;
  std::vector<Run> guarded;
  std::size_t missing = 0;
  bool unordered = false;
  const auto look = [&] {
    require_whole(caller.operation);
    arrival.runs.clear();
    guarded.clear();
    missing = 0;
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      collect(arrival.runs, row, searched, is_unmapped);
      if (guarded_ != 0) collect(guarded, row, added, is_guarded);
    }
    for (const Run& run : arrival.runs) {
      if (table_.at(run.row, run.slots.begin).state == EntryState::quarantined) {
        throw Error("[" + std::string(caller.operation) + "] page " +
                    std::to_string(run.slots.begin) + " of row " + std::to_string(run.row) +
                    " is quarantined after a driver call that could not be undone: move the "
                    "tensor to a new range with reallocate(capacity)");
      }
      missing += run.slots.size();
    }
    unordered = !searched.empty() && !all_passed(ready_after_);
    if (missing != 0 || !guarded.empty() || unordered || !foreign_in(searched).empty())
      require_no_capture(caller);
  };
  look();
  if (!guarded.empty()) {
    const Busy busy(*this, lock, caller);
    await_streams(lock, caller);
  }
  require_ready(lock, caller, [&] {
    look();
    return std::pair(missing + fresh_pages_for(guarded), std::size_t{0});
  });
  const Busy busy(*this, lock, caller);
  note(caller);
  if (missing != 0) {
    claim(arrival);
    const auto to_part = static_cast<std::ptrdiff_t>(fresh_pages_for(guarded));
    pool_->promise(to_part);
    pool_->depart();
    lock.let_go();
    carry_out(arrival, caller.stream, populate);
    lock.take_again();
    pool_->arrive();
    pool_->promise(-to_part);
    enter(arrival);
    if (arrival.error) std::rethrow_exception(arrival.error);
  }
  const std::vector<Run> foreign = foreign_in(searched);
  try {
    if (unordered) {
      for (const FencePtr& fence : ready_after_) driver_.order(caller.stream, *fence);
    }
    zero_foreign(caller, foreign);
    part(lock, caller, guarded, stale);
  } catch (...) {
    undo(lock, caller, arrival);
    throw;
  }
  if (!foreign_.empty()) {
    foreign_.begin = std::max(foreign_.begin, wanted.end);
    if (foreign_.empty()) foreign_ = {};
  }
  if (searched.end > searched.begin) {
    ++(missing == 0 ? pool_->counted.growths_ready : pool_->counted.growths_mapped);
    if (missing == 0) {
      trace::event(trace::What::revive, slot_address(0, searched.begin),
                   searched.size() * shape_.rows * page_size_, base_);
    }
  }
  pace_.step(positions.size() - positions_.size());
  positions_ = positions;
  extent_ = wanted;
  revive(wanted);
  set_ready({wanted.end, std::max(wanted.end, ready_.end)});
  mark_pace();
  look_ahead();
}

// Takes pages for runs of empty entries.
void Buffer::claim(Arrival& arrival) {
  std::size_t claimed = 0;
  try {
    for (const Run& run : arrival.runs) {
      const Page* previous =
          run.slots.begin ? table_.at(run.row, run.slots.begin - 1).page : nullptr;
      const std::size_t begin = arrival.pages.size();
      pool_->take(homes_[run.row], previous, run.slots.size(), arrival.pages);
      Entry* entry = table_.entries(run.row, run.slots.begin);
      for (std::size_t i = begin; i < arrival.pages.size(); ++i)
        *entry++ = {arrival.pages[i], EntryState::arriving};
      ++claimed;
    }
    arrival.stuck.reserve(arrival.pages.size());
  } catch (...) {
    arrival.error = std::current_exception();
    arrival.runs.resize(claimed);
    enter(arrival);
    throw;
  }
}

// Maps claimed pages, zeroes what their last owners left, and makes their memory present.
void Buffer::carry_out(Arrival& arrival, Stream stream, bool populate) noexcept {
  const auto all_stuck = [&arrival] {
    for (std::size_t i = 0; i < arrival.pages.size(); ++i) arrival.stuck.push_back(i);
  };
  bool mapped = false;
  std::vector<PageRun> runs;
  std::vector<Handle> handles;
  try {
    handles.reserve(arrival.pages.size());
    bool dirty = false;
    for (const Page* page : arrival.pages) {
      handles.push_back(page->handle);
      dirty |= page->dirty;
    }
    runs.reserve(arrival.runs.size());
    std::size_t at = 0;
    for (const Run& run : arrival.runs) {
      runs.push_back({address_of(run), std::span(handles).subspan(at, run.slots.size())});
      at += run.slots.size();
    }
    {
      const trace::Span span(trace::What::map, runs.front().at, handles.size() * page_size_, base_);
      driver_.map(runs, Access::writable);
    }
    mapped = true;
    const std::uint64_t owner = shape_.zeroed ? kNobody : id_;
    at = 0;
    for (const PageRun& run : runs) {
      const std::size_t n = run.handles.size();
      Page* const* pages = arrival.pages.data() + at;
      for (std::size_t i = dirty ? 0 : n; i < n; ++i) {
        if (!pool_->must_zero(*pages[i], owner)) continue;
        const std::size_t first = i;
        while (i < n && pool_->must_zero(*pages[i], owner)) ++i;
        const trace::Span span(trace::What::zero, run.at + first * page_size_,
                               (i - first) * page_size_, base_);
        driver_.zero(run.at + first * page_size_, (i - first) * page_size_, stream);
        arrival.zeroing = true;
      }
      if (populate) {
        const trace::Span span(trace::What::populate, run.at, n * page_size_, base_);
        driver_.populate(run.at, n);
      }
      at += n;
    }
    if (arrival.zeroing && arrival.ahead) arrival.zeroed = driver_.fence(stream);
  } catch (const UndoFailed& error) {
    arrival.error = std::current_exception();
    arrival.stuck.assign(error.stuck.begin(), error.stuck.end());
  } catch (...) {
    arrival.error = std::current_exception();
    if (!mapped) return;
    // Nobody saw these pages yet. What cannot be unmapped may show another's bytes: quarantined.
    try {
      if (arrival.zeroing && !await(driver_.fence(stream))) {
        all_stuck();
        return;
      }
      const trace::Span span(trace::What::unmap, runs.front().at, handles.size() * page_size_,
                             base_);
      driver_.unmap(runs, Access::writable);
    } catch (const UndoFailed& error) {
      arrival.stuck.assign(error.stuck.begin(), error.stuck.end());
    } catch (...) {
      all_stuck();
    }
  }
}

// Enters pages that have arrived, or gives them back.
void Buffer::enter(Arrival& arrival) {
  Page* const* page = arrival.pages.data();
  if (!arrival.error) {
    for (const Run& run : arrival.runs) {
      Entry* const entries = table_.entries(run.row, run.slots.begin);
      for (std::size_t i = 0; i < run.slots.size(); ++i) {
        (*page++)->last_owner = id_;
        entries[i].state = EntryState::writable;
      }
      mapped_ += run.slots.size();
    }
    return;
  }
  std::size_t at = 0;
  auto stuck = arrival.stuck.begin();
  for (const Run& run : arrival.runs) {
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot, ++at) {
      Entry& entry = table_.at(run.row, slot);
      if (stuck != arrival.stuck.end() && *stuck == at) {
        ++stuck;
        entry.state = EntryState::quarantined;
        pool_->quarantine(page[at]);
        ++quarantined_;
      } else {
        const bool dirty = page[at]->dirty;  // nobody wrote to it here
        pool_->drop(page[at]);
        page[at]->dirty = dirty;
        entry = {};
      }
    }
  }
}

// Takes back pages that have arrived for a growth that failed afterwards.
void Buffer::undo(PoolLock& lock, const Caller& caller, const Arrival& arrival) noexcept {
  if (arrival.runs.empty()) return;
  try {
    Departure departure = departing(arrival.runs, arrival.runs.size());
    if (!arrival.zeroing || await_work(lock, caller.stream)) {
      carry_out(departure);
      enter(departure);
      if (!departure.error) return;
    }
  } catch (...) {
  }
  for (const Run& run : arrival.runs) {
    if (is_mapped(table_.at(run.row, run.slots.begin))) quarantine(run);
  }
}

// Runs of pages in `slots` that show what an adopted buffer's last owner left.
std::vector<Buffer::Run> Buffer::foreign_in(Interval slots) const {
  std::vector<Run> runs;
  const auto is_foreign = [this](const Entry& entry) {
    return is_writable(entry) && !clean(*entry.page);
  };
  const std::size_t end = std::min(slots.end, table_.reserved());
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = slots.begin; slot < end; ++slot) {
      const std::size_t first = slot;
      while (slot < end && is_foreign(table_.at(row, slot))) ++slot;
      if (slot > first) runs.push_back({row, {first, slot}});
    }
  }
  return runs;
}

void Buffer::zero_foreign(const Caller& caller, std::span<const Run> runs) {
  for (const Run& run : runs)
    driver_.zero(address_of(run), run.slots.size() * page_size_, caller.stream);
  for (const Run& run : runs) {
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot)
      table_.at(run.row, slot).page->last_owner = id_;
  }
}

// Maps pages of others at a run of empty entries.
void Buffer::map_shared(const Run& run, std::span<Page* const> pages, EntryState state) {
  scratch_.clear();
  for (const Page* page : pages) scratch_.push_back(page->handle);
  const auto enter = [&](std::size_t i, EntryState entered) {
    pool_->share(pages[i]);
    table_.at(run.row, run.slots.begin + i) = {pages[i], entered};
  };
  const PageRun whole{address_of(run), scratch_};
  try {
    const trace::Span span(trace::What::map, whole.at, scratch_.size() * page_size_, base_);
    driver_.map({&whole, 1}, state == EntryState::guarded ? Access::guarded : Access::writable);
  } catch (const UndoFailed& error) {
    for (const std::size_t i : error.stuck) {
      enter(i, EntryState::quarantined);
      pool_->quarantine(pages[i]);
      ++quarantined_;
    }
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    enter(i, state);
    if (state == EntryState::writable) pages[i]->last_owner = id_;  // the owner moves here
  }
  mapped_ += pages.size();
  if (state == EntryState::guarded) guarded_ += pages.size();
}

void Buffer::quarantine(const Run& run, std::span<const std::size_t> stuck) {
  for (const std::size_t i : stuck) {
    Entry& entry = table_.at(run.row, run.slots.begin + i);
    if (entry.state == EntryState::guarded) --guarded_;
    entry.state = EntryState::quarantined;
    pool_->quarantine(entry.page);
    --mapped_;
    ++quarantined_;
  }
}

void Buffer::quarantine(const Run& run) noexcept {
  for (std::size_t i = 0; i < run.slots.size(); ++i) quarantine(run, std::span(&i, 1));
}

Generation* Buffer::publish() {
  auto generation = std::make_unique<Generation>();
  PoolLock lock(pool_);
  generation->buffer = shared_from_this();
  generation->slots = extent_;
  generations_.push_back(generation.get());
  return generation.release();
}

bool Buffer::published() {
  PoolLock lock(pool_);
  pool_->reap();
  return !generations_.empty();
}

void Buffer::zero(const Caller& caller, Interval positions) {
  PoolLock lock(pool_);
  zero_positions(positions, caller.stream);
}

void Buffer::zero_positions(Interval positions, Stream stream) {
  if (positions.empty()) return;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    driver_.zero(address_of(row, positions.begin), positions.size() * shape_.item_bytes, stream);
  }
}

bool Buffer::guarded() {
  PoolLock lock(pool_);
  return guarded_ != 0;
}

// Pages of the extent that are quarantined.
std::size_t Buffer::lost_pages() const {
  std::size_t lost = 0;
  if (quarantined_ == 0) return lost;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = extent_.begin; slot < extent_.end; ++slot) {
      lost += table_.at(row, slot).state == EntryState::quarantined;
    }
  }
  return lost;
}

void Buffer::require_whole(const char* operation) const {
  if (const std::size_t lost = lost_pages()) {
    throw Error(
        "[" + std::string(operation) + "] " + std::to_string(lost) +
        " pages of the tensor were lost in a driver call that could not be undone: close it");
  }
}

}  // namespace vtensor
