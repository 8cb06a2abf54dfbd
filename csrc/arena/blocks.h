// An arena cut into an engine's blocks. A block is held or not, by its number; a released block
// gives its pages up only after the steps that may still use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/interval.h"
#include "vmm/caller.h"

namespace vtensor {

// Calls of one object must not overlap. Requires: `require` has checked the numbers.
class Blocks {
 public:
  // A part of every block, as (offset, stride, size): block n has `size` bytes at `offset + n *
  // stride`.
  using Part = std::tuple<std::size_t, std::size_t, std::size_t>;
  // Throws InvalidArgument if a part is empty, or passes the arena's `bytes`.
  Blocks(std::size_t count, std::vector<Part> parts, std::size_t bytes);

  // Blocks that are held, or wait for a step to end.
  std::size_t mapped() const { return mapped_; }

  // The blocks that kept their contents since their last release, and the blocks that lost them.
  using Held = std::pair<std::vector<std::size_t>, std::vector<std::size_t>>;
  // Holds blocks, and maps those not held yet. Returns each of `numbers` once. Whole or nothing;
  // throws as Arena::map.
  Held hold(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);
  // Releases blocks: their pages are unmapped after the steps under way. Ignores blocks not held.
  void release(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);

  // Begins a step, which may use every block that is held now or later. Steps end in the order in
  // which they began.
  void begin_step() { ++begun_; }
  // Ends the oldest step. Throws InvalidArgument if none is under way.
  void end_step(Arena& arena, const Caller& caller);

  // The bytes of blocks, [block][part].
  std::vector<Interval> bytes_of(std::span<const std::size_t> numbers) const;
  // For each block: it is mapped, with the contents of its last release.
  std::vector<char> whole(Arena& arena, std::span<const std::size_t> numbers) const;
  // Throws InvalidArgument if there is no such block.
  void require(const char* operation, std::span<const std::size_t> numbers) const;

 private:
  // A block has one use of its pages while it is held, and one for each release that waits for the
  // end of a step.
  struct Block {
    std::uint32_t uses = 0;
    std::uint64_t seen = 0;  // arena time of the last release; kHeld while held

    bool held() const { return seen == kHeld; }
  };
  static constexpr std::uint64_t kHeld = std::numeric_limits<std::uint64_t>::max();

  // For each interval of bytes_of(numbers): the time of its block's last release.
  std::vector<std::uint64_t> times_of(std::span<const std::size_t> numbers) const;
  // Whether all parts of the n-th block are whole, by the flags `parts`, [block][part].
  bool is_whole(std::span<const char> parts, std::size_t n) const;
  // Ends one use of each block.
  void unmap(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);

  const std::vector<Part> parts_;
  std::vector<Block> blocks_;
  // Releases that wait: the number of the last step that may use the blocks, and the blocks.
  std::deque<std::pair<std::uint64_t, std::vector<std::size_t>>> leaving_;
  std::size_t mapped_ = 0;
  std::uint64_t begun_ = 0, ended_ = 0;  // numbers of steps
};

}  // namespace vtensor
