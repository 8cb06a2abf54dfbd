#include "kv/slot_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "kv/slot_faults.h"
#include "tensor/growing.h"
#include "tensor/sharing.h"
#include "vmm/wait.h"

namespace vtensor {

namespace {

std::string text(std::size_t number) { return std::to_string(number); }

// Positions that fill a page in every row group.
std::size_t unit_of(const SlotCacheShape& shape, std::size_t page_size) {
  std::size_t unit = 1;
  for (const RowGroup& group : shape.row_groups)
    unit = std::max(unit, ceil_div(page_size, group.item_bytes));
  return unit;
}

SlotCacheShape with_all_contents(SlotCacheShape shape) {
  for (RowGroup& group : shape.row_groups) {
    if (group.contents.empty()) group.contents.resize(group.rows);
  }
  return shape;
}

}  // namespace

SlotCache::SlotCache(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape,
                     const Caller& caller)
    : pool_(pool),
      shape_(with_all_contents(std::move(shape))),
      slots_(shape_.slots),
      now_(std::make_shared<SlotsNow>(shape_.slots, shape_.bands)),
      lengths_(now_->lengths),
      states_(now_->states),
      room_(shape_.slots),
      listed_as_(shape_.slots),
      stream_(caller.stream),
      prefixes_(unit_of(shape_, pool->page_size())) {
  due_.reserve(shape_.slots);
  settling_.reserve(shape_.slots);
  for (std::size_t slot = 0; slot < shape_.slots; ++slot) list_ready(slot, 0);
  for (Slot& slot : slots_) {
    slot.buffers.resize(shape_.row_groups.size());
    slot.begins.resize(shape_.row_groups.size());
  }
  row_groups_.reserve(shape_.row_groups.size());
  groups_of_.resize(shape_.bands);
  for (std::size_t i = 0; i < shape_.row_groups.size(); ++i) {
    const RowGroup& group = shape_.row_groups[i];
    all_groups_.push_back(i);
    groups_of_[group.band].push_back(i);
    for (const RowContent& content : group.contents) {
      for (const std::size_t layer : content.layers) {
        band_of_.resize(std::max(band_of_.size(), layer + 1));
        band_of_[layer] = group.band;
      }
    }
  }
  try {
    for (const RowGroup& group : shape_.row_groups) {
      const auto rows = checked_multiply(group.rows, shape_.slots);
      if (!rows) throw CapacityExceeded("too many rows");
      const RowShape row_shape{*rows, group.item_bytes, shape_.max_length};
      std::shared_ptr<Buffer> range =
          Buffer::make(pool_, row_shape, caller, std::make_unique<SlotFaults>(shape_, group, now_));
      const std::size_t pages = range->range().row_bytes() / pool_->page_size();
      row_groups_.push_back({group,
                             std::move(range),
                             {.rows = group.rows,
                              .item_bytes = group.item_bytes,
                              .capacity = shape_.max_length,
                              .row_stride = pages * shape_.slots}});
    }
    // A layer begins in the first token of slot 0, and kernels are given its address whether that
    // is mapped or not.
    std::vector<Address> first_pages;
    for (const GroupRange& group : row_groups_) {
      const std::size_t pages = ceil_div(group.shape.item_bytes, pool_->page_size());
      for (std::size_t row = 0; row < group.shape.rows; ++row) {
        for (std::size_t page = 0; page < pages; ++page)
          first_pages.push_back(group.range->range().address(row * shape_.slots, page));
      }
    }
    pool_->driver().back_holes(first_pages);
  } catch (const CapacityExceeded&) {
    for (const GroupRange& group : row_groups_) group.range->abandon();
    throw CapacityExceeded("[KVCache] " + text(shape_.slots) + " slots of " +
                           text(shape_.max_length) +
                           " tokens pass the address space: lower max_batch= or max_len=");
  } catch (...) {
    for (const GroupRange& group : row_groups_) group.range->abandon();
    throw;
  }
}

SlotCache::~SlotCache() { close({"KVCache.close"}); }

void SlotCache::close(const Caller& caller) noexcept {
  // There the lock may be held by a thread of the parent.
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (states_[slot] == SlotState::free) continue;
    try {
      for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) buffer->use(caller);
    } catch (const std::exception&) {
      // No memory to note the stream: the others' fences still stand.
    }
    leave(slot);
  }
  prefixes_.clear();
  finish_copies();
  {
    const PoolLock lock(pool_);
    pool_->reap();
    for (Slot& slot : slots_) {
      for (const std::shared_ptr<Buffer>& buffer : slot.buffers) {
        if (buffer) buffer->keep_nothing();
      }
    }
  }
  now_->closed.store(true, std::memory_order_relaxed);
  slots_.clear();
  ready_.clear();
  settling_.clear();
  for (const GroupRange& group : row_groups_) group.range->abandon();
  row_groups_.clear();
}

