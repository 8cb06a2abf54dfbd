// An arena cut into an engine's blocks: each is held or not, by its number, and gives its pages up
// only after the steps that may still use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/interval.h"
#include "vmm/caller.h"

namespace vtensor {

// Calls of one object must not overlap.
class Blocks {
 public:
  // Of each block, `size` bytes at `offset + block * stride`.
  struct Part {
    std::size_t offset, stride, size;
  };
  // Throws InvalidArgument if a block has no bytes, or some beyond the arena's `bytes`.
  Blocks(std::size_t count, std::vector<Part> parts, std::size_t bytes);

  // Blocks that are held, or wait for steps.
  std::size_t mapped() const { return mapped_; }

  // Blocks that have their contents, and those that lost them since their last release.
  struct Held {
    std::vector<std::size_t> kept, lost;
  };
  // Maps those of `numbers` that are not held, for as long as they are. Returns each of `numbers`
  // once. Whole or nothing; throws as Arena::map.
  Held hold(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);
  // Ends that, after the steps under way. What is not held stays so.
  void release(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);

  // A step that may use what is held, or was held as it began. They end in the order of their
  // beginnings.
  void begin_step() { ++begun_; }
  // Throws InvalidArgument if none is under way.
  void end_step(Arena& arena, const Caller& caller);

  // The bytes of blocks, part after part of each.
  std::vector<Interval> bytes_of(std::span<const std::size_t> numbers) const;
  // Of each block, whether it has memory, with the contents that it had at its last release.
  std::vector<char> whole(Arena& arena, std::span<const std::size_t> numbers) const;
  // Throws InvalidArgument if there is no such block.
  void require(const char* operation, std::span<const std::size_t> numbers) const;

 private:
  enum class State : std::uint8_t { free, held, leaving };

  // When the block of each of these bytes was last released.
  std::vector<std::uint64_t> times_of(std::span<const std::size_t> numbers) const;
  // Whether all parts of the n-th block are whole, by a flag of each part of each block.
  bool is_whole(std::span<const char> parts, std::size_t n) const;
  void unmap(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers);

  const std::vector<Part> parts_;
  std::vector<State> states_;
  // The arena's time at the block's last release, also of a leaving block; of a held one, never.
  std::vector<std::uint64_t> seen_;
  std::vector<std::uint64_t> until_;  // of leaving blocks: the step whose end they wait for
  // That step, and the block; those that were held again meanwhile too.
  std::deque<std::pair<std::uint64_t, std::size_t>> leaving_;
  std::size_t mapped_ = 0;
  std::uint64_t begun_ = 0, ended_ = 0;  // steps
};

}  // namespace vtensor
