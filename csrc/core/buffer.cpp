#include "core/buffer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"

namespace vtensor {

std::shared_ptr<Buffer> Buffer::create(const std::shared_ptr<PagePool>& pool,
                                       const RowShape& shape) {
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
  try {
    buffer->homes_.reserve(shape.rows);
    for (std::size_t row = 0; row < shape.rows; ++row)
      buffer->homes_.push_back(pool->open_home(row_pages));
  } catch (...) {
    buffer->owned_ = false;
    if (buffer->settle()) pool->retry_later(buffer);
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

Interval Buffer::slots_of(Interval positions) const {
  if (positions.empty()) return {};
  return {(shape_.phase + positions.begin * shape_.item_bytes) / page_size_,
          ceil_div(shape_.phase + positions.end * shape_.item_bytes, page_size_)};
}

void Buffer::collect(std::vector<Run>& runs, std::size_t row, Interval slots,
                     bool (*wanted)(const Entry&)) const {
  const std::size_t end = std::min(slots.end, table_.reserved());
  for (std::size_t slot = slots.begin; slot < end;) {
    const Entry& entry = table_.at(row, slot);
    const std::size_t first = slot++;
    if (!wanted(entry)) continue;
    while (slot < end && table_.at(row, slot).state == entry.state) ++slot;
    runs.push_back({row, {first, slot}});
  }
}

std::span<const Handle> Buffer::handles(const Run& run) {
  scratch_.clear();
  for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
    scratch_.push_back(table_.at(run.row, slot).page->handle);
  }
  return scratch_;
}

void Buffer::touch(Interval slots) {
  if (slots.empty()) return;
  touched_ = touched_.empty() ? slots
                              : Interval{std::min(touched_.begin, slots.begin),
                                         std::max(touched_.end, slots.end)};
}

bool Buffer::grow_within(Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock) return false;
  const Interval added = slots_of({positions_.end, positions.end});
  if (!extent_.contains(added)) return false;
  if (guarded_ != 0) {
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      for (std::size_t slot = added.begin; slot < added.end; ++slot) {
        if (!is_writable(table_.at(row, slot))) return false;
      }
    }
  }
  positions_ = positions;
  return true;
}

void Buffer::grow(const char* operation, Interval positions, bool populate, Interval stale) {
  PoolLock lock(pool_);
  pool_->reap();
  const Interval wanted = slots_of(positions);
  require_whole(operation);
  const Interval added = slots_of({std::max(positions_.end, positions.begin), positions.end});
  table_.reserve(wanted.end);

  std::vector<Run> missing, guarded;
  std::size_t missing_pages = 0;
  const Interval searched = extent_.empty() ? wanted : Interval{extent_.end, wanted.end};
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    collect(missing, row, searched, is_unmapped);
    if (guarded_ != 0) collect(guarded, row, added, is_guarded);
  }
  for (const Run& run : missing) {
    if (table_.at(run.row, run.slots.begin).state == EntryState::quarantined) {
      throw Error(
          "[" + std::string(operation) + "] page " + std::to_string(run.slots.begin) + " of row " +
          std::to_string(run.row) +
          " is quarantined after a driver call that could not be undone: move the tensor to a new "
          "range with reallocate(capacity)");
    }
    missing_pages += run.slots.size();
  }
  pool_->require_free(operation, missing_pages + fresh_pages_for(guarded));

  std::size_t mapped = 0;
  try {
    for (; mapped < missing.size(); ++mapped) map_new(missing[mapped]);
    for (const Run& run : missing) {
      zero_new(run);
      if (populate) driver_.populate(address_of(run), run.slots.size());
    }
    part(guarded, stale);
  } catch (...) {
    undo_grow(std::span(missing).first(mapped));
    throw;
  }
  positions_ = positions;
  extent_ = wanted;
}

// Takes pages for a run of empty entries and maps them.
void Buffer::map_new(const Run& run) {
  const Page* previous = run.slots.begin ? table_.at(run.row, run.slots.begin - 1).page : nullptr;
  std::vector<Page*>& pages = picked_;
  pages.clear();
  pool_->take(homes_[run.row], previous, run.slots.size(), pages);
  try {
    scratch_.clear();
    for (const Page* page : pages) scratch_.push_back(page->handle);
    driver_.map(address_of(run), scratch_, Access::writable);
  } catch (const UndoFailed& error) {
    for (const std::size_t i : error.stuck) {
      table_.at(run.row, run.slots.begin + i) = {pages[i], EntryState::quarantined};
      pool_->quarantine(pages[i]);
      ++quarantined_;
    }
    for (Page* page : pages) {
      if (page->references == 1) pool_->drop(page);
    }
    throw;
  } catch (...) {
    // Never mapped, so as clean as they came.
    for (Page* page : pages) {
      const bool dirty = page->dirty;
      pool_->drop(page);
      page->dirty = dirty;
    }
    throw;
  }
  Entry* entry = table_.entries(run.row, run.slots.begin);
  for (Page* page : pages) *entry++ = {page, EntryState::writable};
  mapped_ += pages.size();
}