std::size_t SlotCache::length(std::size_t slot) const {
  return states_[slot] == SlotState::swapped ? slots_[slot].swapped->length
                                             : static_cast<std::size_t>(lengths_[slot]);
}

void SlotCache::require_used(const Caller& caller, std::size_t slot) const {
  if (slot < slots_.size() && states_[slot] == SlotState::used) return;
  const std::string what = "[" + std::string(caller.operation) + "] slot " + text(slot);
  if (slot >= slots_.size()) {
    throw InvalidArgument(what + " does not exist: the cache has slots 0 to " +
                          text(slots_.size() - 1));
  }
  if (states_[slot] == SlotState::swapped)
    throw InvalidArgument(what + " is swapped out: call swap_in first");
  throw InvalidArgument(what + " is free: alloc() names the slots in use");
}

void SlotCache::require_lengths(const Caller& caller, std::span<const std::int64_t> lengths) const {
  const std::string operation = "[" + std::string(caller.operation) + "] ";
  if (lengths.size() != slots_.size()) {
    throw InvalidArgument(operation + text(lengths.size()) + " lengths were given for " +
                          text(slots_.size()) +
                          " slots: give one for each slot, 0 where it is not in use");
  }
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    require_length(caller, slot, lengths[slot], lengths_[slot]);
}

void SlotCache::require_length(const Caller& caller, std::size_t slot, std::int64_t length,
                               std::int64_t now) const {
  if (length == now) return;
  const std::string what = "[" + std::string(caller.operation) + "] slot " + text(slot) + " ";
  if (length > static_cast<std::int64_t>(shape_.max_length)) {
    throw CapacityExceeded(what + "is to have " + std::to_string(length) + " tokens, max_len is " +
                           text(shape_.max_length) + ": make the cache with a larger max_len=");
  }
  if (states_[slot] == SlotState::free)
    throw InvalidArgument(what + "is free: its length must be 0");
  if (states_[slot] == SlotState::swapped)
    throw InvalidArgument(what + "is swapped out: its length must be 0 until swap_in");
  if (length < now) {
    throw InvalidArgument(what + "has " + std::to_string(now) + " tokens and is to have " +
                          std::to_string(length) +
                          ": lengths do not shrink by a step; call truncate(slot, length)");
  }
}

Interval SlotCache::needed(std::size_t group, std::size_t slot, std::size_t length) const {
  if (length == 0) return {};
  return {slots_[slot].begins[group], std::min(shape_.max_length, length + tail())};
}

// Lists the slots whose lengths go beyond their room; false where a length cannot be.
bool SlotCache::find_due(std::span<const std::int64_t> lengths) {
  due_.clear();
  if (lengths.size() != slots_.size()) return false;
  const auto most = static_cast<std::int64_t>(shape_.max_length);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const std::int64_t length = lengths[slot];
    if (length < lengths_[slot] || length > most) return false;
    if (length <= room_[slot]) continue;
    if (states_[slot] != SlotState::used) return false;  // whose room is 0
    due_.push_back(slot);
  }
  return true;
}

bool SlotCache::step_within(const Caller& caller, std::span<const std::int64_t> lengths) {
  if (!has_room(lengths)) return false;
  settle_copies();
  use(caller);
  std::copy(lengths.begin(), lengths.end(), lengths_.begin());
  return true;
}

