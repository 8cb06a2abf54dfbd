#include "driver/mapping_mirror.h"

#include <iterator>
#include <utility>

namespace vtensor {
namespace {

constexpr std::size_t kSparesKept = 1024;

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

void MappingMirror::provide(std::size_t entries) {
  if (spares_.size() >= entries) return;
  spares_.reserve(entries);
  Set maker(&nodes_);
  while (spares_.size() < entries) spares_.push_back(maker.extract(maker.emplace().first));
}

void MappingMirror::assign(const KernelMapping& mapping) noexcept {
  const auto after = carve(mapping.begin, mapping.end());
  const bool merges_after = after != mappings_.end() && merge(mapping, after->mapping);
  if (after != mappings_.begin()) {
    const auto before = std::prev(after);
    if (merge(before->mapping, mapping)) {
      before->mapping.bytes += mapping.bytes;
      if (merges_after) {
        before->mapping.bytes += after->mapping.bytes;
        remove(after);
      }
      recent_ = before;
      return;
    }
  }
  if (merges_after) {
    after->mapping = {mapping.begin, mapping.bytes + after->mapping.bytes, mapping.offset,
                      mapping.kind};
    recent_ = after;
  } else {
    recent_ = insert(after, mapping);
  }
}

void MappingMirror::erase(Address begin, Address end) noexcept { recent_ = carve(begin, end); }

std::ptrdiff_t MappingMirror::growth(Address begin, Address end, std::size_t runs) const {
  auto more = static_cast<std::ptrdiff_t>(runs);
  for (auto it = first_ending_after(begin); it != mappings_.end() && it->mapping.begin < end;
       ++it) {
    --more;
    more += it->mapping.begin < begin;  // what is cut stays, on either side
    more += it->mapping.end() > end;
  }
  return more;
}

MappingMirror::Set::iterator MappingMirror::first_ending_after(Address at) const {
  if (recent_ != mappings_.end() && recent_->mapping.begin <= at) {
    if (at < recent_->mapping.end()) return recent_;
    const auto next = std::next(recent_);
    if (next == mappings_.end() || at < next->mapping.end()) return next;
  }
  const auto it = mappings_.upper_bound(at);
  if (it == mappings_.begin()) return it;
  const auto before = std::prev(it);
  return at < before->mapping.end() ? before : it;
}

// Clears [begin, end), cutting what reaches over its edges. Returns the first mapping behind it.
MappingMirror::Set::iterator MappingMirror::carve(Address begin, Address end) noexcept {
  auto it = first_ending_after(begin);
  if (it != mappings_.end() && it->mapping.begin < begin) {
    const KernelMapping whole = it->mapping;
    it->mapping.bytes = begin - whole.begin;
    ++it;
    if (whole.end() > end) return insert(it, rest_of(whole, end));
  }
  while (it != mappings_.end() && it->mapping.begin < end) {
    if (it->mapping.end() > end) {
      it->mapping = rest_of(it->mapping, end);
      return it;
    }
    it = remove(it);
  }
  return it;
}

MappingMirror::Set::iterator MappingMirror::insert(Set::iterator hint,
                                                   const KernelMapping& mapping) noexcept {
  spares_.back().value().mapping = mapping;
  const auto inserted = mappings_.insert(hint, std::move(spares_.back()));
  spares_.pop_back();
  return inserted;
}

// Returns the mapping behind it.
MappingMirror::Set::iterator MappingMirror::remove(Set::iterator it) noexcept {
  const auto next = std::next(it);
  auto node = mappings_.extract(it);
  if (spares_.size() < spares_.capacity() && spares_.size() < kSparesKept) {
    spares_.push_back(std::move(node));
  }
  return next;
}

}  // namespace vtensor
