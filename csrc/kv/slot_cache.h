// The memory of a KV cache: slots for requests, each with rows in address ranges that all slots
// share. The four calls of vAttention (init, alloc_reqid, step, free_reqid; arXiv 2405.04437) are
// the constructor, `alloc`, `step` and `free`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/interval.h"
#include "base/process.h"
#include "kv/free_slots.h"
#include "kv/prefix_index.h"
#include "kv/slot_buffers.h"
#include "kv/slot_lengths.h"
#include "kv/slot_swaps.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"
#include "vmm/caller.h"

namespace vtensor {

struct SlotCacheCounts {
  PoolCounts pages;                             // of this cache's slots
  std::size_t free = 0, used = 0, swapped = 0;  // slots
  std::size_t tokens = 0;
  std::size_t live_bytes = 0;     // that the tokens need in pages
  std::size_t distinct = 0;       // pages mapped, counted once
  std::size_t shared = 0;         // of the distinct pages: mapped in several slots or in the index
  std::size_t swapped_bytes = 0;  // host memory of swapped slots
  // Prefix index: units in it, units evicted; tokens looked up, tokens found.
  std::size_t prefix_units = 0, prefix_evictions = 0;
  std::size_t prefix_queries = 0, prefix_hits = 0;
};

// One thread at a time. If an operation throws, nothing has changed, unless it says otherwise.
// Requires: slots are numbers below the shape's `slots`.
class SlotCache {
 public:
  // Reserves the addresses. Throws CapacityExceeded, DriverError.
  SlotCache(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape, const Caller& caller);
  ~SlotCache();
  SlotCache& operator=(SlotCache&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const SlotBuffers& buffers() const { return buffers_; }
  const SlotLengths& lengths() const { return *lengths_; }
  SlotSwaps& swaps() { return swaps_; }
  PrefixIndex& prefixes() { return prefixes_; }
  // The clients that hold the cache's pages.
  std::vector<std::shared_ptr<Client>> clients() const;
  SlotCacheCounts counts();
  std::vector<PageRecord> pages(std::size_t slot, std::size_t group);

  // A free slot of length 0 for a request of `expected` positions: see FreeSlots::take.
  std::size_t alloc(const Caller& caller, std::size_t expected);
  // A slot that begins with the pages that the index has for the first tokens of a request, but
  // never for all of them. If `deferred` and the cache looks ahead, this makes no driver call: the
  // mapper maps them once a step is prepared, or else the next operation on the slot does.
  std::size_t alloc(const Caller& caller, std::span<const Token> tokens, const std::string& salt,
                    std::size_t expected, bool deferred = false);
  // Whether the slot's first pages may not be mapped yet. `finish_prefix` maps them.
  bool is_deferred(std::size_t slot) const { return is_deferred_[slot] != 0; }
  void finish_prefix(const Caller& caller, std::size_t slot);

  // Makes the first lengths[s] positions of each slot its own: mapped, and not shared if they are
  // new. Bands that are not named keep their lengths. All or nothing, in one batch of driver calls;
  // none if the pages are ready. If the driver refuses, pages that were shared may have been
  // copied; nothing else has changed. Throws OutOfPages, InvalidArgument, CapacityExceeded.
  void step(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands = {});
  // Whether slots may have these lengths without another page.
  bool has_room(std::span<const std::int64_t> lengths);
  // `step` without a driver call. False, and nothing is changed, if a slot needs another page.
  bool step_within(const Caller& caller, std::span<const std::int64_t> lengths);
  // Announces a step: has the mapper map the pages that it needs, and the look-ahead past them if
  // memory is free. Cached pages and prefixes are evicted as far as pages are missing; if that is
  // not enough, nothing is announced. True if all pages are ready. Makes no driver call and waits
  // for nothing. Throws as `step` for lengths that are not possible.
  bool prepare(const Caller& caller, std::span<const std::int64_t> lengths);
  // Whether a step to these lengths, after a swap_in of swapped slots, would get its pages: from
  // the budget and from pages that would be taken back. Takes nothing back. A slot of length 0 is
  // left out. `waits`: asks again while pages are leaving, for the pool's patience at most.
  bool fits(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands = {},
            bool waits = false);
  // Whether such a step would get its pages if the other pools of a shared budget held nothing.
  bool waits_for_others(const Caller& caller, std::span<const std::int64_t> lengths);

  // Frees a slot. Its pages are cached for a later request until memory is short.
  void free(const Caller& caller, std::size_t slot);
  void truncate(const Caller& caller, std::size_t slot, std::size_t length);
  // `n` free slots that share all pages of `slot` copy-on-write, also the tile past its length.
  std::vector<std::size_t> fork(const Caller& caller, std::size_t slot, std::size_t n);
  // For each beam i the slot that continues sources[i]: the source itself for the first beam that
  // names it, a fork for the others. Frees the slots in `beams` that no beam continues: after the
  // forks, or before them if there are too few free slots; then a refusal does not bring them back.
  std::vector<std::size_t> reorder(const Caller& caller, std::span<const std::size_t> beams,
                                   std::span<const std::size_t> sources);
  // Adds the whole units of the slot's first tokens to the index. Returns how many of the tokens it
  // then has.
  std::size_t publish(const Caller& caller, std::size_t slot, std::span<const Token> tokens,
                      const std::string& salt);
  // Evicts prefixes that no request uses, more with each try of an operation. False if there are
  // none.
  bool evict(unsigned tries);
  // Gives the slot pages of its own for `positions`.
  void unshare(const Caller& caller, std::size_t slot, Interval positions);
  // Makes `positions` of each slot writable in `layer` of a row group: orders the caller's stream
  // after copies into that layer, and unshares shared pages. Throws InvalidArgument for positions
  // that a slot does not have, before anything is done; OutOfPages.
  struct Write {
    std::size_t slot;
    Interval positions;
  };
  void begin_write(const Caller& caller, std::size_t group, std::size_t layer,
                   std::span<const Write> writes);
  // See SlotSwaps. A slot of which only some bands are swapped out stays in use.
  void swap_out(const Caller& caller, std::span<const std::size_t> slots,
                const AllocateHost& allocate, Bands bands = {});
  void swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands = {});
  // Shows the pages and lengths to readers in other processes: see SlotBuffers::share.
  void share(const Caller& caller);
  // Shows them the lengths as they are now: whole steps. A slot has none while its prefix is still
  // to be mapped, or any of it is in host memory or being copied from there. What shrinks is hidden
  // at once.
  void show_lengths() noexcept;
  void prefetch_shown() const noexcept {
    if (shown_ != nullptr) shown_->prefetch_words();
  }
  // Work in the caller's stream uses all slots. Requires: the stream outlives the cache.
  void use(const Caller& caller);
  // Frees every slot; the addresses are freed with the last view.
  void close(const Caller& caller) noexcept;

