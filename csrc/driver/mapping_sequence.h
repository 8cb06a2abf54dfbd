// Kernel mappings in the order of their addresses: short sorted arrays in a sorted array, so that a
// change in the middle moves a few neighbours and allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// Disjoint mappings. A position is good until the next insertion or removal.
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
  KernelMapping& operator[](Position at) { return leaves_[at.leaf]->mappings[at.index]; }
  const KernelMapping& operator[](Position at) const {
    return leaves_[at.leaf]->mappings[at.index];
  }

  Position first_ending_after(Address at) const;
  // Returns where it is. Requires: `provide`, and that the order is kept.
  Position insert(Position before, const KernelMapping& mapping) noexcept;
  // Returns the one behind it.
  Position erase(Position at) noexcept;

 private:
  static constexpr std::size_t kLeaf = 64;
  struct Leaf {
    std::size_t size = 0;
    std::array<KernelMapping, kLeaf> mappings;
  };

  std::size_t leaf_of(Address at) const;
  std::size_t add_leaf(std::size_t at) noexcept;

  std::vector<std::unique_ptr<Leaf>> leaves_;  // none is empty
  std::vector<std::unique_ptr<Leaf>> spares_;
  std::size_t size_ = 0;
  mutable Position recent_{0, 0};  // the next look-up probably ends here or just behind
};

}  // namespace vtensor
