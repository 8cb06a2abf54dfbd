// A mirror of the kernel mappings that one host driver has made: disjoint intervals of addresses
// and what each maps, merged and split as the kernel merges and splits. It counts kernel mappings
// without a system call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "driver/driver.h"

namespace vtensor {

enum class MappingKind : std::uint8_t {
  hole,           // reserved, nothing mapped
  writable,       // shared mapping of the memfd
  copy_on_write,  // private mapping of the memfd
};

struct KernelMapping {
  Address begin;
  std::size_t bytes;
  std::uint64_t offset;  // in the memfd; 0 for holes
  MappingKind kind;

  Address end() const { return begin + bytes; }
  friend bool operator==(const KernelMapping&, const KernelMapping&) = default;
};

// Disjoint mappings in the order of their addresses: short sorted arrays in a sorted array, so that
// a change in the middle moves a few neighbours and allocates nothing. A position is good until the
// next insertion or removal.
class MappingSequence {
 public:
  struct Position {
    std::size_t leaf;
    std::size_t index;
    friend bool operator==(const Position&, const Position&) = default;
  };

  // Allocates what `n` insertions may need.
  void provide(std::size_t n);

  std::size_t size() const { return size_; }
  Position begin() const { return {0, 0}; }
  Position end() const { return {leaves_.size(), 0}; }
  Position next(Position at) const;
  Position previous(Position at) const;
  KernelMapping& operator[](Position at) { return leaves_[at.leaf][at.index]; }
  const KernelMapping& operator[](Position at) const { return leaves_[at.leaf][at.index]; }

  Position first_ending_after(Address at) const;
  // Returns where it is. Requires: `provide`, and that the order is kept.
  Position insert(Position before, const KernelMapping& mapping) noexcept;
  // Returns the next one.
  Position erase(Position at) noexcept;

 private:
  static constexpr std::size_t kLeaf = 64;
  using Leaf = std::vector<KernelMapping>;  // up to kLeaf, allocated at once

  void add_leaf(std::size_t at) noexcept;

  std::vector<Leaf> leaves_;  // none is empty
  std::vector<Leaf> spares_;  // all are empty
  std::size_t size_ = 0;
  mutable Position recent_{0, 0};  // the next look-up probably ends here or just after
};

// Not thread safe. `provide` allocates ahead, so that `assign` and `erase` cannot fail once the
// kernel has made the change.
class MappingMirror {
 public:
  MappingMirror() = default;
  MappingMirror(const MappingMirror&) = delete;
  MappingMirror& operator=(const MappingMirror&) = delete;

  // Allocates `entries` ahead. An operation takes two at most, and one at most if it starts at the
  // end of the operation before.
  void provide(std::size_t entries) { mappings_.provide(entries); }

  // Records that `mapping` was made, whatever was there before. Requires: bytes > 0, and `provide`.
  void assign(const KernelMapping& mapping) noexcept;
  // Records that nothing is left at [begin, end), not even a reservation. Requires: `provide`.
  void erase(Address begin, Address end) noexcept { carve(begin, end); }

  // Kernel mappings, at most too many: the kernel merges copy-on-write mappings that touch only if
  // their copied pages allow it, so these count one by one.
  std::size_t size() const { return mappings_.size(); }
  // How many more there would be, at most, if [begin, end) became `runs` mappings.
  std::ptrdiff_t growth(Address begin, Address end, std::size_t runs) const;

  // The mapping at an address; null if there is none.
  const KernelMapping* find(Address at) const;

 private:
  using Position = MappingSequence::Position;

  Position carve(Address begin, Address end) noexcept;

  MappingSequence mappings_;
};

}  // namespace vtensor
