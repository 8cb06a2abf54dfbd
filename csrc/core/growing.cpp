// Growing: pages are claimed with the lock, mapped without it, and entered with it again; for one
// buffer or for many at once.
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "core/buffer.h"
#include "core/wait.h"

namespace vtensor {

// What one buffer of a growth needs, and where it stands.
class Buffer::Growing {
 public:
  Growing(const Growth& growth, const Caller& caller)
      : buffer_(*growth.buffer),
        growth_(growth),
        caller_(caller),
        wanted_(wider(buffer_.slots_of(growth.positions), buffer_.extent_)),
        written_(buffer_.slots_of(growth.written)),
        searched_(buffer_.extent_.empty() ? wanted_ : Interval{buffer_.extent_.end, wanted_.end}) {
    buffer_.table_.reserve(wanted_.end);
  }

  // Finds what is missing now; throws where that cannot be had.
  void look() {
    buffer_.require_whole(caller_.operation);
    arrival_.runs.clear();
    guarded_.clear();
    missing_ = 0;
    for (std::size_t row = 0; row < buffer_.shape_.rows; ++row) {
      buffer_.collect(arrival_.runs, row, searched_, is_unmapped);
      if (buffer_.guarded_ != 0) buffer_.collect(guarded_, row, written_, is_guarded);
    }
    for (const Run& run : arrival_.runs) {
      require_not_quarantined(run);
      missing_ += run.slots.size();
    }
    unordered_ = !searched_.empty() && !buffer_.all_passed(buffer_.ready_after_);
    if (missing_ != 0 || !guarded_.empty() || unordered_ || !buffer_.foreign_in(searched_).empty())
      buffer_.require_no_capture(caller_);
  }

  // Remapping is not ordered with streams, so what parting remaps must not be in use.
  void await_streams(PoolLock& lock) {
    if (guarded_.empty()) return;
    const Busy busy(buffer_, lock, caller_);
    buffer_.await_streams(lock, caller_);
  }

  bool busy() const { return buffer_.busy_; }
  void await_turn(PoolLock& lock) { buffer_.await_turn(lock, caller_); }
  std::size_t missing() const { return missing_; }
  std::span<const Run> guarded() const { return guarded_; }
  const Page* page_at(std::size_t row, std::size_t slot) const {
    return buffer_.table_.at(row, slot).page;
  }
  // Pages that parting takes now.
  std::size_t fresh() const { return buffer_.fresh_pages_for(guarded_); }

  // From here on the buffer is busy. Requires: it was not.
  void begin(PoolLock& lock) {
    busy_ = std::make_unique<Busy>(buffer_, lock, caller_);
    buffer_.note(caller_);
  }

  bool arrives() const { return missing_ != 0; }
  void claim() { buffer_.claim(arrival_); }
  Arriving arriving() { return {&buffer_, &arrival_}; }

  // What needs driver calls beside the new pages.
  void finish(PoolLock& lock) {
    if (unordered_) {
      for (const FencePtr& fence : buffer_.ready_after_)
        buffer_.driver_.order(caller_.stream, *fence);
    }
    buffer_.zero_foreign(caller_, buffer_.foreign_in(searched_));
    buffer_.part(lock, caller_, guarded_, growth_.stale);
  }

  void undo(PoolLock& lock) noexcept { buffer_.undo(lock, caller_, arrival_); }

  // The extent is the owner's: cannot fail.
  void commit() {
    Buffer& buffer = buffer_;
    if (!buffer.foreign_.empty()) {
      buffer.foreign_.begin = std::max(buffer.foreign_.begin, wanted_.end);
      if (buffer.foreign_.empty()) buffer.foreign_ = {};
    }
    if (searched_.end > searched_.begin) {
      ++(missing_ == 0 ? buffer.pool_->counted.growths_ready
                       : buffer.pool_->counted.growths_mapped);
      if (missing_ == 0) {
        trace::event(trace::What::revive, buffer.slot_address(0, searched_.begin),
                     searched_.size() * buffer.shape_.rows * buffer.page_size_, buffer.base_);
      }
    }
    buffer.pace_.step(growth_.positions.size() - buffer.positions_.size());
    buffer.positions_ = growth_.positions;
    buffer.extent_ = wanted_;
    buffer.retire_no_more(wanted_);
    buffer.set_ready({wanted_.end, std::max(wanted_.end, buffer.ready_.end)});
    if (buffer.placed()) return;  // its host says how far to look ahead
    buffer.mark_pace();
    buffer.look_ahead();
  }

