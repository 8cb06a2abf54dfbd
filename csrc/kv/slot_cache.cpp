#include "kv/slot_cache.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "policy/make_room.h"

namespace vtensor {

SlotCache::SlotCache(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape,
                     const Caller& caller)
    : pool_(pool),
      lengths_(std::make_shared<SlotLengths>(shape)),
      buffers_(pool, std::move(shape), lengths_, caller),
      free_(buffers_),
      swaps_(buffers_, *lengths_),
      prefixes_(buffers_.unit()),
      prompts_(buffers_.shape().slots),
      is_deferred_(buffers_.shape().slots) {
  due_.reserve(buffers_.shape().slots);
}

SlotCache::~SlotCache() { close({"KVCache.close"}); }

void SlotCache::share(const Caller& caller) {
  shown_lengths_.resize(buffers_.shape().slots);
  shown_ = buffers_.share(caller);
  show_lengths();
}

void SlotCache::show_lengths() noexcept {
  if (shown_ == nullptr) return;
  std::span<const std::int64_t> lengths = lengths_->all();
  if (swaps_.any_absent() ||
      std::memchr(is_deferred_.data(), true, is_deferred_.size()) != nullptr) {
    for (std::size_t slot = 0; slot < lengths.size(); ++slot)
      shown_lengths_[slot] = is_deferred(slot) ? 0 : lengths[slot];
    swaps_.hide_absent(shown_lengths_);
    lengths = shown_lengths_;
  }
  shown_->set_words(0, lengths);
}

void SlotCache::hide(std::size_t slot, std::size_t length) noexcept {
  if (shown_ == nullptr || shown_->word(slot) <= length) return;
  const std::array now{static_cast<std::int64_t>(length)};
  shown_->set_words(slot, now);
}

void SlotCache::close(const Caller& caller) noexcept {
  shown_ = nullptr;
  buffers_.close_to_readers();
  for (std::size_t slot = 0; slot < buffers_.shape().slots; ++slot) {
    if (lengths_->state(slot) == SlotState::free) continue;
    try {
      buffers_.use(caller, slot);
    } catch (const std::exception&) {
      // No memory to note the stream: fences of the streams noted before still hold.
    }
    leave(slot);
  }
  prefixes_.clear();
  swaps_.close();
  lengths_->close();
  buffers_.close();
}

std::vector<std::shared_ptr<Client>> SlotCache::clients() const {
  std::vector<std::shared_ptr<Client>> all(buffers_.ranges().begin(), buffers_.ranges().end());
  for (const std::shared_ptr<Buffer>& buffer : buffers_.all()) all.push_back(buffer);
  return all;
}

SlotCacheCounts SlotCache::counts() {
  SlotCacheCounts counts;
  const PoolLock lock(pool_);
  std::unordered_set<const Page*> seen;
  for (const std::shared_ptr<Buffer>& buffer : buffers_.all()) {
    buffer->count(counts.pages);
    counts.shared += buffer->range().add_pages(seen);
  }
  for (std::size_t slot = 0; slot < buffers_.shape().slots; ++slot) {
    counts.tokens += static_cast<std::size_t>(lengths_->all()[slot]);
    if (lengths_->state(slot) != SlotState::used) continue;
    for (std::size_t group = 0; group < buffers_.groups(); ++group) {
      const RowGroup& rows = buffers_.group(group);
      counts.live_bytes += rows.rows * rows.item_bytes *
                           sub_sat(lengths_->here(slot, rows.band), buffers_.begin(slot, group));
    }
  }
  counts.free = lengths_->count(SlotState::free);
  counts.used = lengths_->count(SlotState::used);
  counts.swapped = lengths_->count(SlotState::swapped);
  counts.distinct = seen.size();
  counts.swapped_bytes = swaps_.bytes();
  counts.prefix_units = prefixes_.size();
  counts.prefix_evictions = prefixes_.evictions();
  counts.prefix_queries = prefix_queries_;
  counts.prefix_hits = prefix_hits_;
  counts.pages.budget_pages = pool_->store().budget();
  return counts;
}

std::vector<PageRecord> SlotCache::pages(std::size_t slot, std::size_t group) {
  const std::shared_ptr<Buffer>& buffer = buffers_.of(slot).at(group);
  return buffer ? buffer->pages() : std::vector<PageRecord>();
}

std::size_t SlotCache::alloc(const Caller& caller, std::size_t expected) {
  const std::size_t slot = free_.take(caller, expected);
  begin(caller, slot, 0);
  look_further({&slot, 1});
  return slot;
}

// A slot that begins has noted its caller's stream alone; a named one only as far as launched.
void SlotCache::begin(const Caller& caller, std::size_t slot, std::size_t length) {
  if (caller.named || caller.stream != stream_) stream_.reset();
  lengths_->begin(slot, length);
}

void SlotCache::leave(std::size_t slot) noexcept {
  hide(slot, 0);
  buffers_.abandon(slot);
  swaps_.forget(slot);
  prompts_[slot] = {};
  is_deferred_[slot] = false;
  lengths_->end(slot);
  free_.add(slot);
}

// Orders the caller's stream after the copies into a slot.
void SlotCache::await_arrival(const Caller& caller, std::size_t slot) {
  finish_prefix(caller, slot);
  swaps_.order_arrival(caller, slot);
}

bool SlotCache::has_room(std::span<const std::int64_t> lengths) {
  return lengths_->find_due(lengths, due_) && due_.empty();
}

bool SlotCache::step_within(const Caller& caller, std::span<const std::int64_t> lengths) {
  if (!has_room(lengths)) return false;
  swaps_.forget_ended();
  use(caller);
  lengths_->step(lengths, due_, {});
  return true;
}

void SlotCache::step(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands) {
  lengths_->require_due(caller, lengths, bands, due_);
  swaps_.forget_ended();
  use(caller);
  for (const std::size_t slot : due_) {
    for (std::size_t group = 0; group < buffers_.groups(); ++group)
      prefetch_lines(&buffers_.at(slot, group), sizeof(Buffer));
  }
  for (const std::size_t slot : due_) finish_prefix(caller, slot);
  list_growths(lengths, bands);
  if (!grow_ready(caller)) Buffer::grow_all(caller, growths_, false);
  for (const std::size_t slot : due_) {
    for (std::size_t group = 0; group < buffers_.groups(); ++group) {
      const RowGroup& rows = buffers_.group(group);
      const std::size_t length = lengths_->length(slot, rows.band);
      const bool grows = bands.empty() || static_cast<std::int64_t>(length) < lengths[slot];
      if (rows.window != 0 && grows && names(bands, rows.band))
        buffers_.give_back_passed(slot, group, length);
    }
  }
  lengths_->step(lengths, due_, bands);
  look_further(due_);
}

// Lists in growths_ what a step of `bands` of the slots in due_ grows.
void SlotCache::list_growths(std::span<const std::int64_t> lengths, Bands bands) {
  growths_.clear();
  for (const std::size_t slot : due_) {
    for (std::size_t group = 0; group < buffers_.groups(); ++group) {
      const std::size_t band = buffers_.group(group).band;
      if (!names(bands, band)) continue;
      const Interval added{lengths_->length(slot, band), static_cast<std::size_t>(lengths[slot])};
      if (!bands.empty() && added.empty()) continue;
      growths_.push_back(
          {&buffers_.at(slot, group), buffers_.needed(slot, group, added.end), added});
    }
  }
}

// Whether all that the listed growths need is ready and their own.
bool SlotCache::are_ready() const {
  for (const Growth& it : growths_) {
    if (!it.buffer->is_ready(it.positions, it.written.begin)) return false;
    it.buffer->range().prefetch_place(it.buffer->extent().end);
  }
  return true;
}

// Does the listed growths without a driver call. False, and nothing is changed, if they need one.
bool SlotCache::grow_ready(const Caller& caller) {
  if (growths_.empty()) return true;
  const PoolLock lock(pool_);
  if (!are_ready()) return false;
  for (const Growth& it : growths_) it.buffer->range().prefetch_index(it.buffer->extent().end);
  for (const Growth& it : growths_) it.buffer->grow_ready(caller, it.positions);
  return true;
}

// Asks the mapper for the look-ahead of `slots`, and sets their room. Waking the mapper costs more
// than the rest of a step, so it is woken only if less than half of a slot's look-ahead is left,
// and then serves every slot that has asked.
void SlotCache::look_further(std::span<const std::size_t> slots) {
  const PoolLock lock(pool_);
  const SlotCacheShape& shape = buffers_.shape();
  for (const std::size_t slot : slots) {
    lengths_->forget_room(slot);
    if (lengths_->differ(slot)) continue;
    if (is_deferred(slot)) {
      lengths_->set_room(slot, -1);  // so that the next step maps the prefix, whatever the length
      continue;
    }
    const std::size_t length = lengths_->length(slot);
    const std::size_t end = std::min(shape.max_length, length + shape.tail() + shape.lookahead);
    std::size_t room = shape.max_length;
    for (std::size_t group = 0; group < buffers_.groups(); ++group) {
      Buffer& buffer = buffers_.at(slot, group);
      if (length != 0 && shape.lookahead != 0) {
        const std::size_t ahead = buffer.indices_of({0, end}).end;
        const std::size_t late = shape.tail() + ceil_div(shape.lookahead, std::size_t{2});
        const std::size_t ready = buffer.ready_until();
        if (ahead > buffer.extent().end) buffer.want_until(end, ready < length + late);
        const std::size_t asked = ahead * pool_->page_size() / buffers_.group(group).item_bytes;
        if (asked < shape.max_length) room = std::min(room, asked - shape.tail() - shape.lookahead);
        if (ready < end && ready > length + late) room = std::min(room, ready - late);
      }
      room = std::min(room, room_of(slot, group, length));
    }
    lengths_->set_room(slot, static_cast<std::int64_t>(std::max(room, length)));
  }
}

// The length that a slot can reach without another page in one row group.
std::size_t SlotCache::room_of(std::size_t slot, std::size_t group, std::size_t length) const {
  const RowGroup& rows = buffers_.group(group);
  const Buffer& buffer = buffers_.at(slot, group);
  const std::size_t most = buffers_.shape().max_length, page = pool_->page_size();
  std::size_t room = std::min(most, buffer.writable_until(length));
  // The tile behind the length is mapped too.
  const std::size_t mapped = buffer.extent().end * page / rows.item_bytes;
  if (mapped < most) room = std::min(room, sub_sat(mapped, buffers_.shape().tail()));
  if (rows.window == 0 || rows.window >= most) return room;
  const std::size_t next = (buffers_.page_of(group, buffers_.begin(slot, group)) + 1) * page;
  return std::min(room, ceil_div(next, rows.item_bytes) + rows.window - 1);
}

bool SlotCache::fits(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                     bool waits) {
  const auto until = std::chrono::steady_clock::now() + pool_->options().patience;
  while (!fits_now(caller, lengths, bands, false)) {
    if (!waits || std::chrono::steady_clock::now() >= until) return false;
    PoolLock lock(pool_);
    waits = MakeRoom(*pool_).await_leaving(lock);
  }
  return true;
}

bool SlotCache::waits_for_others(const Caller& caller, std::span<const std::int64_t> lengths) {
  lengths_->require_possible(caller, lengths, {});
  {
    const PoolLock lock(pool_);
    const Ledger* const ledger = pool_->store().ledger();
    if (ledger == nullptr || ledger->balance().held_elsewhere == 0) return false;
  }
  return fits_now(caller, lengths, {}, true);
}

bool SlotCache::prepare(const Caller& caller, std::span<const std::int64_t> lengths) {
  lengths_->require_due(caller, lengths, {}, due_);
  if (due_.empty()) return true;
  list_growths(lengths, {});
  {
    const PoolLock lock(pool_);
    if (are_ready()) return true;
  }
  if (!pool_->looks_ahead() || !make_room_ahead(lengths)) return false;
  const PoolLock lock(pool_);
  std::vector<std::int64_t> further(lengths.begin(), lengths.end());
  for (const std::size_t slot : due_) {
    further[slot] = std::min(lengths[slot] + static_cast<std::int64_t>(buffers_.shape().lookahead),
                             static_cast<std::int64_t>(buffers_.shape().max_length));
  }
  const bool has_more = need(further, {}).pages <= pool_->store().unused();
  for (const std::size_t slot : due_) {
    if (lengths_->differ(slot)) continue;  // has no look-ahead
    const auto length = static_cast<std::size_t>(has_more ? further[slot] : lengths[slot]);
    for (std::size_t group = 0; group < buffers_.groups(); ++group)
      buffers_.at(slot, group).announce(buffers_.needed(slot, group, length).end);
  }
  return false;
}

// Evicts what a step would evict, as far as pages are missing. False, and nothing is evicted, if
// that is not enough. Does not ask other pools of a shared budget.
bool SlotCache::make_room_ahead(std::span<const std::int64_t> lengths) {
  std::size_t pages = 0, missing = 0;
  {
    const PoolLock lock(pool_);
    PageStore& store = pool_->store();
    pages = need(lengths, {}).pages;
    if (pages <= std::min(store.unused(), store.beside_reserve())) return true;
    for (const Growth& it : growths_)  // what waits to be unmapped there is taken back
      pages += it.buffer->pages_coming(it.buffer->indices_of(it.positions));
    missing = MakeRoom(*pool_).missing(pages);
    if (prefixes_.evictable(missing) < missing) return false;
  }
  if (missing != 0) prefixes_.evict(missing);
  const PoolLock lock(pool_);
  return MakeRoom(*pool_).begin(pages) == 0;
}

void SlotCache::free(const Caller& caller, std::size_t slot) {
  if (lengths_->state(slot) == SlotState::free) lengths_->require_used(caller, slot);
  // The next request's bytes must not be overwritten by this one's.
  swaps_.await_arrival(caller, slot);
  buffers_.use(caller, slot);
  leave(slot);
}

void SlotCache::truncate(const Caller& caller, std::size_t slot, std::size_t length) {
  lengths_->require_used(caller, slot);
  const std::size_t now = lengths_->length(slot);
  if (length > now) {
    throw InvalidArgument("[", caller.operation, "] slot ", slot, " has ", now,
                          " tokens, and is to be cut to ", length, ": call step(lengths) to grow");
  }
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const RowGroup& rows = buffers_.group(group);
    if (length == 0 || buffers_.begin(slot, group) <= rows.first_seen(length)) continue;
    throw InvalidArgument(
        "[", caller.operation, "] slot ", slot, " cannot go back to ", length,
        " tokens: layers with a window of ", rows.window,
        " have given back what they would see from there; free the slot and compute it again");
  }
  buffers_.use(caller, slot);  // also if nothing is cut
  if (length == now && !lengths_->differ(slot)) return;
  await_arrival(caller, slot);
  protect(caller, slot, length);
  // From here on nothing is refused.
  hide(slot, length);
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    if (!lengths_->is_away(slot, buffers_.group(group).band))
      buffers_.truncate(slot, group, length);
  }
  lengths_->truncate(slot, length);
  std::vector<Token>& tokens = prompts_[slot].tokens;
  tokens.resize(std::min(tokens.size(), length));
  look_further({&slot, 1});
}

