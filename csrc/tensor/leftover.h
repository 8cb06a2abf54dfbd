// What a buffer's last owner left mapped. It is cached until the buffer has another owner, which
// then finds it ahead of its extent; what may still show the last owner's bytes is zeroed first.
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
  // Those that the present owner found and counts as cached until it needs them.
  Interval reused() const VT_LOCKED { return reused_; }

  // Whether something may be cached: true once for each owner, when it has left.
  bool may_keep() VT_LOCKED { return std::exchange(may_keep_, false); }
  void keep_nothing() VT_LOCKED { may_keep_ = false; }
  // The pages that the next owner could use: from the first one on, or if the next owner has the
  // same positions (`anywhere`) the first that there are.
  Interval usable(bool anywhere) const VT_LOCKED;
  // Caches `pages`, which may be `dirty`, for an owner that is to have the id `next`.
  void keep(Interval pages, bool dirty, std::uint64_t next) VT_LOCKED;
  // Caches nothing any more; returns what was cached.
  Interval drop() VT_LOCKED {
    unclean_ = {};
    return std::exchange(cached_, {});
  }
  // A new owner takes what is cached; `counts`: as cached until it needs them. Returns how many
  // pages from the first on are clean.
  std::size_t take(bool counts) VT_LOCKED;
  // The owner has left.
  void forget() VT_LOCKED { unclean_ = reused_ = {}; }

  // Pages below `end` are the owner's; pages from there on are no longer ahead of it.
  void clean_below(std::size_t end) VT_LOCKED {
    if (unclean_.begin < end) unclean_.begin = end;
  }
  void cut(std::size_t end) VT_LOCKED { unclean_.end = std::min(unclean_.end, end); }
  // Pages up to `end` that came behind unclean ones, and wait for these.
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