// Maps pages of others at a run of empty entries.
void Buffer::map_shared(const Run& run, std::span<Page* const> pages, EntryState state) {
  scratch_.clear();
  for (const Page* page : pages) scratch_.push_back(page->handle);
  const auto enter = [&](std::size_t i, EntryState entered) {
    pool_->share(pages[i]);
    table_.at(run.row, run.slots.begin + i) = {pages[i], entered};
  };
  try {
    driver_.map(address_of(run), scratch_,
                state == EntryState::guarded ? Access::guarded : Access::writable);
  } catch (const UndoFailed& error) {
    for (const std::size_t i : error.stuck) {
      enter(i, EntryState::quarantined);
      pool_->quarantine(pages[i]);
      ++quarantined_;
    }
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) enter(i, state);
  mapped_ += pages.size();
  if (state == EntryState::guarded) guarded_ += pages.size();
}

// Zeroes what its last owner left in new pages, and makes them this buffer's.
void Buffer::zero_new(const Run& run) {
  const Entry* entries = table_.entries(run.row, run.slots.begin);
  const std::size_t n = run.slots.size();
  const std::uint64_t owner = shape_.zeroed ? kNobody : id_;
  for (std::size_t i = 0; i < n; ++i) {
    if (!pool_->must_zero(*entries[i].page, owner)) continue;
    const std::size_t first = i;
    while (i < n && pool_->must_zero(*entries[i].page, owner)) ++i;
    driver_.zero(slot_address(run.row, run.slots.begin + first), (i - first) * page_size_);
  }
  for (std::size_t i = 0; i < n; ++i) entries[i].page->last_owner = id_;
}

// Unmaps pages that nobody saw yet. What cannot be unmapped may hold another's bytes: quarantined
// (I7, I8).
void Buffer::undo_grow(std::span<const Run> mapped) noexcept {
  for (const Run& run : mapped) {
    try {
      unmap(run);
    } catch (const UndoFailed&) {
      // unmap() has quarantined what is stuck
    } catch (...) {
      quarantine(run);
    }
  }
}

// Unmaps a run of one state and drops its pages.
void Buffer::unmap(const Run& run) {
  const Access access = table_.at(run.row, run.slots.begin).access();
  try {
    driver_.unmap(address_of(run), handles(run), access);
  } catch (const UndoFailed& error) {
    quarantine(run, error.stuck);
    throw;
  }
  for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
    Entry& entry = table_.at(run.row, slot);
    pool_->drop(entry.page);
    entry = {};
  }
  mapped_ -= run.slots.size();
  if (access == Access::guarded) guarded_ -= run.slots.size();
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

void Buffer::forget(const Generation* generation) noexcept {
  const auto at = std::find(generations_.begin(), generations_.end(), generation);
  *at = generations_.back();
  generations_.pop_back();
  touch(generation->slots);
}

void Buffer::retract(Interval positions) {
  PoolLock lock(pool_);
  touch(extent_);
  positions_ = positions;
  extent_ = slots_of(positions);
  if (settle()) pool_->retry_later(shared_from_this());
}

void Buffer::abandon() noexcept {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  owner_end_->buffer = shared_from_this();
  owner_end_->is_owner = true;
  pool_->end(owner_end_.release());
}

void Buffer::leave() noexcept {
  owned_ = false;
  touch(extent_);
  positions_ = extent_ = {};
}