std::vector<std::size_t> SlotCache::fork(const Caller& caller, std::size_t slot, std::size_t n) {
  lengths_->require_whole(caller, slot);
  free_.require(caller, n);
  await_arrival(caller, slot);
  const std::size_t length = lengths_->length(slot);
  std::vector<std::size_t> forks;
  forks.reserve(n);
  if (n == 0) return forks;
  std::vector<Prefix> whole(length == 0 ? 0 : 1);
  if (length != 0) {
    lengths_->forget_room(slot);
    for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot)) {
      const Interval pages = buffer->indices_of(buffer->positions());
      whole[0].push_back(buffer->offer(caller, {&pages, 1}).front());
    }
    look_further({&slot, 1});
  }
  try {
    while (forks.size() < n)
      forks.push_back(accept(caller, whole, length, prompts_[slot].tokens, slot, false));
  } catch (...) {
    for (const std::size_t made : forks) leave(made);
    throw;
  }
  return forks;
}

std::vector<std::size_t> SlotCache::reorder(const Caller& caller,
                                            std::span<const std::size_t> beams,
                                            std::span<const std::size_t> sources) {
  if (beams.size() != sources.size()) {
    throw InvalidArgument("[", caller.operation, "] ", beams.size(), " slots and ", sources.size(),
                          " sources were given: give one source for each slot");
  }
  for (const std::size_t slot : beams) lengths_->require_whole(caller, slot);
  SlotLengths::require_once(caller, "slot", beams);
  std::vector<std::size_t> dropped;
  for (std::size_t i = 0; i < beams.size(); ++i) {
    if (std::find(beams.begin(), beams.end(), sources[i]) == beams.end()) {
      throw InvalidArgument("[", caller.operation, "] source ", sources[i],
                            " is none of the slots: fork(slot) takes one from elsewhere");
    }
    if (std::find(sources.begin(), sources.end(), beams[i]) == sources.end())
      dropped.push_back(beams[i]);
  }
  for (const std::size_t slot : dropped) swaps_.await_arrival(caller, slot);
  for (const std::size_t slot : beams) buffers_.use(caller, slot);
  // With enough free slots the forks come first, and a refusal loses no beam.
  const bool beside = free_.has(dropped.size());
  const auto drop = [&]() noexcept {
    for (const std::size_t slot : dropped) leave(slot);
  };
  std::vector<std::size_t> result(sources.begin(), sources.end()), made;
  made.reserve(sources.size());  // nothing fails between a fork and its entry here
  if (!beside) drop();
  try {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const auto before = sources.first(i);
      if (std::find(before.begin(), before.end(), sources[i]) == before.end()) continue;
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
  lengths_->require_used(caller, slot);
  std::size_t length = 0;
  for (const std::size_t band : lengths_->or_all({}))
    length = std::max(length, lengths_->length(slot, band));
  if (positions.begin > positions.end || positions.end > length) {
    throw InvalidArgument("[", caller.operation, "] positions ", positions.begin, " to ",
                          positions.end, " of slot ", slot, ", which has ", length,
                          " tokens: give start <= stop <= that");
  }
  await_arrival(caller, slot);
  protect(caller, slot, positions.begin);
  std::vector<Growth> growths;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    Buffer& buffer = buffers_.at(slot, group);
    const Interval here{buffers_.begin(slot, group),
                        lengths_->here(slot, buffers_.group(group).band)};
    const Interval written = intersection(positions, here);
    if (!written.empty()) growths.push_back({&buffer, buffer.positions(), written});
  }
  Buffer::grow_all(caller, growths, false);
  look_further({&slot, 1});
}