 private:
  // An accepted prefix may be longer in pages than in positions.
  static Interval wider(Interval wanted, Interval extent) {
    return wanted.empty() ? wanted : Interval{wanted.begin, std::max(wanted.end, extent.end)};
  }
  void require_not_quarantined(const Run& run) const {
    if (buffer_.table_.at(run.row, run.slots.begin).state != EntryState::quarantined) return;
    throw Error("[" + std::string(caller_.operation) + "] page " + std::to_string(run.slots.begin) +
                " of row " + std::to_string(run.row) +
                " is quarantined after a driver call that could not be undone: move the tensor to "
                "a new range with reallocate(capacity)");
  }

  Buffer& buffer_;
  const Growth growth_;
  const Caller& caller_;
  const Interval wanted_;    // slots that the positions need
  const Interval written_;   // of these, which are to be the buffer's own
  const Interval searched_;  // which may be missing
  Arrival arrival_;
  std::vector<Run> guarded_;
  std::size_t missing_ = 0;
  bool unordered_ = false;
  std::unique_ptr<Busy> busy_;
};

void Buffer::grow(const Caller& caller, Interval positions, bool populate, Interval stale) {
  const Interval added{std::max(positions_.end, positions.begin), positions.end};
  const Growth growth{this, positions, added, stale};
  grow(caller, {&growth, 1}, populate);
}

// How many pages parting takes in all: where all who share a page part it, the last one keeps it.
std::size_t Buffer::fresh_pages_for(std::span<const Growing> all) {
  if (all.size() == 1) return all.front().fresh();
  std::size_t fresh = 0;
  std::unordered_map<const Page*, std::uint32_t> parting;
  for (const Growing& one : all) {
    for (const Run& run : one.guarded()) {
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
        const Page* page = one.page_at(run.row, slot);
        fresh += ++parting[page] < page->references;
      }
    }
  }
  return fresh;
}

