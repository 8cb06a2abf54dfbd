#include "driver/mapping_mirror.h"

#include <iterator>
#include <utility>

namespace vtensor {
namespace {

// An assign strictly inside one mapping leaves three where there was one.
constexpr std::size_t kNodesPerOperation = 2;
constexpr std::size_t kSparesKept = 1024;

// Whether the kernel makes one mapping of `b`, which starts where `a` ends, and `a`.
bool merges(const KernelMapping& a, const KernelMapping& b) {
  if (a.kind != b.kind) return false;
  if (a.kind == MappingKind::hole) return true;
  return a.kind == MappingKind::writable && a.offset + a.bytes == b.offset;
}

// The part of `mapping` that starts `skip` bytes into it.
KernelMapping rest_of(const KernelMapping& mapping, std::size_t skip) {
  const bool hole = mapping.kind == MappingKind::hole;
  return {mapping.bytes - skip, hole ? 0 : mapping.offset + skip, mapping.kind};
}

}  // namespace

void MappingMirror::provide(std::size_t operations) {
  const std::size_t needed = operations * kNodesPerOperation;
  if (spares_.size() >= needed) return;
  spares_.reserve(needed);
  Map maker;
  while (spares_.size() < needed) {
    maker.emplace(0, KernelMapping{});
    spares_.push_back(maker.extract(maker.begin()));
  }
}

void MappingMirror::assign(Address at, std::size_t bytes, MappingKind kind,
                           std::uint64_t offset) noexcept {
  KernelMapping merged{bytes, offset, kind};
  const auto after = carve(at, at + bytes);
  if (after != mappings_.end() && after->first == at + bytes && merges(merged, after->second)) {
    merged.bytes += after->second.bytes;
    // The node moves down in place of an insertion and a removal.
    const auto next = std::next(after);
    auto node = mappings_.extract(after);
    node.key() = at;
    node.mapped() = merged;
    const auto it = mappings_.insert(next, std::move(node));
    if (it == mappings_.begin()) return;
    const auto before = std::prev(it);
    if (before->first + before->second.bytes != at || !merges(before->second, merged)) return;
    before->second.bytes += merged.bytes;
    remove(it);
    return;
  }
  if (after != mappings_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes == at && merges(before->second, merged)) {
      before->second.bytes += bytes;
      return;
    }
  }
  insert(after, at, merged);
}

void MappingMirror::erase(Address at, std::size_t bytes) noexcept { carve(at, at + bytes); }

std::size_t MappingMirror::touching(Address at, std::size_t bytes) const {
  auto it = mappings_.upper_bound(at);
  if (it != mappings_.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second.bytes > at) it = before;
  }
  std::size_t count = 0;
  for (; it != mappings_.end() && it->first < at + bytes; ++it) ++count;
  return count;
}

// Clears [at, end), splitting what reaches over its edges. Returns the first mapping at or after `end`.
MappingMirror::Map::iterator MappingMirror::carve(Address at, Address end) noexcept {
  auto it = mappings_.lower_bound(at);
  if (it != mappings_.begin()) {
    const auto before = std::prev(it);
    KernelMapping& mapping = before->second;
    if (before->first + mapping.bytes > at) {
      const std::size_t kept = at - before->first;
      it = insert(it, at, rest_of(mapping, kept));
      mapping.bytes = kept;
    }
  }
  while (it != mappings_.end() && it->first < end) {
    const auto next = std::next(it);
    if (it->first + it->second.bytes > end) {
      const KernelMapping rest = rest_of(it->second, end - it->first);
      auto node = mappings_.extract(it);
      node.key() = end;
      node.mapped() = rest;
      return mappings_.insert(next, std::move(node));
    }
    remove(it);
    it = next;
  }
  return it;
}

MappingMirror::Map::iterator MappingMirror::insert(Map::iterator hint, Address at,
                                                   const KernelMapping& mapping) noexcept {
  auto node = std::move(spares_.back());
  spares_.pop_back();
  node.key() = at;
  node.mapped() = mapping;
  return mappings_.insert(hint, std::move(node));
}

void MappingMirror::remove(Map::iterator it) noexcept {
  auto node = mappings_.extract(it);
  if (spares_.size() < spares_.capacity() && spares_.size() < kSparesKept) {
    spares_.push_back(std::move(node));
  }
}

}  // namespace vtensor