// Nothing is written at positions without a page: such a write would end the process.
void SlotCache::require_kept(const Caller& caller, std::size_t group, std::size_t layer,
                             const Write& write) const {
  const auto& [slot, positions] = write;
  const RowGroup& rows = buffers_.group(group);
  lengths_->require_used(caller, slot);
  lengths_->require_here(caller, slot, rows.band);
  const std::size_t length = lengths_->length(slot, rows.band);
  // K and V of other sizes lie in two row groups, which give pages back at different lengths.
  std::size_t begin = 0;
  for (std::size_t i = 0; i < buffers_.groups(); ++i) {
    if (buffers_.group(i).window == rows.window && buffers_.group(i).band == rows.band)
      begin = std::max(begin, buffers_.begin(slot, i));
  }
  if (positions.end > length) {
    throw InvalidArgument("[", caller.operation, "] layer ", layer, ", slot ", slot, ", tokens ",
                          positions.begin, " to ", positions.end, ": the slot has ", length,
                          " tokens: call step() first, with a length of ", positions.end,
                          " for it");
  }
  if (positions.begin < begin) {
    throw InvalidArgument("[", caller.operation, "] layer ", layer, ", slot ", slot, ", tokens ",
                          positions.begin, " to ", positions.end, ": the layer's window of ",
                          rows.window, " has given back those before ", begin,
                          ": write what the window can still see");
  }
}

