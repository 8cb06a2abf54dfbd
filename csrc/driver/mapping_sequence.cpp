#include "driver/mapping_sequence.h"

#include <algorithm>
#include <utility>

namespace vtensor {

namespace {
constexpr std::size_t kSparesKept = 64;
}  // namespace

void MappingSequence::provide(std::size_t n) {
  // Each leaf that is there may be split once, and its halves not before they are full again.
  const std::size_t splits = std::min(n, leaves_.size()) + n / (kLeaf / 2) + 2;
  if (spares_.size() >= splits && leaves_.capacity() - leaves_.size() >= splits) return;
  leaves_.reserve(leaves_.size() + splits);
  spares_.reserve(std::max(splits, kSparesKept));
  while (spares_.size() < splits) spares_.push_back(std::make_unique<Leaf>());
}

MappingSequence::Position MappingSequence::next(Position at) const {
  return at.index + 1 < leaves_[at.leaf]->size ? Position{at.leaf, at.index + 1}
                                               : Position{at.leaf + 1, 0};
}

MappingSequence::Position MappingSequence::previous(Position at) const {
  return at.index != 0 ? Position{at.leaf, at.index - 1}
                       : Position{at.leaf - 1, leaves_[at.leaf - 1]->size - 1};
}

// The last leaf that begins at or before `at`, else the first.
std::size_t MappingSequence::leaf_of(Address at) const {
  const auto behind = std::partition_point(leaves_.begin(), leaves_.end(), [&](const auto& leaf) {
    return leaf->mappings[0].begin <= at;
  });
  return behind == leaves_.begin() ? 0 : static_cast<std::size_t>(behind - leaves_.begin()) - 1;
}

MappingSequence::Position MappingSequence::first_ending_after(Address at) const {
  if (leaves_.empty()) return end();
  if (recent_.leaf < leaves_.size() && recent_.index < leaves_[recent_.leaf]->size &&
      (*this)[recent_].begin <= at) {
    if (at < (*this)[recent_].end()) return recent_;
    const Position behind = next(recent_);
    if (behind == end() || at < (*this)[behind].end()) return behind;
  }
  const std::size_t number = leaf_of(at);
  const Leaf& leaf = *leaves_[number];
  const auto first = leaf.mappings.begin();
  const auto behind =
      std::partition_point(first, first + static_cast<std::ptrdiff_t>(leaf.size),
                           [at](const KernelMapping& mapping) { return mapping.begin <= at; });
  if (behind == first) return {number, 0};
  recent_ = {number, static_cast<std::size_t>(behind - first) - 1};
  return at < (*this)[recent_].end() ? recent_ : next(recent_);
}

std::size_t MappingSequence::add_leaf(std::size_t at) noexcept {
  spares_.back()->size = 0;
  leaves_.insert(leaves_.begin() + static_cast<std::ptrdiff_t>(at), std::move(spares_.back()));
  spares_.pop_back();
  return at;
}

MappingSequence::Position MappingSequence::insert(Position before,
                                                  const KernelMapping& mapping) noexcept {
  // At the end of a leaf rather than at the start of the next one, if there is room, or no next
  // one.
  if (before.index == 0 && before.leaf != 0 &&
      (before.leaf == leaves_.size() || leaves_[before.leaf - 1]->size < kLeaf)) {
    before = {before.leaf - 1, leaves_[before.leaf - 1]->size};
  }
  if (leaves_.empty()) add_leaf(0);
  if (leaves_[before.leaf]->size == kLeaf) {
    Leaf& full = *leaves_[before.leaf];
    Leaf& rest = *leaves_[add_leaf(before.leaf + 1)];
    // Growth in order fills leaf after leaf; anything else halves them.
    const std::size_t kept = before.index == kLeaf ? kLeaf : kLeaf / 2;
    std::copy(full.mappings.begin() + static_cast<std::ptrdiff_t>(kept), full.mappings.end(),
              rest.mappings.begin());
    rest.size = kLeaf - kept;
    full.size = kept;
    if (before.index >= kept) before = {before.leaf + 1, before.index - kept};
  }
  Leaf& leaf = *leaves_[before.leaf];
  const auto at = leaf.mappings.begin() + static_cast<std::ptrdiff_t>(before.index);
  const auto end = leaf.mappings.begin() + static_cast<std::ptrdiff_t>(leaf.size);
  std::copy_backward(at, end, end + 1);
  *at = mapping;
  ++leaf.size;
  ++size_;
  recent_ = before;
  return before;
}

MappingSequence::Position MappingSequence::erase(Position at) noexcept {
  Leaf& leaf = *leaves_[at.leaf];
  const auto first = leaf.mappings.begin() + static_cast<std::ptrdiff_t>(at.index);
  std::copy(first + 1, leaf.mappings.begin() + static_cast<std::ptrdiff_t>(leaf.size), first);
  --leaf.size;
  --size_;
  recent_ = at.index != 0 ? Position{at.leaf, at.index - 1} : at;
  if (leaf.size == 0) {
    if (spares_.size() < spares_.capacity()) spares_.push_back(std::move(leaves_[at.leaf]));
    leaves_.erase(leaves_.begin() + static_cast<std::ptrdiff_t>(at.leaf));
    return {at.leaf, 0};
  }
  return at.index < leaf.size ? at : Position{at.leaf + 1, 0};
}

}  // namespace vtensor
