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
#include "kv/slot_buffers.h"
#include "kv/slot_lengths.h"
#include "kv/slot_needs.h"
#include "kv/slot_prefixes.h"
#include "kv/slot_swaps.h"
#include "policy/page_pool.h"
#include "tensor/growing.h"
#include "vmm/caller.h"

namespace vtensor {

struct SlotCacheCounts {
  PoolCounts pages;               // of this cache's slots
  std::size_t distinct = 0;       // pages mapped, counted once
  std::size_t shared = 0;         // of these, mapped in several slots or kept by an index
  std::size_t lost = 0;           // slots given up after a driver call that could not be undone
  std::size_t swapped_bytes = 0;  // of host memory, that swapped slots take
  // Of the prefix index: units that it keeps, and has given up; tokens it was asked for, and had.
  std::size_t prefix_units = 0, prefix_evictions = 0;
  std::size_t prefix_queries = 0, prefix_hits = 0;
};

// One thread at a time. If an operation throws, nothing has changed, unless it says otherwise.
class SlotCache {
 public:
  // Reserves the addresses. Throws CapacityExceeded, DriverError.
  SlotCache(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape, const Caller& caller);
  ~SlotCache();
  SlotCache(const SlotCache&) = delete;
  SlotCache& operator=(const SlotCache&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const SlotBuffers& buffers() const { return buffers_; }
  const SlotLengths& lengths() const { return *lengths_; }
  // Positions of a row group that have pages.
  std::int64_t length_here(std::size_t slot, std::size_t group) const {
    return static_cast<std::int64_t>(lengths_->here(slot, buffers_.group(group).band));
  }
  SlotSwaps& swaps() { return swaps_; }
  PrefixIndex& prefixes() { return prefixes_.index(); }
  // What holds its pages.
  std::vector<std::shared_ptr<Client>> clients() const;
  SlotCacheCounts counts();
  std::vector<PageRecord> pages(std::size_t slot, std::size_t group);

  // A free slot of length 0 for a request of `expected` positions: see FreeSlots::take.
  std::size_t alloc(const Caller& caller, std::size_t expected);
  // One that begins with what the index has of a request's tokens, but never all of them. If that
  // is `deferred` and the cache looks ahead, no driver call maps it: the mapper does once a step is
  // prepared, or else the next operation on the slot.
  std::size_t alloc(const Caller& caller, std::span<const Token> tokens, const std::string& salt,
                    std::size_t expected, bool deferred = false);
  // Whether what a slot begins with may not be mapped yet. It is once `finish_prefix` returns.
  bool expects(std::size_t slot) const { return prefixes_.expects(slot); }
  void finish_prefix(const Caller& caller, std::size_t slot);

  // Makes the first lengths[s] positions of each slot its own: mapped, and not shared if they are
  // new. Bands that are not named keep their lengths. All or nothing, in one batch of driver calls;
  // none if the pages are ready. If the driver refuses, pages that were shared may have been
  // copied; nothing else has changed. Throws OutOfPages, InvalidArgument, CapacityExceeded.
  void step(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands = {});
  // Whether slots may have these lengths without another page.
  bool has_room(std::span<const std::int64_t> lengths);
  // As `step`, if no slot needs another page. False, and nothing is done, if one does.
  bool step_within(const Caller& caller, std::span<const std::int64_t> lengths);
  // Announces a step: has the mapper map what slots need for it, and what the cache looks ahead
  // beyond that if memory is free. Of what nothing uses it gives up no more than is missing, and
  // announces nothing if even that does not suffice. True if a step would find all of it ready.
  // Makes no driver call, and waits for nothing. Throws as `step` for lengths that cannot be.
  bool prepare(const Caller& caller, std::span<const std::int64_t> lengths);
  // Whether slots could have these lengths now, by a step, after a swap_in of what is swapped out.
  // Counts what the budget leaves and what would be given up; gives nothing up. A slot of length 0
  // is left out. `waits`: if they could not, asks again until no page is on its way out, for the
  // pool's patience at most.
  bool fits(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands = {},
            bool waits = false);
  // Whether nothing but what other pools of a shared budget hold is in the way.
  bool waits_for_others(const Caller& caller, std::span<const std::int64_t> lengths);

  // Its pages are cached for a later request, and go as soon as others need them.
  void free(const Caller& caller, std::size_t slot);
  void truncate(const Caller& caller, std::size_t slot, std::size_t length);
  // `n` free slots that share all pages of `slot`, copy-on-write in all of them; with them what a
  // kernel may touch behind the length.
  std::vector<std::size_t> fork(const Caller& caller, std::size_t slot, std::size_t n);
  // For each beam the slot that goes on with sources[i]: the source itself for the first that names
  // it, a fork for others. Slots in `beams` that no beam goes on with are freed; before the forks
  // are made, and for good, if there are no free slots for these besides.
  std::vector<std::size_t> reorder(const Caller& caller, std::span<const std::size_t> beams,
                                   std::span<const std::size_t> sources);
  // Puts the whole units of the slot's first tokens into the index. Returns how many tokens it has
  // of them.
  std::size_t publish(const Caller& caller, std::size_t slot, std::span<const Token> tokens,
                      const std::string& salt);
  // Gives prefixes up that no request uses, for an operation that found memory short for the n-th
  // time. False if there are none.
  bool evict(unsigned tries);
  // Gives the slot pages of its own behind `positions`.
  void unshare(const Caller& caller, std::size_t slot, Interval positions);
  // Has `positions` of each slot ready to be written in `layer`, whose rows are of a row group:
  // waits for what is being copied into that layer, and unshares what is shared there. Throws
  // InvalidArgument for positions that a slot has not, before anything is done; OutOfPages.
  struct Write {
    std::size_t slot;
    Interval positions;
  };
  void begin_write(const Caller& caller, std::size_t group, std::size_t layer,
                   std::span<const Write> writes);
  // See SlotSwaps. Slots of which only bands go stay in use.
  void swap_out(const Caller& caller, std::span<const std::size_t> slots,
                const AllocateHost& allocate, Bands bands = {});
  void swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands = {});
  // Work in the caller's stream uses all slots in use. Requires: the stream lasts.
  void use(const Caller& caller);
  // Everything is freed; addresses go with the last view.
  void close(const Caller& caller) noexcept;