// The same, or throws.
void SlotCache::require_due(const Caller& caller, std::span<const std::int64_t> lengths) {
  if (!find_due(lengths)) require_lengths(caller, lengths);
  for (const std::size_t slot : due_) {
    for (std::size_t band = 0; band < slots_[slot].bands.size(); ++band) {
      require_here(caller, slot, band);
      require_length(caller, slot, lengths[slot], slots_[slot].bands[band].length);
    }
  }
}

void SlotCache::step(const Caller& caller, std::span<const std::int64_t> lengths) {
  require_due(caller, lengths);
  settle_copies();
  use(caller);
  for (const std::size_t slot : due_) finish_prefix(caller, slot);
  if (!due_.empty() && !grow_ready(caller, lengths)) grow(caller, lengths);
  for (const std::size_t slot : due_) forget_heads(caller, slot, all_groups_);
  for (const std::size_t slot : due_) slots_[slot].bands.clear();
  std::copy(lengths.begin(), lengths.end(), lengths_.begin());
  look_further(due_);
}

// What the slots that are due take, where all of it is ready and their own.
bool SlotCache::grow_ready(const Caller& caller, std::span<const std::int64_t> lengths) {
  const PoolLock lock(pool_);
  const auto each = [&](auto what) VT_LOCKED {
    for (const std::size_t slot : due_) {
      for (std::size_t group = 0; group < row_groups_.size(); ++group) {
        const Interval positions = needed(group, slot, static_cast<std::size_t>(lengths[slot]));
        if (!what(*slots_[slot].buffers[group], positions)) return false;
      }
    }
    return true;
  };
  if (!each([](const Buffer& buffer, Interval positions)
                VT_LOCKED { return !buffer.shares() && buffer.is_ready(positions); })) {
    return false;
  }
  return each([&caller](Buffer& buffer, Interval positions) VT_LOCKED {
    buffer.grow_ready(caller, positions);
    return true;
  });
}

// The same, by driver calls.
void SlotCache::grow(const Caller& caller, std::span<const std::int64_t> lengths) {
  std::vector<Growth> growths;
  growths.reserve(due_.size() * row_groups_.size());
  for (const std::size_t slot : due_) {
    const auto length = static_cast<std::size_t>(lengths[slot]);
    for (std::size_t group = 0; group < row_groups_.size(); ++group) {
      const auto before = static_cast<std::size_t>(length_here(slot, group));
      growths.push_back({slots_[slot].buffers[group].get(), needed(group, slot, length),
                         Interval{before, length}});
    }
  }
  grow_all(caller, growths, false);
}

// Gives back the pages before what windows can see from the present length on.
void SlotCache::forget_heads(const Caller& caller, std::size_t slot,
                             std::span<const std::size_t> groups) {
  for (const std::size_t group : groups) {
    const std::size_t begin =
        row_groups_[group].shape.first_seen(static_cast<std::size_t>(length_here(slot, group)));
    Buffer& buffer = *slots_[slot].buffers[group];
    std::size_t& kept = slots_[slot].begins[group];
    if (page_of(row_groups_[group], begin) <= page_of(row_groups_[group], kept)) continue;
    kept = begin;
    buffer.retract(caller, {begin, buffer.positions().end}, shape_.max_length);
  }
}

// Has the mapper look ahead of these slots, and finds how far their lengths may grow before
// anything has to be done. Waking it costs more than the rest of a step, so it is woken only where
// less than half of a slot's look-ahead is left, and then serves all that have asked meanwhile.
void SlotCache::look_further(std::span<const std::size_t> slots) {
  const PoolLock lock(pool_);
  for (const std::size_t slot : slots) {
    const auto length = static_cast<std::size_t>(lengths_[slot]);
    if (slots_[slot].expects) {
      room_[slot] = -1;  // the next step finishes that, whatever the length
      continue;
    }
    if (!slots_[slot].bands.empty()) {
      room_[slot] = lengths_[slot];
      continue;
    }
    const std::size_t end = std::min(shape_.max_length, length + tail() + shape_.lookahead);
    std::size_t room = shape_.max_length;
    for (std::size_t group = 0; group < row_groups_.size(); ++group) {
      Buffer& buffer = *slots_[slot].buffers[group];
      if (length != 0 && shape_.lookahead != 0) {
        const std::size_t ahead = buffer.indices_of({0, end}).end;
        const std::size_t late = tail() + ceil_div(shape_.lookahead, std::size_t{2});
        const std::size_t ready = buffer.ready_until();
        if (ahead > buffer.extent().end) buffer.want_until(end, ready < length + late);
        const std::size_t asked = ahead * pool_->page_size() / row_groups_[group].shape.item_bytes;
        if (asked < shape_.max_length) room = std::min(room, asked - tail() - shape_.lookahead);
        if (ready < end && ready > length + late) room = std::min(room, ready - late);
      }
      room = std::min(room, room_of(group, slot, length));
    }
    room_[slot] = static_cast<std::int64_t>(std::max(room, length));
  }
}

