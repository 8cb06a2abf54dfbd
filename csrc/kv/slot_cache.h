// The memory of a KV cache: slots for requests, each with rows in address ranges that all slots
// share. A slot's rows are a buffer, placed in the range of its row group; the ranges' addresses
// stay for the cache's life. The four calls of vAttention (init, alloc_reqid, step, free_reqid;
// arXiv 2405.04437) are the constructor, `alloc`, `step` and `free`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "kv/prefix_index.h"
#include "kv/slots_now.h"
#include "policy/page_pool.h"
#include "tensor/buffer.h"
#include "vmm/caller.h"

namespace vtensor {

// What each token's item in a row, or in some neighbouring ones, consists of: K or V of some
// layers, in equal parts.
struct RowContent {
  std::vector<std::size_t> layers = {0};  // the first is the first that reads the row
  bool values = false;                    // V
  std::size_t heads = 0;                  // rows, one of each head; 0: one row of all heads

  std::size_t rows() const { return std::max<std::size_t>(1, heads); }
};

// Rows that are alike: K and V of some layers, or heads of them.
struct RowGroup {
  std::size_t rows = 0;                   // of a slot; each grows with the slot's length
  std::size_t item_bytes = 0;             // of one position in one row
  std::size_t window = 0;                 // positions that are kept behind the length; 0: all
  std::vector<RowContent> contents = {};  // in their order; if empty, K of layer 0 in each
  std::size_t band = 0;                   // which its layers belong to