 private:
  SlotNeeds needs() const { return {buffers_, *lengths_, swaps_, prefixes_}; }
  bool fits_now(const Caller& caller, std::span<const std::int64_t> lengths, Bands bands,
                bool alone);
  bool make_room_ahead(std::span<const std::int64_t> lengths);
  bool grow_ready(const Caller& caller, std::span<const Growth> growths);
  void look_further(std::span<const std::size_t> slots);
  std::size_t room_of(std::size_t slot, std::size_t group, std::size_t length) const VT_LOCKED;
  std::size_t accept(const Caller& caller, std::span<const Prefix> parts, std::size_t length,
                     std::vector<Token> tokens, std::optional<std::size_t> source, bool deferred);
  void leave(std::size_t slot) noexcept;
  void await_arrival(const Caller& caller, std::size_t slot);
  void require_kept(const Caller& caller, std::size_t group, std::size_t layer,
                    const Write& write) const;
  bool shares(const Write& write) const;

  const std::shared_ptr<PagePool> pool_;
  const std::shared_ptr<SlotLengths> lengths_;
  SlotBuffers buffers_;
  FreeSlots free_;
  SlotSwaps swaps_;
  SlotPrefixes prefixes_;
  // Of one step; kept for their memory.
  std::vector<std::size_t> due_;
  std::vector<Growth> growths_;
  Stream stream_;  // the last one whose work was said to use all slots
};

using OwnedSlotCache = std::unique_ptr<SlotCache, DeleteUnlessForked>;

}  // namespace vtensor
