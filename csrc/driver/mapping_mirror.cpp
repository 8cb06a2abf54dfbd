#include "driver/mapping_mirror.h"

#include <algorithm>
#include <utility>

namespace vtensor {
namespace {

constexpr std::size_t kSparesKept = 64;

// Whether the kernel makes one mapping of `a` and `b`.
bool merge(const KernelMapping& a, const KernelMapping& b) {
  if (a.kind != b.kind || a.end() != b.begin) return false;
  if (a.kind == MappingKind::hole) return true;
  return a.kind == MappingKind::writable && a.offset + a.bytes == b.offset;
}

// What is left of `mapping` from `begin` on.
KernelMapping rest_of(const KernelMapping& mapping, Address begin) {
  const std::size_t skip = begin - mapping.begin;
  const bool hole = mapping.kind == MappingKind::hole;
  return {begin, mapping.bytes - skip, hole ? 0 : mapping.offset + skip, mapping.kind};
}

}  // namespace

void MappingSequence::provide(std::size_t n) {
  // Each leaf may be split once, and its halves not before they are full again.
  const std::size_t splits = std::min(n, leaves_.size()) + n / (kLeaf / 2) + 2;
  if (spares_.size() >= splits && leaves_.capacity() - leaves_.size() >= splits) return;
  leaves_.reserve(leaves_.size() + splits);
  spares_.reserve(std::max(splits, kSparesKept));
  while (spares_.size() < splits) {
    Leaf spare;
    spare.reserve(kLeaf);
    spares_.push_back(std::move(spare));
  }
}

MappingSequence::Position MappingSequence::next(Position at) const {
  return at.index + 1 < leaves_[at.leaf].size() ? Position{at.leaf, at.index + 1}
                                                : Position{at.leaf + 1, 0};
}

MappingSequence::Position MappingSequence::previous(Position at) const {
  return at.index != 0 ? Position{at.leaf, at.index - 1}
                       : Position{at.leaf - 1, leaves_[at.leaf - 1].size() - 1};
}

MappingSequence::Position MappingSequence::first_ending_after(Address at) const {
  if (leaves_.empty()) return end();
  if (recent_.leaf < leaves_.size() && recent_.index < leaves_[recent_.leaf].size() &&
      (*this)[recent_].begin <= at) {
    if (at < (*this)[recent_].end()) return recent_;
    const Position after = next(recent_);
    if (after == end() || at < (*this)[after].end()) return after;
  }
  // The last mapping that begins at or before `at`, or the one after it.
  const auto leaf = std::partition_point(leaves_.begin(), leaves_.end(), [at](const Leaf& other) {
    return other.front().begin <= at;
  });
  if (leaf == leaves_.begin()) return begin();
  const Leaf& in = *(leaf - 1);
  const auto after = std::partition_point(
      in.begin(), in.end(), [at](const KernelMapping& mapping) { return mapping.begin <= at; });
  recent_ = {static_cast<std::size_t>(leaf - leaves_.begin()) - 1,
             static_cast<std::size_t>(after - in.begin()) - 1};
  return at < (*this)[recent_].end() ? recent_ : next(recent_);
}

void MappingSequence::add_leaf(std::size_t at) noexcept {
  leaves_.insert(leaves_.begin() + at, std::move(spares_.back()));
  spares_.pop_back();
}

MappingSequence::Position MappingSequence::insert(Position before,
                                                  const KernelMapping& mapping) noexcept {
  // At the end of a leaf rather than at the start of the next, if there is room or no next.
  if (before.index == 0 && before.leaf != 0 &&
      (before.leaf == leaves_.size() || leaves_[before.leaf - 1].size() < kLeaf)) {
    before = {before.leaf - 1, leaves_[before.leaf - 1].size()};
  }
  if (leaves_.empty()) add_leaf(0);
  if (leaves_[before.leaf].size() == kLeaf) {
    add_leaf(before.leaf + 1);
    Leaf& full = leaves_[before.leaf];
    // Growth in order fills leaf after leaf; any other halves them.
    const std::size_t kept = before.index == kLeaf ? kLeaf : kLeaf / 2;
    leaves_[before.leaf + 1].assign(full.begin() + kept, full.end());
    full.erase(full.begin() + kept, full.end());
    if (before.index >= kept) before = {before.leaf + 1, before.index - kept};
  }
  Leaf& leaf = leaves_[before.leaf];
  leaf.insert(leaf.begin() + before.index, mapping);
  ++size_;
  return recent_ = before;
}

MappingSequence::Position MappingSequence::erase(Position at) noexcept {
  Leaf& leaf = leaves_[at.leaf];
  leaf.erase(leaf.begin() + at.index);
  --size_;
  recent_ = at.index != 0 ? Position{at.leaf, at.index - 1} : at;
  if (leaf.empty()) {
    if (spares_.size() < spares_.capacity()) spares_.push_back(std::move(leaf));
    leaves_.erase(leaves_.begin() + at.leaf);
    return {at.leaf, 0};
  }
  return at.index < leaf.size() ? at : Position{at.leaf + 1, 0};
}

void MappingMirror::assign(const KernelMapping& mapping) noexcept {
  const Position after = carve(mapping.begin, mapping.end());
  const bool merges_after = after != mappings_.end() && merge(mapping, mappings_[after]);
  if (after != mappings_.begin()) {
    KernelMapping& before = mappings_[mappings_.previous(after)];
    if (merge(before, mapping)) {
      before.bytes += mapping.bytes;
      if (merges_after) {
        before.bytes += mappings_[after].bytes;
        mappings_.erase(after);
      }
      return;
    }
  }
  if (merges_after) {
    mappings_[after] = {mapping.begin, mapping.bytes + mappings_[after].bytes, mapping.offset,
                        mapping.kind};
  } else {
    mappings_.insert(after, mapping);
  }
}

std::ptrdiff_t MappingMirror::growth(Address begin, Address end, std::size_t runs) const {
  auto more = static_cast<std::ptrdiff_t>(runs);
  for (Position at = mappings_.first_ending_after(begin);
       at != mappings_.end() && mappings_[at].begin < end; at = mappings_.next(at)) {
    --more;
    more += mappings_[at].begin < begin;  // the rests of mappings that are cut stay
    more += mappings_[at].end() > end;
  }
  return more;
}

const KernelMapping* MappingMirror::find(Address at) const {
  const Position position = mappings_.first_ending_after(at);
  if (position == mappings_.end() || mappings_[position].begin > at) return nullptr;
  return &mappings_[position];
}

// Clears [begin, end) and cuts what reaches over its edges. Returns the first mapping after it.
MappingMirror::Position MappingMirror::carve(Address begin, Address end) noexcept {
  Position at = mappings_.first_ending_after(begin);
  if (at != mappings_.end() && mappings_[at].begin < begin) {
    const KernelMapping whole = mappings_[at];
    mappings_[at].bytes = begin - whole.begin;
    at = mappings_.next(at);
    if (whole.end() > end) return mappings_.insert(at, rest_of(whole, end));
  }
  while (at != mappings_.end() && mappings_[at].begin < end) {
    if (mappings_[at].end() > end) {
      mappings_[at] = rest_of(mappings_[at], end);
      return at;
    }
    at = mappings_.erase(at);
  }
  return at;
}

}  // namespace vtensor