// How far a slot's rows in one row group allow its length to grow.
std::size_t SlotCache::room_of(std::size_t group, std::size_t slot, std::size_t length) const {
  const RowGroup& rows = row_groups_[group].shape;
  const Buffer& buffer = *slots_[slot].buffers[group];
  const std::size_t most = shape_.max_length, page = pool_->page_size();
  std::size_t room = std::min(most, buffer.writable_until(length));
  // The tile behind the length is mapped too.
  const std::size_t mapped = buffer.extent().end * page / rows.item_bytes;
  if (mapped < most) room = std::min(room, mapped - std::min(mapped, tail()));
  if (rows.window == 0 || rows.window >= most) return room;
  const std::size_t next = (page_of(row_groups_[group], slots_[slot].begins[group]) + 1) * page;
  return std::min(room, ceil_div(next, rows.item_bytes) + rows.window - 1);
}

void SlotCache::free(const Caller& caller, std::size_t slot) {
  if (slot >= slots_.size() || states_[slot] == SlotState::free) require_used(caller, slot);
  require_arrived(caller, slot);
  for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) buffer->use(caller);
  leave(slot);
}

// The next request's bytes must not be overwritten by this one's, so a slot on its way in is waited
// for.
void SlotCache::require_arrived(const Caller& caller, std::size_t slot) {
  settle_copies();
  if (slots_[slot].arriving.empty()) return;
  const FencePtr fence = last_arrival(slot);
  if (wait_for(pool_->driver(), fence, pool_->options().patience)) return;
  throw TimedOut(
      caller.operation, pool_->options().patience,
      "slot " + text(slot) + " is still being copied from host memory; it stays as it is");
}

void SlotCache::leave(std::size_t slot) noexcept {
  for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) buffer->abandon();
  states_[slot] = SlotState::free;
  slots_[slot].tokens.clear();
  slots_[slot].offered = 0;
  slots_[slot].expects = false;
  slots_[slot].arriving.clear();
  if (slots_[slot].swapped != nullptr) leave_swap(*std::exchange(slots_[slot].swapped, nullptr));
  forget_bands(slot);
  std::fill(slots_[slot].begins.begin(), slots_[slot].begins.end(), 0);
  lengths_[slot] = room_[slot] = 0;
  settling_.push_back(slot);
}

void SlotCache::truncate(const Caller& caller, std::size_t slot, std::size_t length) {
  require_used(caller, slot);
  if (length > static_cast<std::size_t>(lengths_[slot])) {
    throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + text(slot) + " has " +
                          std::to_string(lengths_[slot]) + " tokens, and is to be cut to " +
                          text(length) + ": call step(lengths) to grow");
  }
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    if (length != 0 && slots_[slot].begins[group] > row_groups_[group].shape.first_seen(length)) {
      throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + text(slot) +
                            " cannot go back to " + text(length) +
                            " tokens: layers with a window of " +
                            text(row_groups_[group].shape.window) +
                            " have given back what they would see from there; free the slot and "
                            "compute it again");
    }
  }
  std::vector<Band>& bands = slots_[slot].bands;
  if (length == static_cast<std::size_t>(lengths_[slot]) && bands.empty()) return;
  await_arrival(caller, slot);
  if (length < slots_[slot].offered) protect(caller, slot);
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    if (is_band_away(slot, row_groups_[group].shape.band)) continue;
    if (length == 0) slots_[slot].begins[group] = 0;
    Buffer& buffer = *slots_[slot].buffers[group];
    Interval kept = needed(group, slot, length);
    kept.end = std::min(kept.end, buffer.positions().end);  // a prefix comes without its tile
    buffer.retract(caller, kept, length + tail() + shape_.lookahead);
  }
  lengths_[slot] = static_cast<std::int64_t>(length);
  for (Band& band : bands) band.length = lengths_[slot];
  settle_bands(slot);
  std::vector<Token>& tokens = slots_[slot].tokens;
  tokens.resize(std::min(tokens.size(), length));
  look_further({&slot, 1});
}