void Buffer::grow(const Caller& caller, std::span<const Growth> growths, bool populate) {
  if (growths.empty()) return;
  const std::shared_ptr<PagePool>& pool = growths.front().buffer->pool_;
  PoolLock lock(pool);
  pool->reap();
  std::vector<Growing> all;
  all.reserve(growths.size());
  for (const Growth& growth : growths) all.emplace_back(growth, caller);
  for (Growing& one : all) one.look();
  for (Growing& one : all) one.await_streams(lock);
  std::size_t to_part = 0;
  for (bool again = true; again;) {
    for (Growing& one : all) one.await_turn(lock);
    if (std::any_of(all.begin(), all.end(), [](const Growing& one) { return one.busy(); }))
      continue;  // again, while another was waited for
    std::size_t missing = 0;
    for (Growing& one : all) {
      one.look();
      missing += one.missing();
    }
    to_part = fresh_pages_for(all);
    again = pool->require_ready(lock, caller.operation, missing + to_part);
  }
  for (Growing& one : all) one.begin(lock);

  std::vector<Arriving> arriving;
  try {
    arriving.reserve(all.size());
    for (Growing& one : all) {
      if (!one.arrives()) continue;
      one.claim();
      arriving.push_back(one.arriving());
    }
  } catch (...) {
    for (const Arriving& one : arriving) {
      one.arrival->error = std::current_exception();
      one.buffer->enter(*one.arrival);
    }
    throw;
  }
  // Nobody else gets these while the lock is let go, here or in parting.
  auto promised = static_cast<std::ptrdiff_t>(to_part);
  pool->promise(promised);
  const auto redeem = [&](std::ptrdiff_t pages) {
    pool->promise(-pages);
    promised -= pages;
  };
  if (!arriving.empty()) {
    {
      const Unlocked unlocked(lock);
      carry_out(arriving, caller.stream, populate);
    }
    for (const Arriving& one : arriving) one.buffer->enter(*one.arrival);
    for (const Arriving& one : arriving) {
      if (!one.arrival->error) continue;
      redeem(promised);
      std::rethrow_exception(one.arrival->error);
    }
  }
  try {
    for (Growing& one : all) {
      redeem(std::min(promised, static_cast<std::ptrdiff_t>(one.fresh())));
      one.finish(lock);
    }
    redeem(promised);
  } catch (...) {
    redeem(promised);
    for (Growing& one : all) one.undo(lock);
    throw;
  }
  for (Growing& one : all) one.commit();
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

void Buffer::open_homes() {
  if (!homes_.empty()) return;
  std::vector<RowHome> homes;
  homes.reserve(shape_.rows);
  try {
    for (std::size_t row = 0; row < shape_.rows; ++row)
      homes.push_back(pool_->open_home(row_pages_));
  } catch (...) {
    for (RowHome& home : homes) pool_->close_home(home);
    throw;
  }
  homes_ = std::move(homes);
}

// Takes pages for runs of empty entries.
void Buffer::claim(Arrival& arrival) {
  std::size_t claimed = 0;
  try {
    open_homes();
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

void Buffer::carry_out(Arrival& arrival, Stream stream, bool populate) noexcept {
  const Arriving one{this, &arrival};
  carry_out({&one, 1}, stream, populate);
}

// Maps claimed pages, zeroes what their last owners left, and makes their memory present.
void Buffer::carry_out(std::span<const Arriving> all, Stream stream, bool populate) noexcept {
  const Buffer& first = *all.front().buffer;
  PagePool& pool = *first.pool_;
  Driver& driver = first.driver_;
  const std::size_t page_size = first.page_size_;
  std::vector<PageRun> runs;
  std::vector<Handle> handles;
  bool mapped = false, zeroing = false;

  // `stuck` counts the pages of all arrivals in their order.
  const auto fail = [&all](const std::exception_ptr& error, const std::vector<std::size_t>& stuck) {
    std::size_t at = 0;
    auto next = stuck.begin();
    for (const Arriving& one : all) {
      one.arrival->error = error;
      const std::size_t end = at + one.arrival->pages.size();
      for (; next != stuck.end() && *next < end; ++next) one.arrival->stuck.push_back(*next - at);
      at = end;
    }
  };
  const auto all_stuck = [&all](const std::exception_ptr& error) {
    for (const Arriving& one : all) {
      one.arrival->error = error;
      for (std::size_t i = 0; i < one.arrival->pages.size(); ++i) one.arrival->stuck.push_back(i);
    }
  };
  try {
    std::size_t pages = 0, run_count = 0;
    for (const Arriving& one : all) {
      pages += one.arrival->pages.size();
      run_count += one.arrival->runs.size();
    }
    handles.reserve(pages);
    runs.reserve(run_count);
    for (const Arriving& one : all) {
      for (const Page* page : one.arrival->pages) handles.push_back(page->handle);
    }
    std::size_t at = 0;
    for (const Arriving& one : all) {
      for (const Run& run : one.arrival->runs) {
        runs.push_back(
            {one.buffer->address_of(run), std::span(handles).subspan(at, run.slots.size())});
        at += run.slots.size();
      }
    }
    {
      const trace::Span span(trace::What::map, runs.front().at, pages * page_size, first.base_);
      driver.map(runs, Access::writable);
    }
    mapped = true;
    const PageRun* run = runs.data();
    for (const Arriving& one : all) {
      const std::uint64_t owner = one.buffer->shape_.zeroed ? kNobody : one.buffer->id_;
      Page* const* page = one.arrival->pages.data();
      for (std::size_t r = 0; r < one.arrival->runs.size(); ++r, ++run) {
        const std::size_t n = run->handles.size();
        for (std::size_t i = 0; i < n; ++i) {
          if (!pool.must_zero(*page[i], owner)) continue;
          const std::size_t begin = i;
          while (i < n && pool.must_zero(*page[i], owner)) ++i;
          one.buffer->zero_bytes(run->at + begin * page_size, (i - begin) * page_size, stream);
          zeroing = one.arrival->zeroing = true;
        }
        if (populate) {
          const trace::Span span(trace::What::populate, run->at, n * page_size, one.buffer->base_);
          driver.populate(run->at, n);
        }
        page += n;
      }
      if (one.arrival->zeroing && one.arrival->ahead) one.arrival->zeroed = driver.fence(stream);
    }
  } catch (const UndoFailed& error) {
    fail(std::current_exception(), error.stuck);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!mapped) return fail(error, {});
    // Nobody saw these pages yet. What cannot be unmapped may show another's bytes: quarantined.
    try {
      if (zeroing && !wait_for(driver, driver.fence(stream), pool.options().patience))
        return all_stuck(error);
      const trace::Span span(trace::What::unmap, runs.front().at, handles.size() * page_size,
                             first.base_);
      driver.unmap(runs, Access::writable);
      fail(error, {});
    } catch (const UndoFailed& unmapping) {
      fail(error, unmapping.stuck);
    } catch (...) {
      all_stuck(error);
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
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
      if (is_mapped(table_.at(run.row, slot))) quarantine({run.row, {slot, slot + 1}});
    }
  }
}

}  // namespace vtensor
