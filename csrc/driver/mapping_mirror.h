// A mirror of the kernel mappings that one host driver has made: disjoint intervals of addresses
// with what stands behind each, merged and split as the kernel merges and splits. It says how many
// kernel mappings there are without a system call, and what a forked child must isolate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <set>
#include <vector>

#include "driver/driver.h"

namespace vtensor {

enum class MappingKind : std::uint8_t {
  hole,      // reserved, nothing mapped
  writable,  // shared mapping of the memfd
  guarded,   // private mapping of the memfd
};

struct KernelMapping {
  Address begin;
  std::size_t bytes;
  std::uint64_t offset;  // in the memfd; 0 for holes
  MappingKind kind;

  Address end() const { return begin + bytes; }
  friend bool operator==(const KernelMapping&, const KernelMapping&) = default;
};

// Not thread safe. `provide` allocates ahead, so that `assign` and `erase` cannot fail once the
// kernel has been told.
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

  // Kernel mappings. At most too many: where guarded mappings meet, the kernel merges them only if
  // their parted pages allow it, so they are counted apart.
  std::size_t size() const { return mappings_.size(); }
  // How many more there would be, at most, if [begin, end) became `runs` mappings.
  std::ptrdiff_t growth(Address begin, Address end, std::size_t runs) const;

  // In the order of addresses.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Entry& entry : mappings_) visit(entry.mapping);
  }

 private:
  // Bounds move in place where that keeps the order, which spares the tree a removal and an
  // insertion.
  struct Entry {
    mutable KernelMapping mapping;
  };
  struct ByAddress {
    using is_transparent = void;
    bool operator()(const Entry& a, const Entry& b) const {
      return a.mapping.begin < b.mapping.begin;
    }
    bool operator()(Address a, const Entry& b) const { return a < b.mapping.begin; }
    bool operator()(const Entry& a, Address b) const { return a.mapping.begin < b; }
  };
  using Set = std::pmr::set<Entry, ByAddress>;

  Set::iterator first_ending_after(Address at) const;
  Set::iterator carve(Address begin, Address end) noexcept;
  Set::iterator insert(Set::iterator hint, const KernelMapping& mapping) noexcept;
  Set::iterator remove(Set::iterator it) noexcept;

  std::pmr::unsynchronized_pool_resource nodes_;  // many small nodes, made in bulk
  Set mappings_{&nodes_};
  Set::iterator recent_ = mappings_.end();  // where the next operation probably is
  std::vector<Set::node_type> spares_;
};

}  // namespace vtensor