std::vector<std::size_t> SlotCache::fork(const Caller& caller, std::size_t slot, std::size_t n) {
  require_together(caller, slot);
  require_free(caller, n);
  await_arrival(caller, slot);
  const auto length = static_cast<std::size_t>(lengths_[slot]);
  std::vector<std::size_t> forks;
  forks.reserve(n);
  if (n == 0) return forks;
  std::vector<Prefix> whole(length == 0 ? 0 : 1);
  if (length != 0) {
    expect_unsharing(slot);
    for (std::size_t group = 0; group < row_groups_.size(); ++group) {
      Buffer& buffer = *slots_[slot].buffers[group];
      const Interval pages = buffer.indices_of(buffer.positions());
      whole[0].push_back(Sharing(buffer, caller).offer({&pages, 1}).front());
    }
    look_further({&slot, 1});
  }
  try {
    while (forks.size() < n) {
      const std::size_t made = accept(caller, whole, length, &slots_[slot]);
      forks.push_back(made);
      look_further({&made, 1});
    }
  } catch (...) {
    for (const std::size_t made : forks) leave(made);
    throw;
  }
  return forks;
}

std::vector<std::size_t> SlotCache::reorder(const Caller& caller,
                                            std::span<const std::size_t> beams,
                                            std::span<const std::size_t> sources) {
  const std::string operation = "[" + std::string(caller.operation) + "] ";
  if (beams.size() != sources.size()) {
    throw InvalidArgument(operation + text(beams.size()) + " slots and " + text(sources.size()) +
                          " sources were given: give one source for each slot");
  }
  for (const std::size_t slot : beams) require_together(caller, slot);
  for (std::size_t i = 0; i < beams.size(); ++i) {
    if (std::count(beams.begin(), beams.end(), beams[i]) != 1)
      throw InvalidArgument(operation + "slot " + text(beams[i]) + " is named twice");
    if (std::find(beams.begin(), beams.end(), sources[i]) == beams.end()) {
      throw InvalidArgument(operation + "source " + text(sources[i]) +
                            " is none of the slots: fork(slot) takes one from elsewhere");
    }
  }
  const auto named = [&](std::size_t slot) {
    return std::find(sources.begin(), sources.end(), slot) != sources.end();
  };
  std::vector<std::size_t> dropped;
  for (const std::size_t slot : beams) {
    if (!named(slot)) dropped.push_back(slot);
  }
  for (const std::size_t slot : dropped) require_arrived(caller, slot);
  // Where there is room for the forks beside what is dropped, a refusal loses nothing.
  const bool beside = has_free(dropped.size());
  const auto drop = [&] {
    for (const std::size_t slot : dropped) free(caller, slot);
  };
  if (!beside) drop();
  std::vector<std::size_t> result(beams.size());
  std::vector<std::size_t> made;
  try {
    for (std::size_t i = 0; i < beams.size(); ++i) {
      const auto first = std::find(sources.begin(), sources.end(), sources[i]);
      if (static_cast<std::size_t>(first - sources.begin()) == i) {
        result[i] = sources[i];
        continue;
      }
      result[i] = fork(caller, sources[i], 1).front();
      made.push_back(result[i]);
    }
  } catch (...) {
    for (const std::size_t slot : made) leave(slot);
    throw;
  }
  if (beside) drop();
  return result;
}

