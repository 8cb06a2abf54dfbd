// The pages past a buffer's extent that are ready or wanted ready, and when it is to want more.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/interval.h"
#include "policy/look_ahead.h"
#include "policy/page_pool.h"
#include "tensor/row_geometry.h"
#include "vmm/reservation.h"
#include "vmm/row_shape.h"

namespace vtensor {

class Ahead {
 public:
  Ahead(PagePool& pool, const Reservation& range, const RowShape& shape,
        const RowGeometry& geometry)
      : pool_(pool), range_(range), shape_(shape), geometry_(geometry) {}

  // Page indices below it are in the extent, or mapped, clean and writable in every row.
  std::size_t ready_end() const VT_LOCKED { return ready_end_; }
  // Positions below it lie in pages below ready_end.
  std::size_t ready_until() const VT_LOCKED { return ready_until_; }
  void set_ready(std::size_t end) VT_LOCKED {
    ready_end_ = end;
    ready_until_ = geometry_.whole_below(end);
  }
  // Page indices from ready_end to here are to be made ready; 0 if none are.
  std::size_t want_end() const VT_LOCKED { return want_end_; }
  void want(std::size_t end) VT_LOCKED { want_end_ = std::max(want_end_, end); }
  void want_nothing() VT_LOCKED { want_end_ = 0; }

  // A call added `n` positions, up to `position`; it `crossed` into new pages.
  void grew(std::size_t n, std::size_t position, bool crossed) VT_LOCKED {
    pace_.step(n);
    if (crossed && pool_.looks_ahead()) mark_pace(position);
  }
  // The position to look ahead to, for a length of `position` in pages at `extent`.
  std::size_t lead(std::size_t position, Interval extent) const VT_LOCKED;
  // That position if it is time to ask for more, before the ready pages are used up; else 0.
  std::size_t due(std::size_t position, Interval extent) const VT_LOCKED;
  void forget_pace() VT_LOCKED { pace_ = {}; }

 private:
  void mark_pace(std::size_t position) VT_LOCKED;

  std::size_t ready_end_ VT_GUARDED = 0;    // not less than the extent's end
  std::size_t ready_until_ VT_GUARDED = 0;  // derived from ready_end_
  std::size_t want_end_ VT_GUARDED = 0;
  LookAhead pace_ VT_GUARDED;
  PagePool& pool_;
  const Reservation& range_;
  const RowShape& shape_;
  const RowGeometry& geometry_;
};

}  // namespace vtensor