// Whether some page behind these positions is shared.
bool SlotCache::shares(const Write& write) const {
  const PoolLock lock(pool_);
  const SlotBuffers::Buffers& buffers = buffers_.of(write.slot);
  return std::any_of(buffers.begin(), buffers.end(), [&](const auto& buffer) VT_LOCKED {
    return buffer->shares() && buffer->writable_until(write.positions.begin) < write.positions.end;
  });
}

void SlotCache::begin_write(const Caller& caller, std::size_t group, std::size_t layer,
                            std::span<const Write> writes) {
  for (const Write& write : writes) require_kept(caller, group, layer, write);
  use(caller);
  for (const Write& write : writes) {
    const auto& [slot, positions] = write;
    if (positions.empty()) continue;
    finish_prefix(caller, slot);
    if (const FencePtr copied = swaps_.copies(slot, layer))
      pool_->driver().order(caller.stream, *copied);
    protect(caller, slot, positions.begin);
    if (shares(write)) unshare(caller, slot, positions);
  }
}

void SlotCache::swap_out(const Caller& caller, std::span<const std::size_t> slots,
                         const AllocateHost& allocate, Bands bands) {
  lengths_->require_to_swap(caller, slots, bands, true);
  swaps_.forget_ended();
  for (const std::size_t slot : slots) {
    finish_prefix(caller, slot);
    hide(slot, 0);
  }
  swaps_.swap_out(caller, slots, bands, allocate);
  for (const std::size_t slot : slots) lengths_->swap_out(slot, bands);
}

void SlotCache::swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands) {
  lengths_->require_to_swap(caller, slots, bands, false);
  swaps_.forget_ended();
  std::vector<std::int64_t> lengths(buffers_.shape().slots);
  for (const std::size_t slot : slots)
    lengths[slot] = static_cast<std::int64_t>(lengths_->length(slot));
  {
    // All at once, or no slot begins to come back: readers would keep its pages for a while.
    PoolLock lock(pool_);
    MakeRoom(*pool_).ready(lock, caller.operation, need(lengths, bands).pages);
  }
  swaps_.swap_in(caller, slots, bands);
  for (const std::size_t slot : slots) lengths_->swap_in(slot, bands);
  look_further(slots);
}

void SlotCache::use(const Caller& caller) {
  if (caller.stream == stream_) return;
  for (std::size_t slot = 0; slot < buffers_.shape().slots; ++slot) {
    if (lengths_->state(slot) != SlotState::free) buffers_.use(caller, slot);
  }
  stream_ = caller.stream;
}

}  // namespace vtensor