 private:
  // Pages that a step needs.
  struct Need {
    std::size_t pages = 0;   // to be mapped
    std::size_t ready = 0;   // mapped ahead of need, so not to be taken back for this step
    std::size_t copied = 0;  // private copies that it replaces
  };
  // The beginning of a slot's request, from position 0 on.
  struct Prompt {
    std::vector<Token> tokens;  // that the index knows
    // Pages offered to the index and still writable here hold positions below this.
    std::size_t offered = 0;
  };

  bool fits_now(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                bool alone);
  Need need(std::span<const std::int64_t> lengths, Bands bands) const VT_LOCKED;
  MakeRoom::Spare given_up() const VT_LOCKED;
  bool make_room_ahead(std::span<const std::int64_t> lengths);
  void list_growths(std::span<const std::int64_t> lengths, Bands bands);
  bool are_ready() const VT_LOCKED;
  bool grow_ready(const Caller& caller);
  void look_further(std::span<const std::size_t> slots);
  std::size_t room_of(std::size_t slot, std::size_t group, std::size_t length) const VT_LOCKED;
  std::size_t accept(const Caller& caller, std::span<const Prefix> parts, std::size_t length,
                     std::vector<Token> tokens, std::optional<std::size_t> source, bool deferred);
  std::size_t whole_positions(std::size_t position) const;
  std::vector<Prefix> offer(const Caller& caller, std::size_t slot, std::size_t first,
                            std::size_t end);
  void require_first_pages(const Caller& caller, std::size_t slot) const;
  void protect(const Caller& caller, std::size_t slot, std::size_t begin);
  void leave(std::size_t slot) noexcept;
  // Readers in other processes see no more of the slot from now on.
  void hide(std::size_t slot, std::size_t length) noexcept;
  void begin(const Caller& caller, std::size_t slot, std::size_t length);
  void await_arrival(const Caller& caller, std::size_t slot);
  void require_kept(const Caller& caller, std::size_t group, std::size_t layer,
                    const Write& write) const;
  bool shares(const Write& write) const;

  const std::shared_ptr<PagePool> pool_;
  const std::shared_ptr<SlotLengths> lengths_;
  SlotBuffers buffers_;
  FreeSlots free_;
  SlotSwaps swaps_;
  PrefixIndex prefixes_;
  std::vector<Prompt> prompts_;            // of each slot
  std::vector<std::uint8_t> is_deferred_;  // of each slot: see is_deferred(); apart for cache lines
  std::size_t prefix_queries_ = 0, prefix_hits_ = 0;  // tokens
  SharedRange* shown_ = nullptr;             // its words are the slots' lengths; null: no readers
  std::vector<std::int64_t> shown_lengths_;  // scratch of show_lengths, if readers see fewer
  // Scratch of one step, kept to avoid allocating.
  std::vector<std::size_t> due_;
  std::vector<Growth> growths_;
  std::optional<Stream> stream_;  // what `use` last noted, if all slots in use have noted it
};

using OwnedSlotCache = std::unique_ptr<SlotCache, DeleteUnlessForked>;

}  // namespace vtensor
