#include "driver/mapping_mirror.h"

namespace vtensor {
namespace {

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

void MappingMirror::provide(std::size_t entries) { mappings_.provide(entries); }

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
    KernelMapping& behind = mappings_[after];
    behind = {mapping.begin, mapping.bytes + behind.bytes, mapping.offset, mapping.kind};
  } else {
    mappings_.insert(after, mapping);
  }
}

void MappingMirror::erase(Address begin, Address end) noexcept { carve(begin, end); }

std::ptrdiff_t MappingMirror::growth(Address begin, Address end, std::size_t runs) const {
  auto more = static_cast<std::ptrdiff_t>(runs);
  for (Position at = mappings_.first_ending_after(begin);
       at != mappings_.end() && mappings_[at].begin < end; at = mappings_.next(at)) {
    --more;
    more += mappings_[at].begin < begin;  // what is cut stays, on either side
    more += mappings_[at].end() > end;
  }
  return more;
}

const KernelMapping* MappingMirror::find(Address at) const {
  const Position position = mappings_.first_ending_after(at);
  if (position == mappings_.end() || mappings_[position].begin > at) return nullptr;
  return &mappings_[position];
}

// Clears [begin, end), cutting what reaches over its edges. Returns the first mapping behind it.
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
