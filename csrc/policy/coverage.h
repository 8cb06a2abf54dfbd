// Which page indices some interval covers, while any number of intervals come and go. A segment
// tree: a change takes time by the logarithm of the indices; a search for gaps also by the gaps'
// length.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class Coverage {
 public:
  // Throws std::bad_alloc, with nothing changed.
  void add(Interval indices) {
    if (indices.empty()) return;
    reach(indices.end);
    change(indices, 1);
  }
  // Requires: `indices` was added, and not removed since.
  void remove(Interval indices) noexcept {
    if (!indices.empty()) change(indices, -1);
  }

  // Calls `visit` with each maximal part of `indices` that nothing covers, in order.
  template <typename Visit>
  void gaps(Interval indices, Visit visit) const VT_LOCKED {
    Interval gap{indices.begin, indices.begin};
    const auto free = [&gap, &visit](Interval more) VT_LOCKED {
      if (more.begin != gap.end) {
        if (!gap.empty()) visit(gap);
        gap.begin = more.begin;
      }
      gap.end = more.end;
    };
    if (indices_ != 0)
      look(1, {0, indices_}, {indices.begin, std::min(indices.end, indices_)}, free);
    if (indices.end > indices_) free({std::max(indices.begin, indices_), indices.end});
    if (!gap.empty()) visit(gap);
  }

 private:
  // Node 1 stands for all indices, nodes 2i and 2i + 1 for the halves of node i.
  struct Node {
    std::uint32_t covers : 31 = 0;  // intervals that cover the node, but not its parent
    std::uint32_t full : 1 = 0;     // every index is covered, here or below
  };

  void reach(std::size_t end) {
    if (end <= indices_) return;
    std::vector<Node> grown(2 * std::bit_ceil(end));
    // With each doubling a node moves down a level, on the left.
    const int levels = std::bit_width(grown.size()) - std::bit_width(nodes_.size());
    for (std::size_t node = 1; node < 2 * indices_; ++node) {
      const std::size_t level_begins = std::bit_floor(node);
      grown[(level_begins << levels) + (node - level_begins)] = nodes_[node];
    }
    nodes_ = std::move(grown);
    indices_ = nodes_.size() / 2;
  }

  // Changes the nodes that make up `indices`, from the leaves up, and then updates the nodes above.
  void change(Interval indices, int by) noexcept {
    std::size_t begin = indices_ + indices.begin, end = indices_ + indices.end;
    for (; begin < end; begin /= 2, end /= 2) {
      if (begin % 2 != 0) cover(begin++, by);
      if (end % 2 != 0) cover(--end, by);
    }
    for (const std::size_t leaf : {indices_ + indices.begin, indices_ + indices.end - 1}) {
      for (std::size_t node = leaf / 2; node != 0; node /= 2) cover(node, 0);
    }
  }
  void cover(std::size_t node, int by) noexcept {
    Node& here = nodes_[node];
    here.covers = static_cast<std::uint32_t>(static_cast<int>(here.covers) + by);
    here.full =
        here.covers != 0 || (node < indices_ && nodes_[2 * node].full && nodes_[2 * node + 1].full);
  }

  template <typename Free>
  void look(std::size_t node, Interval span, Interval indices, Free& free) const VT_LOCKED {
    if (nodes_[node].full || indices.begin >= span.end || indices.end <= span.begin) return;
    if (node >= indices_) return free(span);
    const std::size_t middle = span.begin + span.size() / 2;
    look(2 * node, {span.begin, middle}, indices, free);
    look(2 * node + 1, {middle, span.end}, indices, free);
  }

  std::vector<Node> nodes_;
  std::size_t indices_ = 0;  // a power of two, or none
};

}  // namespace vtensor
