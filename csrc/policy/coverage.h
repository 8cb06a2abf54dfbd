// Which slots of a row some interval covers, of intervals that come and go in any number: a segment
// tree, in which each change takes the logarithm of the slots, and looking for gaps besides as long
// as these are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/interval.h"

namespace vtensor {

class Coverage {
 public:
  // Throws std::bad_alloc; nothing is changed then.
  void add(Interval slots) {
    if (slots.empty()) return;
    reach(slots.end);
    change(slots, 1);
  }
  // Requires: it was added, and not removed since.
  void remove(Interval slots) noexcept {
    if (!slots.empty()) change(slots, -1);
  }

  // Calls `visit` with each maximal part of `slots` that nothing covers, from the first on.
  template <typename Visit>
  void gaps(Interval slots, Visit visit) const {
    Interval gap{slots.begin, slots.begin};
    const auto free = [&gap, &visit](Interval more) {
      if (more.begin != gap.end) {
        if (!gap.empty()) visit(gap);
        gap.begin = more.begin;
      }
      gap.end = more.end;
    };
    if (slots_ != 0) look(1, {0, slots_}, {slots.begin, std::min(slots.end, slots_)}, free);
    if (slots.end > slots_) free({std::max(slots.begin, slots_), slots.end});
    if (!gap.empty()) visit(gap);
  }

 private:
  // Node 1 stands for all slots, nodes 2i and 2i + 1 for the halves of node i.
  struct Node {
    std::uint32_t covers : 31 = 0;  // intervals that hold all of its slots, but not of its parent's
    std::uint32_t full : 1 = 0;     // each of its slots is covered, here or below
  };

  void reach(std::size_t end) {
    if (end <= slots_) return;
    std::vector<Node> grown(2 * std::bit_ceil(end));
    // With each doubling a node comes to lie a level deeper, on the left.
    const std::size_t levels =
        slots_ == 0 ? 0 : static_cast<std::size_t>(std::countr_zero(std::bit_ceil(end) / slots_));
    for (std::size_t node = 1; node < 2 * slots_; ++node) {
      const std::size_t level_begins = std::bit_floor(node);
      grown[(level_begins << levels) + (node - level_begins)] = nodes_[node];
    }
    nodes_ = std::move(grown);
    slots_ = nodes_.size() / 2;
  }

  // The nodes that make up `slots`, from the leaves up, then what lies above their ends.
  void change(Interval slots, int by) noexcept {
    std::size_t begin = slots_ + slots.begin, end = slots_ + slots.end;
    for (; begin < end; begin /= 2, end /= 2) {
      if (begin % 2 != 0) cover(begin++, by);
      if (end % 2 != 0) cover(--end, by);
    }
    for (const std::size_t leaf : {slots_ + slots.begin, slots_ + slots.end - 1}) {
      for (std::size_t node = leaf / 2; node != 0; node /= 2) cover(node, 0);
    }
  }
  void cover(std::size_t node, int by) noexcept {
    Node& here = nodes_[node];
    here.covers = static_cast<std::uint32_t>(static_cast<int>(here.covers) + by);
    here.full =
        here.covers != 0 || (node < slots_ && nodes_[2 * node].full && nodes_[2 * node + 1].full);
  }

  template <typename Free>
  void look(std::size_t node, Interval span, Interval slots, Free& free) const {
    if (nodes_[node].full || slots.begin >= span.end || slots.end <= span.begin) return;
    if (node >= slots_) return free(span);
    const std::size_t middle = span.begin + span.size() / 2;
    look(2 * node, {span.begin, middle}, slots, free);
    look(2 * node + 1, {middle, span.end}, slots, free);
  }

  std::vector<Node> nodes_;
  std::size_t slots_ = 0;  // a power of two, or none
};

}  // namespace vtensor
