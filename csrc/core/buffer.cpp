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
  std::shared_ptr<Buffer> parked;
  {
    const PoolLock lock(pool);
    pool->reap();
    parked = pool->find_parked(shape);
  }
  if (parked && parked->adopt_parked(caller)) return parked;
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
  buffer->note(caller);
  ++pool->counted.tensors_fresh;
  return buffer;
}

std::shared_ptr<Buffer> Buffer::place(const std::shared_ptr<Buffer>& host, Address base,
                                      const RowShape& shape, const Caller& caller) {
  const std::shared_ptr<PagePool>& pool = host->pool_;
  const std::size_t row_pages =
      ceil_div(shape.phase + shape.capacity * shape.item_bytes, pool->page_size());
  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages));
  std::unique_ptr<Generation> pin(host->publish());
  PoolLock lock(pool);
  buffer->base_ = base;
  buffer->note(caller);
  try {
    buffer->id_ = pool->add(buffer.get());
  } catch (...) {
    pool->end_locked(pin.release());
    throw;
  }
  buffer->host_ = pin.release();
  buffer->reserved_ = true;
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
  if (!driver_.traits().asynchronous) return;
  driver_.require_own(caller.operation, caller.stream);
  if (!driver_.capturing(caller.stream)) return;
  throw Error("[" + std::string(caller.operation) +
              "] this needs driver calls, and the current stream is being captured into a CUDA "
              "graph: grow before the capture, or extend(n) and truncate(length) once so that the "
              "pages are ready");
}

bool Buffer::is_ready(Interval positions) const {
  const Interval added = slots_of({positions_.end, positions.end});
  if (!extent_.contains(added) && (added.end > ready_.end || !ready_after_.empty())) return false;
  for (std::size_t row = 0; guarded_ != 0 && row < shape_.rows; ++row) {
    for (std::size_t slot = added.begin; slot < added.end; ++slot) {
      if (!is_writable(table_.at(row, slot))) return false;
    }
  }
  return true;
}

void Buffer::grow_ready(const Caller& caller, Interval positions) {
  note(caller.stream);
  if (!placed()) pace_.step(positions.end - positions_.end);
  positions_ = positions;
  const Interval wanted = slots_of(positions);
  if (wanted.end > extent_end()) {
    trace::event(trace::What::revive, slot_address(0, extent_end()),
                 (wanted.end - extent_end()) * shape_.rows * page_size_, base_);
    extent_ = wanted;
    ++pool_->counted.growths_ready;
    set_ready({wanted.end, ready_.end});
    if (!placed()) mark_pace();
  }
  if (!placed()) look_ahead();
}

bool Buffer::grow_within(const Caller& caller, Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock || !is_ready(positions)) return false;
  grow_ready(caller, positions);
  return true;
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
    zero_bytes(address_of(run), run.slots.size() * page_size_, caller.stream);
  for (const Run& run : runs) {
    for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot)
      table_.at(run.row, slot).page->last_owner = id_;
  }
}

// Maps pages of others, those of one run behind those of the last, at empty entries. Lets the lock
// go meanwhile. Requires: no other thread uses these entries.
void Buffer::map_shared(PoolLock& lock, std::span<const Run> runs, std::span<Page* const> pages,
                        EntryState state) {
  if (runs.empty()) return;
  std::vector<Handle> handles;
  for (const Page* page : pages) handles.push_back(page->handle);
  std::vector<PageRun> mapped;
  std::size_t at = 0;
  for (const Run& run : runs) {
    mapped.push_back({address_of(run), std::span(handles).subspan(at, run.slots.size())});
    at += run.slots.size();
  }
  const auto for_each = [&](auto enter) {
    std::size_t i = 0;
    for (const Run& run : runs) {
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot, ++i)
        enter(i, table_.at(run.row, slot));
    }
  };
  for (Page* page : pages) pool_->share(page);  // they are to be there when the calls are made
  try {
    const Unlocked unlocked(lock);
    const trace::Span span(trace::What::map, mapped.front().at, pages.size() * page_size_, base_);
    driver_.map(mapped, state == EntryState::guarded ? Access::guarded : Access::writable);
  } catch (const UndoFailed& error) {
    auto stuck = error.stuck.begin();
    for_each([&](std::size_t i, Entry& entry) {
      if (stuck == error.stuck.end() || *stuck != i) return pool_->drop(pages[i]);
      ++stuck;
      entry = {pages[i], EntryState::quarantined};
      pool_->quarantine(pages[i]);
      ++quarantined_;
    });
    throw;
  } catch (...) {
    for (Page* page : pages) pool_->drop(page);
    throw;
  }
  for_each([&](std::size_t i, Entry& entry) {
    entry = {pages[i], state};
    if (state == EntryState::writable) pages[i]->last_owner = id_;  // the owner moves here
  });
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
  const PoolLock lock(pool_);
  return publish_locked();
}

Generation* Buffer::try_publish() {
  const PoolLock lock(pool_, std::try_to_lock);
  return lock ? publish_locked() : nullptr;
}

Generation* Buffer::publish_locked() {
  auto generation = std::make_unique<Generation>();
  generation->buffer = shared_from_this();
  generation->slots = extent_;
  generation->place = generations_.size();
  generations_.push_back(generation.get());
  try {
    covered_.add(extent_);
  } catch (...) {
    generations_.pop_back();
    throw;
  }
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
  for (std::size_t row = 0; row < shape_.rows; ++row)
    zero_bytes(address_of(row, positions.begin), positions.size() * shape_.item_bytes, stream);
}

void Buffer::zero_bytes(Address at, std::size_t bytes, Stream stream) {
  const trace::Span span(trace::What::zero, at, bytes, base_);
  driver_.zero(at, bytes, stream);
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