void SlotCache::unshare(const Caller& caller, std::size_t slot, Interval positions) {
  require_used(caller, slot);
  auto length = static_cast<std::size_t>(lengths_[slot]);
  for (const Band& band : slots_[slot].bands)
    length = std::max(length, static_cast<std::size_t>(band.length));
  if (positions.begin > positions.end || positions.end > length) {
    throw InvalidArgument("[" + std::string(caller.operation) + "] positions " +
                          text(positions.begin) + " to " + text(positions.end) + " of slot " +
                          text(slot) + ", which has " + text(length) + " tokens");
  }
  await_arrival(caller, slot);
  if (positions.begin < slots_[slot].offered) protect(caller, slot);
  std::vector<Growth> growths;
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    const Interval kept{
        std::max(positions.begin, slots_[slot].begins[group]),
        std::min(positions.end, static_cast<std::size_t>(length_here(slot, group)))};
    Buffer& buffer = *slots_[slot].buffers[group];
    if (!kept.empty()) growths.push_back({&buffer, buffer.positions(), kept});
  }
  grow_all(caller, growths, false);
  look_further({&slot, 1});
}

// Nothing is written where no page stands: such a write would end the process.
void SlotCache::require_kept(const Caller& caller, std::size_t group, std::size_t layer,
                             const Write& write) const {
  require_used(caller, write.slot);
  if (is_band_away(write.slot, row_groups_[group].shape.band))
    require_here(caller, write.slot, row_groups_[group].shape.band);
  const auto length = static_cast<std::size_t>(length_here(write.slot, group));
  const std::string what = "[" + std::string(caller.operation) + "] layer " + text(layer) +
                           ", slot " + text(write.slot) + ", tokens " +
                           text(write.positions.begin) + " to " + text(write.positions.end) + ": ";
  if (write.positions.end > length) {
    throw InvalidArgument(what + "the slot has " + text(length) +
                          " tokens: call step() first, with a length of " +
                          text(write.positions.end) + " for it");
  }
  if (write.positions.begin < slots_[write.slot].begins[group]) {
    throw InvalidArgument(what + "the layer's window of " + text(row_groups_[group].shape.window) +
                          " has given back those before " + text(slots_[write.slot].begins[group]) +
                          ": write what the window can still see");
  }
}

// Whether some page behind these positions is shared.
bool SlotCache::shares(const Write& write) const {
  const auto& buffers = slots_[write.slot].buffers;
  return std::any_of(buffers.begin(), buffers.end(), [&](const auto& buffer) VT_LOCKED {
    return buffer->shares() && buffer->writable_until(write.positions.begin) < write.positions.end;
  });
}

void SlotCache::begin_write(const Caller& caller, std::size_t group, std::size_t layer,
                            std::span<const Write> writes) {
  for (const Write& write : writes) require_kept(caller, group, layer, write);
  settle_copies();
  use(caller);
  for (const Write& write : writes) {
    if (write.positions.empty()) continue;
    finish_prefix(caller, write.slot);
    if (const FencePtr copied = copies(write.slot, layer))
      pool_->driver().order(caller.stream, *copied);
    if (write.positions.begin < slots_[write.slot].offered) protect(caller, write.slot);
    bool shared = false;
    {
      const PoolLock lock(pool_);
      shared = shares(write);
    }
    if (shared) unshare(caller, write.slot, write.positions);
  }
}

std::size_t SlotCache::count_used() const {
  return static_cast<std::size_t>(std::count_if(
      states_.begin(), states_.end(), [](SlotState state) { return state != SlotState::free; }));
}

std::vector<std::shared_ptr<Client>> SlotCache::clients() const {
  std::vector<std::shared_ptr<Client>> all;
  for (const GroupRange& group : row_groups_) all.push_back(group.range);
  for (const Slot& slot : slots_) {
    for (const std::shared_ptr<Buffer>& buffer : slot.buffers) {
      if (buffer) all.push_back(buffer);
    }
  }
  return all;
}

void SlotCache::use(const Caller& caller) {
  if (caller.stream == stream_) return;
  stream_ = caller.stream;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (states_[slot] == SlotState::free) continue;
    for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers) buffer->use(caller);
  }
}

}  // namespace vtensor
