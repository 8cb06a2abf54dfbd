// A mirror of the kernel mappings that one host driver has made: an interval map from addresses to what
// stands behind them, merged and split as the kernel merges and splits. It says how many kernel mappings
// there are without a system call, and what a forked child must isolate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "driver/driver.h"

namespace vtensor {

enum class MappingKind : std::uint8_t {
  hole,      // reserved, nothing mapped
  writable,  // shared mapping of the memfd
  guarded,   // private mapping of the memfd
};

struct KernelMapping {
  std::size_t bytes;
  std::uint64_t offset;  // in the memfd; 0 for holes
  MappingKind kind;
};

// Not thread safe. `provide` allocates ahead, so that `assign` and `erase` cannot fail once the kernel
// has been told.
class MappingMirror {
 public:
  // Allocates what `operations` calls of `assign` or `erase` may need.
  void provide(std::size_t operations);

  // Records that [at, at + bytes) is now one mapping of `kind` at `offset`, whatever was there before.
  // Requires: bytes > 0, and `provide`.
  void assign(Address at, std::size_t bytes, MappingKind kind, std::uint64_t offset) noexcept;
  // Records that nothing, not even a reservation, is at [at, at + bytes) any more.
  void erase(Address at, std::size_t bytes) noexcept;

  // Kernel mappings. At most too high: where two guarded mappings meet, the kernel merges them only if
  // their parted pages allow it, and they are counted as two.
  std::size_t size() const { return mappings_.size(); }
  // How many of them [at, at + bytes) touches.
  std::size_t touching(Address at, std::size_t bytes) const;

  auto begin() const { return mappings_.begin(); }
  auto end() const { return mappings_.end(); }

 private:
  using Map = std::map<Address, KernelMapping>;

  Map::iterator carve(Address at, Address end) noexcept;
  Map::iterator insert(Map::iterator hint, Address at, const KernelMapping& mapping) noexcept;
  void remove(Map::iterator it) noexcept;

  Map mappings_;  // by first address
  std::vector<Map::node_type> spares_;
};

}  // namespace vtensor