std::vector<Interval> Buffer::uncovered() const {
  std::vector<Interval> kept{extent_};
  for (const Generation* generation : generations_) kept.push_back(generation->slots);
  std::sort(kept.begin(), kept.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  std::vector<Interval> rest;
  std::size_t at = touched_.begin;
  for (const Interval interval : kept) {
    if (interval.empty()) continue;
    if (interval.begin > at) rest.push_back({at, std::min(interval.begin, touched_.end)});
    at = std::max(at, interval.end);
    if (at >= touched_.end) break;
  }
  if (at < touched_.end) rest.push_back({at, touched_.end});
  std::erase_if(rest, [](Interval interval) { return interval.empty(); });
  return rest;
}

std::exception_ptr Buffer::settle() noexcept {
  try {
    if (!touched_.empty()) {
      std::vector<Run> runs;
      for (const Interval slots : uncovered()) {
        for (std::size_t row = 0; row < shape_.rows; ++row) collect(runs, row, slots, is_mapped);
      }
      if (!runs.empty()) driver_.quiesce();
      for (const Run& run : runs) unmap(run);
      if (generations_.empty()) touched_ = {};
    }
  } catch (...) {
    return std::current_exception();  // memory for the lists included
  }
  if (owned_ || !reserved_ || mapped_ != 0 || !generations_.empty()) return nullptr;
  if (quarantined_ != 0) {
    // The range is left to the driver's end, the pages to the reference that their quarantine
    // holds.
    for (std::size_t row = 0; row < shape_.rows; ++row) {
      for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
        if (Page* page = table_.at(row, slot).page) pool_->drop(page);
      }
    }
  } else {
    try {
      driver_.free_range(base_, row_pages_ * shape_.rows);
    } catch (...) {
      return std::current_exception();
    }
  }
  for (RowHome& home : homes_) pool_->close_home(home);
  homes_.clear();
  reserved_ = false;
  pool_->remove(this);
  return nullptr;
}

void Buffer::zero(Interval positions) {
  PoolLock lock(pool_);
  zero_positions(positions);
}

void Buffer::zero_positions(Interval positions) {
  if (positions.empty()) return;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    driver_.zero(address_of(row, positions.begin), positions.size() * shape_.item_bytes);
  }
}

bool Buffer::guarded() {
  PoolLock lock(pool_);
  return guarded_ != 0;
}

std::size_t Buffer::mapped_pages() {
  PoolLock lock(pool_);
  pool_->reap();
  return mapped_ + quarantined_;
}

std::vector<PageRecord> Buffer::pages() {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<PageRecord> records;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    std::vector<Run> runs;
    collect(runs, row, {0, row_pages_}, [](const Entry& entry) { return entry.page != nullptr; });
    for (const Run& run : runs) {
      const EntryState state = table_.at(row, run.slots.begin).state;
      const std::vector<std::uint8_t> parted = state == EntryState::guarded
                                                   ? find_parted(run)
                                                   : std::vector<std::uint8_t>(run.slots.size());
      for (std::size_t slot = run.slots.begin; slot < run.slots.end; ++slot) {
        const Page& page = *table_.at(row, slot).page;
        PageRecord record{row,
                          slot,
                          slot_address(row, slot),
                          static_cast<std::int64_t>(page.handle),
                          page.references,
                          page.references > 1 ? "shared" : "mapped"};
        if (state == EntryState::quarantined) {
          record.state = "quarantined";
        } else if (!extent_.contains(slot)) {
          record.state = "held";
        }
        if (parted[slot - run.slots.begin]) {
          record.page_id = -1;
          record.shared = 1;
          record.state = "parted";
        }
        records.push_back(record);
      }
    }
  }
  return records;
}

std::vector<Page*> Buffer::contents() const {
  std::vector<Page*> pages;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
      if (table_.at(row, slot).mapped()) pages.push_back(table_.at(row, slot).page);
    }
  }
  return pages;
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

void Buffer::add_to(PoolCounts& counts) const {
  const std::size_t needed = extent_.size() * shape_.rows - lost_pages();
  counts.mapped += mapped_;
  counts.needed += needed;
  counts.held += mapped_ - needed;
  if (owned_) {
    ++counts.buffers;
  } else {
    counts.orphaned += mapped_;
  }
  if (reserved_) counts.reserved_pages += row_pages_ * shape_.rows;
}

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  const bool reachable = owned_ || !generations_.empty();
  std::size_t mapped = 0, guarded = 0;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    for (std::size_t slot = 0; slot < table_.reserved(); ++slot) {
      const Entry& entry = table_.at(row, slot);
      if (entry.state == EntryState::empty) {
        bool covered = extent_.contains(slot);
        for (const Generation* generation : generations_)
          covered |= generation->slots.contains(slot);
        if (covered || entry.page) {
          throw Error("I3: slot " + std::to_string(slot) + " of row " + std::to_string(row) +
                      " is covered by an extent or a generation and is not mapped");
        }
        continue;
      }
      PageUse& use = uses[entry.page];
      ++use.entries;
      if (reachable) {
        ++use.reachable;
        use.writable |= is_writable(entry);
      }
      mapped += entry.mapped();
      guarded += is_guarded(entry);
    }
  }
  if (mapped != mapped_ || guarded != guarded_)
    throw Error("I4: the counts of mapped pages are wrong");
}

}  // namespace vtensor
