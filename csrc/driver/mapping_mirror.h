// A mirror of the kernel mappings that one host driver has made: disjoint intervals of addresses
// with what stands behind each, merged and split as the kernel merges and splits. It says how many
// kernel mappings there are without a system call, and what a forked child must isolate.
#pragma once

#include <cstddef>

#include "driver/mapping_sequence.h"

namespace vtensor {

// Not thread safe. `provide` allocates ahead, so that `assign` and `erase` cannot fail once the
// kernel has made the change.
class MappingMirror {
 public:
  MappingMirror() = default;
  MappingMirror(const MappingMirror&) = delete;
  MappingMirror& operator=(const MappingMirror&) = delete;

  // Allocates `entries` ahead. An operation takes two at most, and one at most where it starts at
  // the end of the operation before.
  void provide(std::size_t entries);

  // Records that `mapping` was made, whatever was there before. Requires: bytes > 0, and `provide`.
  void assign(const KernelMapping& mapping) noexcept;
  // Records that nothing, not even a reservation, is at [begin, end) any more. Requires: `provide`.
  void erase(Address begin, Address end) noexcept;

  // Kernel mappings. At most too many: where copy-on-write mappings meet, the kernel merges them
  // only if their copied pages allow it, so they are counted apart.
  std::size_t size() const { return mappings_.size(); }
  // How many more there would be, at most, if [begin, end) became `runs` mappings.
  std::ptrdiff_t growth(Address begin, Address end, std::size_t runs) const;

  // What is at an address; null where nothing is.
  const KernelMapping* find(Address at) const;

  // In the order of addresses.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (auto at = mappings_.begin(); at != mappings_.end(); at = mappings_.next(at))
      visit(mappings_[at]);
  }

 private:
  using Position = MappingSequence::Position;

  Position carve(Address begin, Address end) noexcept;

  MappingSequence mappings_;
};

}  // namespace vtensor
