// Pages that a buffer's last owner left mapped. They are cached until the buffer gets another
// owner, for which they are ahead of its extent; pages with the last owner's bytes are zeroed
// first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/interval.h"
#include "vmm/pool_lock.h"
#include "vmm/reservation.h"

namespace vtensor {

class Leftover {
 public:
  explicit Leftover(Reservation& range) : range_(range) {}

  // Pages that wait for the next owner: mapped in every row, and not shared.
  Interval cached() const VT_LOCKED { return cached_; }
  // Pages of which some may show the last owner's bytes.
  Interval unclean() const VT_LOCKED { return unclean_; }
  // Pages that the present owner took over; counted as cached until its extent reaches them.
  Interval reused() const VT_LOCKED { return reused_; }

  // Whether pages may be cached: true once for each owner, when it has left.
  bool may_keep() VT_LOCKED { return std::exchange(may_keep_, false); }
  void keep_nothing() VT_LOCKED { may_keep_ = false; }
  // The first run of pages that the next owner can use. It begins at page 0 unless the next owner
  // has the same positions (`anywhere`).
  Interval usable(bool anywhere) const VT_LOCKED;
  // Caches `pages` for an owner with the id `next`. `dirty`: they may hold the last owner's bytes.
  void keep(Interval pages, bool dirty, std::uint64_t next) VT_LOCKED;
  // Stops caching; returns the pages that were cached.
  Interval drop() VT_LOCKED {
    unclean_ = {};
    return std::exchange(cached_, {});
  }
  // A new owner takes the cached pages. `counts`: they count as cached until its extent reaches
  // them. Returns how many pages from page 0 on are clean.
  std::size_t take(bool counts) VT_LOCKED;
  // The owner has left.
  void forget() VT_LOCKED { unclean_ = reused_ = {}; }

  // Pages below `end` are in the extent (clean_below); pages from `end` on are not ahead any more
  // (cut).
  void clean_below(std::size_t end) VT_LOCKED {
    if (unclean_.begin < end) unclean_.begin = end;
  }
  void cut(std::size_t end) VT_LOCKED { unclean_.end = std::min(unclean_.end, end); }
  // Pages up to `end` that came after unclean ones become ready with them.
  void follow(std::size_t end) VT_LOCKED;
  // The pages of `runs` have been zeroed.
  void cleaned(std::span<const Reservation::Run> runs) VT_LOCKED;

 private:
  Interval unclean_ VT_GUARDED;  // cached, or ahead of the present owner
  Interval cached_ VT_GUARDED;
  Interval reused_ VT_GUARDED;
  Reservation& range_;
  bool may_keep_ VT_GUARDED = true;
};

}  // namespace vtensor