  // Where what the window can still see begins, for queries behind `length` positions.
  std::size_t first_seen(std::size_t length) const {
    return window == 0 || length < window ? 0 : length + 1 - window;
  }
};

// Lengths and positions are those of a request: its tokens.
struct SlotCacheShape {
  std::size_t slots = 0;
  std::size_t max_length = 0;
  // What a kernel touches past the length lies in one tile with the last token, wherever tiles
  // begin.
  std::size_t tile = 1;
  std::size_t lookahead = 0;  // positions kept ready behind the length, by the mapper
  std::vector<RowGroup> row_groups;
  std::size_t bands = 1;  // of layers; those of one grow, leave and come back together
};

// Memory of the host, as long as it has a holder.
using HostMemory = std::shared_ptr<std::byte>;
// Gives so many bytes of it, which copies of the driver reach. Throws OutOfPages.
using AllocateHost = std::function<HostMemory(std::size_t bytes)>;

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

// One thread at a time. Where an operation throws, nothing has changed, unless it says otherwise.
class SlotCache {
 public:
  // Reserves the addresses. Throws CapacityExceeded, DriverError.
  SlotCache(const std::shared_ptr<PagePool>& pool, SlotCacheShape shape, const Caller& caller);
  ~SlotCache();
  SlotCache(const SlotCache&) = delete;
  SlotCache& operator=(const SlotCache&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  const SlotCacheShape& shape() const { return shape_; }
  // The buffer whose range a row group's rows lie in: row r of slot s at its row r * slots + s.
  const std::shared_ptr<Buffer>& range(std::size_t group) const { return row_groups_[group].range; }
  // Of a slot whose bands differ, the least that one of them has.
  std::span<const std::int64_t> lengths() const { return lengths_; }
  SlotState state(std::size_t slot) const { return states_[slot]; }
  // Positions of a swapped slot; of others, its length.
  std::size_t length(std::size_t slot) const;
  // The same of one band.
  std::size_t band_length(std::size_t slot, std::size_t band) const;
  // Whether the band, but not the whole slot, is in host memory.
  bool is_band_away(std::size_t slot, std::size_t band) const {
    return !slots_[slot].bands.empty() && slots_[slot].bands[band].swapped != nullptr;
  }
  // Positions of a row group that have pages.
  std::int64_t length_here(std::size_t slot, std::size_t group) const {
    const std::vector<Band>& bands = slots_[slot].bands;
    if (bands.empty()) return lengths_[slot];
    const Band& band = bands[row_groups_[group].shape.band];
    return band.swapped == nullptr ? band.length : 0;
  }

  // A free slot of length 0: the one whose cached pages fit a request of `expected` positions best;
  // where that is 0, the one with most. Throws NoFreeSlot, and TimedOut where none becomes ready.
  std::size_t alloc(const Caller& caller, std::size_t expected);
  // One that begins with what the index has of a request's tokens, but never all of them. If that
  // is `deferred` and the cache looks ahead, no driver call maps it: the mapper does once a step is
  // prepared, or else the next operation on the slot.
  std::size_t alloc(const Caller& caller, std::span<const Token> tokens, const std::string& salt,
                    std::size_t expected, bool deferred = false);
  // Makes the first lengths[s] positions of each slot its own: mapped, and not shared if they are
  // new. All or nothing, in one batch of driver calls; none if the pages are ready. If the driver
  // refuses, pages that were shared may have been copied; nothing else has changed. Throws
  // OutOfPages, InvalidArgument, CapacityExceeded.
  void step(const Caller& caller, std::span<const std::int64_t> lengths);
  // The same for some bands of each slot; the others keep their lengths.
  void step_bands(const Caller& caller, std::span<const std::int64_t> lengths,
                  std::span<const std::size_t> bands);
  // Whether slots could have these lengths now: by a step, after a swap_in of those that are
  // swapped out; of all bands, or if any are named of these. Counts what the budget leaves and what
  // would be given up for them; gives nothing up. A slot of length 0 is left out. `waits`: if they
  // could not, asks again until no page is on its way out, for the pool's patience at most.
  bool fits(const Caller& caller, std::span<const std::int64_t> lengths,
            std::span<const std::size_t> bands = {}, bool waits = false);
  // Whether nothing but what other pools of a shared budget hold is in the way.
  bool waits_for_others(const Caller& caller, std::span<const std::int64_t> lengths);
  // Announces a step: has the mapper map what slots need for it, and what the cache looks ahead
  // beyond that if memory is free. Of what nothing uses it gives up no more than is missing, and
  // announces nothing where even that does not suffice. True if a step would find all of it ready.
  // Makes no driver call, and waits for nothing. Throws as `step` for lengths that cannot be.
  bool prepare(const Caller& caller, std::span<const std::int64_t> lengths);
  // Whether what a slot begins with may not be mapped yet. It is once `finish_prefix` returns.
  bool expects(std::size_t slot) const { return slots_[slot].expects; }
  void finish_prefix(const Caller& caller, std::size_t slot);
  // Whether slots may have these lengths without another page.
  bool has_room(std::span<const std::int64_t> lengths) { return find_due(lengths) && due_.empty(); }
  // As `step`, if no slot needs another page. False, and nothing is done, if one does.
  bool step_within(const Caller& caller, std::span<const std::int64_t> lengths);
  // Its pages are cached for a later request, and go as soon as others need them.
  void free(const Caller& caller, std::size_t slot);
  void truncate(const Caller& caller, std::size_t slot, std::size_t length);
  // `n` free slots that share all pages of `slot`, copy-on-write in all of them; with them what a
  // kernel may touch behind the length.
  std::vector<std::size_t> fork(const Caller& caller, std::size_t slot, std::size_t n);
  // For each beam the slot that goes on with sources[i]: the source itself for the first that names
  // it, a fork for others. Slots in `beams` that no beam goes on with are freed; before the forks
  // are made, and for good, where there are no free slots for these besides.
  std::vector<std::size_t> reorder(const Caller& caller, std::span<const std::size_t> beams,
                                   std::span<const std::size_t> sources);
  // Puts the whole units of `tokens`, which are the slot's first, into the index. Returns how many
  // tokens it has of them.
  std::size_t publish(const Caller& caller, std::size_t slot, std::span<const Token> tokens,
                      const std::string& salt);
  // Gives prefixes up that no request uses, for an operation that found memory short for the n-th
  // time; false where there are none.
  bool evict(unsigned tries);
  // The same for who needs so many pages; returns how many went. How many could.
  std::size_t evict_pages(std::size_t pages) { return prefixes_.evict(pages); }
  std::size_t evictable_pages() const { return prefixes_.evictable(); }
  // Gives the index up; what slots have mapped stays theirs.
  void forget_prefixes() { prefixes_.clear(); }
  // Tokens of the smallest prefix that requests can share.
  std::size_t unit() const { return prefixes_.unit(); }
  // Parts what is shared behind `positions`.
  void unshare(const Caller& caller, std::size_t slot, Interval positions);
  // Has `positions` of each slot ready to be written in `layer`, whose rows are of `row group`:
  // what is being copied into that layer is waited for, and what is shared there is parted. Throws
  // InvalidArgument for positions that a slot has not, before anything is done; OutOfPages.
  struct Write {
    std::size_t slot;
    Interval positions;
  };
  void begin_write(const Caller& caller, std::size_t group, std::size_t layer,
                   std::span<const Write> writes);
  // Moves slots to host memory, behind the work launched so far: pages go once they are copied.
  // Those that share pages share them again afterwards, and are copied once.
  void swap_out(const Caller& caller, std::span<const std::size_t> slots,
                const AllocateHost& allocate);
  // Gives swapped slots pages again, at their addresses, and launches the copies, layer by layer:
  // all of them or none.
  void swap_in(const Caller& caller, std::span<const std::size_t> slots);
  // Both of some bands, which go and come back each by itself and share nothing afterwards. The
  // slots stay in use.
  void swap_out_bands(const Caller& caller, std::span<const std::size_t> slots,
                      std::span<const std::size_t> bands, const AllocateHost& allocate);
  void swap_in_bands(const Caller& caller, std::span<const std::size_t> slots,
                     std::span<const std::size_t> bands);
  // A point behind the copies of a slot: those that `layer` waits for, or all; null where there are
  // none.
  FencePtr copies(std::size_t slot, std::optional<std::size_t> layer);
  // A point behind the copies of all slots that come back; null where there are none.
  FencePtr arrivals();
  // Whether something that `layer` reads, or any layer, is in host memory.
  bool is_away(std::size_t slot, std::optional<std::size_t> layer) const;
  // Returns once what a slot has in host memory has given its pages back. Requires: its copies are
  // over.
  void await_departure(const Caller& caller, std::size_t slot,
                       std::optional<std::size_t> layer = std::nullopt);
  // The first position that is kept, of each row group.
  const std::vector<std::size_t>& begins(std::size_t slot) const { return slots_[slot].begins; }
  // Work in the caller's stream uses all slots in use. Requires: the stream lasts.
  void use(const Caller& caller);
  // Everything is freed; addresses go with the last view.
  void close(const Caller& caller) noexcept;

  // Slots in use, and swapped ones.
  std::size_t count_used() const;
  // What holds its pages.
  std::vector<std::shared_ptr<Client>> clients() const;

  SlotCacheCounts counts();
  std::vector<PageRecord> pages(std::size_t slot, std::size_t group);

 private:
  struct GroupRange {
    RowGroup shape;
    std::shared_ptr<Buffer> range;
    RowShape rows;  // of one slot
  };
  // Host memory that copies may still use: let go once the fence has passed, which is made when the
  // holder no longer needs it.
  struct Held {
    HostMemory memory;
    std::size_t bytes = 0;
    bool fenced = false;
    FencePtr until = nullptr;
  };
  // Slots that were swapped out together and begin with the same pages.
  struct SwapGroup {
    std::size_t length = 0;   // positions whose pages are the same
    std::list<Held> head;     // their bytes
    std::size_t waiting = 0;  // slots that have not come back
    Prefix pages;             // once the first slot has them again
  };
  struct Swapped {
    std::size_t length = 0;
    std::list<Held> memory;  // the bytes that it shares with no other
    std::shared_ptr<SwapGroup> group;
    FencePtr copied;
  };
  // A copy on its way in, of what `layer` is the first to read.
  struct Arriving {
    std::size_t layer, band;
    FencePtr over;
  };
  struct Band {
    std::int64_t length = 0;
    std::unique_ptr<Swapped> swapped;  // null while it is here
  };
  struct Slot {
    std::vector<std::shared_ptr<Buffer>> buffers;  // of each row group; null until first used
    std::vector<std::size_t> begins;               // first position that is kept, of each row group
    std::vector<Token> tokens;  // those that the index knows it by, from position 0 on
    // Positions from here on lie in no page that the index has and that may still be writable.
    std::size_t offered = 0;
    bool expects = false;              // pages of its prefix, which may not be mapped yet
    std::unique_ptr<Swapped> swapped;  // where it is
    std::vector<Arriving> arriving;    // in the order of their copies; empty once all are there
    std::vector<Band> bands;           // empty while all are here and have the slot's length
  };
  // What goes to host memory, or comes back, by itself.
  struct Part {
    std::size_t slot;
    std::span<const std::size_t> groups;
    std::unique_ptr<Swapped> swapped;
  };
  // Bytes of one row of a slot.
  struct SlotBytes {
    std::size_t layer;  // the first that reads them
    Address at;
    std::size_t bytes;
    std::size_t item;  // of one position
  };

  std::size_t page_of(const GroupRange& group, std::size_t position) const {
    return position * group.shape.item_bytes / pool_->page_size();
  }
  // Positions behind a length that a kernel may touch.
  std::size_t tail() const { return std::min(shape_.tile, shape_.max_length) - 1; }
  Interval needed(std::size_t group, std::size_t slot, std::size_t length) const;
  bool find_due(std::span<const std::int64_t> lengths);
  void require_due(const Caller& caller, std::span<const std::int64_t> lengths);
  // What slots need to have other lengths.
  struct Need {
    std::size_t pages = 0;  // that are not mapped yet
    std::size_t ready = 0;  // that are, and are needed from then on
  };
  Need need_of(std::span<const std::int64_t> lengths, std::span<const std::size_t> bands) const
      VT_LOCKED;
  // `alone`: as if the other pools of a shared budget held nothing.
  bool fits_now(const Caller& caller, std::span<const std::int64_t> lengths,
                std::span<const std::size_t> bands, bool alone);
  std::size_t reclaimable(const PoolCounts& counts) VT_LOCKED;
  bool is_prepared(std::span<const std::int64_t> lengths) const VT_LOCKED;
  std::size_t leaving_where_due(std::span<const std::int64_t> lengths) const VT_LOCKED;
  bool make_room_ahead(std::span<const std::int64_t> lengths);
  void announce(std::span<const std::int64_t> lengths) VT_LOCKED;
  void require_lengths(const Caller& caller, std::span<const std::int64_t> lengths) const;
  void require_length(const Caller& caller, std::size_t slot, std::int64_t length,
                      std::int64_t now) const;
  void require_used(const Caller& caller, std::size_t slot) const;
  std::size_t band_of(std::size_t layer) const {
    return band_of_[std::min(layer,
                             band_of_.size() - 1)];  // behind the last layer nothing more is read
  }
  void require_named_once(const Caller& caller, std::span<const std::size_t> slots) const;
  void require_bands(const Caller& caller, std::span<const std::size_t> bands) const;
  void require_here(const Caller& caller, std::size_t slot, std::size_t band) const;
  void require_together(const Caller& caller, std::size_t slot) const;
  bool is_to_grow(const Caller& caller, std::size_t slot, std::size_t band,
                  std::int64_t length) const;
  std::vector<Band> bands_of(std::size_t slot) const;
  void forget_bands(std::size_t slot) noexcept;
  void settle_bands(std::size_t slot) noexcept;
  void require_kept(const Caller& caller, std::size_t group, std::size_t layer,
                    const Write& write) const;
  bool shares(const Write& write) const VT_LOCKED;
  void require_free(const Caller& caller, std::size_t n) const;
  bool has_free(std::size_t n) const;
  void require_arrived(const Caller& caller, std::size_t slot);
  std::size_t count_free() const;
  void protect(const Caller& caller, std::size_t slot);
  bool looks_ahead() const { return shape_.lookahead != 0 && pool_->looks_ahead(); }
  void expect_unsharing(std::size_t slot) { room_[slot] = lengths_[slot]; }
  void forget_heads(const Caller& caller, std::size_t slot, std::span<const std::size_t> groups);
  void look_further(std::span<const std::size_t> slots);
  std::size_t room_of(std::size_t group, std::size_t slot, std::size_t length) const VT_LOCKED;
  bool grow_ready(const Caller& caller, std::span<const std::int64_t> lengths);
  void grow(const Caller& caller, std::span<const std::int64_t> lengths);

  // What a free slot can be used for now.
  struct Fit {
    bool ready = false;      // all of its places can be had
    std::size_t cached = 0;  // positions behind cached pages
    std::size_t before = 0;  // page table slots that are empty before these, in every group
  };
  Fit fit(const Slot& slot) const VT_LOCKED;
  using Ready = std::set<std::pair<std::size_t, std::size_t>>;
  void admit_settled() VT_LOCKED;
  void list_ready(std::size_t slot, std::size_t cached);
  bool confirm(Ready::iterator listed, Fit& seen) VT_LOCKED;
  std::optional<std::size_t> choose(std::size_t expected) VT_LOCKED;
  std::optional<std::size_t> choose_empty(std::span<const std::size_t> pages) VT_LOCKED;
  bool leaving() const VT_LOCKED;
  std::exception_ptr refusal() const VT_LOCKED;
  static bool is_lost(const Slot& slot) VT_LOCKED;
  static std::size_t cached_pages(const Slot& slot) VT_LOCKED;
  bool evict_one() VT_LOCKED;
  template <typename Choose>
  std::size_t take(const Caller& caller, Choose choose);
  bool enter(const Caller& caller, std::size_t slot);
  void leave(std::size_t slot) noexcept;
  std::size_t take_empty(const Caller& caller, std::span<const std::size_t> pages);
  std::size_t accept(const Caller& caller, std::span<const Prefix> parts, std::size_t length,
                     const Slot* parent, bool deferred = false);

  std::size_t alloc_prefix(const Caller& caller, std::span<const Prefix> prefix, std::size_t length,
                           bool deferred);
  std::vector<Prefix> offer(const Caller& caller, std::size_t slot,
                            std::span<const std::size_t> bounds);
  std::size_t covered(std::size_t position) const;

  std::vector<SlotBytes> bytes_of(std::size_t slot, std::span<const std::size_t> groups,
                                  std::size_t length, std::size_t shared, bool head) const;
  std::shared_ptr<SwapGroup> group_of(std::span<const std::size_t> slots,
                                      std::vector<bool>& members);
  void copy_out(const Caller& caller, std::span<const Part> parts, SwapGroup* group,
                const AllocateHost& allocate);
  void order_copies(const Caller& caller, std::size_t slot, std::span<const std::size_t> groups);
  void restore(const Caller& caller, std::size_t slot, std::span<const std::size_t> groups,
               std::size_t length, const Prefix& prefix);
  std::vector<Arriving> bring_in(const Caller& caller, std::size_t slot,
                                 std::span<const std::size_t> groups, const Swapped& swapped,
                                 std::size_t length);
  void send_back(const Caller& caller, std::size_t slot,
                 std::span<const std::size_t> groups) noexcept;
  void share_again(const Caller& caller, std::size_t slot, SwapGroup& group) noexcept;
  void leave_swap(Swapped& swapped) noexcept;
  FencePtr last_arrival(std::size_t slot) const {
    return slots_[slot].arriving.empty() ? nullptr : slots_[slot].arriving.back().over;
  }
  void await_arrival(const Caller& caller, std::size_t slot);
  void settle_copies() noexcept;
  void finish_copies() noexcept;

  const std::shared_ptr<PagePool> pool_;
  const SlotCacheShape shape_;
  std::vector<GroupRange> row_groups_;
  std::vector<std::size_t> all_groups_;
  std::vector<std::vector<std::size_t>> groups_of_;  // each band
  std::vector<std::size_t> band_of_;                 // each layer
  std::vector<Slot> slots_;
  const std::shared_ptr<SlotsNow> now_;
  const std::span<std::int64_t> lengths_;  // 0 where the slot is not in use
  const std::span<SlotState> states_;
  // Lengths below need no other page: every page is there, ready, and the slot's own.
  std::vector<std::int64_t> room_;
  // Free slots: those whose places can be had, by their cached positions and number as last seen,
  // and the others, until their pages have gone or are cached.
  Ready ready_;
  std::vector<std::size_t> listed_as_;  // cached positions, of each of these
  std::vector<std::size_t> settling_;
  std::size_t look_at_ = 0;       // in settling_, next
  std::vector<std::size_t> due_;  // of one step; kept for its memory
  Stream stream_ = 0;             // the last one whose work was said to use all slots
  PrefixIndex prefixes_;
  std::size_t prefix_queries_ = 0, prefix_hits_ = 0;
  std::vector<std::size_t> arriving_;  // slots
  std::list<Held> held_;               // by no slot any more
};

}  // namespace vtensor
