#include "arena/blocks.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/align.h"
#include "base/errors.h"

namespace vtensor {

Blocks::Blocks(std::size_t count, std::vector<Part> parts, std::size_t bytes)
    : parts_(std::move(parts)) {
  if (count == 0 || parts_.empty())
    throw InvalidArgument("[Blocks] ", count, " blocks of ", parts_.size(),
                          " parts: give at least one block, of at least one part");
  for (const auto& [offset, stride, size] : parts_) {
    const std::optional<std::size_t> last = checked_multiply(count - 1, stride);
    if (size != 0 && last && *last <= bytes && offset <= bytes - *last &&
        size <= bytes - *last - offset) {
      continue;
    }
    throw InvalidArgument("[Blocks] a part of ", size, " bytes at ", offset, ", and every ", stride,
                          " bytes for ", count, " blocks, is not in the arena, which has ", bytes,
                          ": give parts of at least one byte that end in it");
  }
  blocks_.resize(count);
}

void Blocks::require(const char* operation, std::span<const std::size_t> numbers) const {
  for (const std::size_t number : numbers) {
    if (number < blocks_.size()) continue;
    throw InvalidArgument("[", operation, "] there is no block ", number,
                          ": blocks are numbered from 0 to ", blocks_.size() - 1);
  }
}

std::vector<Interval> Blocks::bytes_of(std::span<const std::size_t> numbers) const {
  std::vector<Interval> bytes;
  bytes.reserve(numbers.size() * parts_.size());
  for (const std::size_t number : numbers) {
    for (const auto& [offset, stride, size] : parts_) {
      const std::size_t begin = offset + number * stride;
      bytes.push_back({begin, begin + size});
    }
  }
  return bytes;
}

std::vector<std::uint64_t> Blocks::times_of(std::span<const std::size_t> numbers) const {
  std::vector<std::uint64_t> times;
  times.reserve(numbers.size() * parts_.size());
  for (const std::size_t number : numbers)
    times.insert(times.end(), parts_.size(), blocks_[number].seen);
  return times;
}

bool Blocks::is_whole(std::span<const char> parts, std::size_t n) const {
  const std::span<const char> own = parts.subspan(n * parts_.size(), parts_.size());
  return std::all_of(own.begin(), own.end(), [](char whole) { return whole != 0; });
}

std::vector<char> Blocks::whole(Arena& arena, std::span<const std::size_t> numbers) const {
  const std::vector<char> parts = arena.holds(bytes_of(numbers), times_of(numbers));
  std::vector<char> whole(numbers.size());
  for (std::size_t n = 0; n < whole.size(); ++n) whole[n] = is_whole(parts, n);
  return whole;
}

Blocks::Held Blocks::hold(Arena& arena, const Caller& caller,
                          std::span<const std::size_t> numbers) {
  std::vector<std::size_t> named, added;  // a block may be named twice
  std::unordered_set<std::size_t> seen;
  for (const std::size_t number : numbers) {
    if (!seen.insert(number).second) continue;
    named.push_back(number);
    if (!blocks_[number].held()) added.push_back(number);
  }
  std::vector<std::size_t> kept, lost;
  kept.reserve(named.size());
  lost.reserve(named.size());
  std::vector<char> whole;
  if (!added.empty()) whole = arena.map(caller, bytes_of(added), times_of(added));
  // From here on nothing is refused.
  std::size_t n = 0;
  for (const std::size_t number : named) {
    Block& block = blocks_[number];
    const bool has_contents = block.held() || is_whole(whole, n++);
    (has_contents ? kept : lost).push_back(number);
    if (block.held()) continue;
    block.seen = kHeld;
    if (block.uses++ == 0) ++mapped_;
  }
  return {std::move(kept), std::move(lost)};
}

void Blocks::release(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers) {
  const std::uint64_t now = arena.now();  // a page that arrives later has a later time
  std::vector<std::size_t> released(numbers.begin(), numbers.end());
  std::erase_if(released, [this](std::size_t number) { return !blocks_[number].held(); });
  std::sort(released.begin(), released.end());
  released.erase(std::unique(released.begin(), released.end()), released.end());
  if (begun_ == ended_) {
    unmap(arena, caller, released);
  } else {
    leaving_.emplace_back(begun_, released);
  }
  // From here on nothing is refused.
  for (const std::size_t number : released) blocks_[number].seen = now;
}

void Blocks::end_step(Arena& arena, const Caller& caller) {
  if (begun_ == ended_) {
    throw InvalidArgument("[", caller.operation,
                          "] no step is under way: call begin_step() once for each");
  }
  std::vector<std::size_t> over;
  auto waiting = leaving_.begin();
  for (; waiting != leaving_.end() && waiting->first <= ended_ + 1; ++waiting)
    over.insert(over.end(), waiting->second.begin(), waiting->second.end());
  unmap(arena, caller, over);
  leaving_.erase(leaving_.begin(), waiting);
  ++ended_;
}

void Blocks::unmap(Arena& arena, const Caller& caller, std::span<const std::size_t> numbers) {
  if (!numbers.empty()) arena.unmap(caller, bytes_of(numbers));
  for (const std::size_t number : numbers) mapped_ -= --blocks_[number].uses == 0;
}

}  // namespace vtensor
