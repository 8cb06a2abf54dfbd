// What slots share with the requests before them: pages that the prefix index keeps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv/prefix_index.h"
#include "kv/slot_buffers.h"
#include "vmm/caller.h"

namespace vtensor {

class SlotPrefixes {
 public:
  explicit SlotPrefixes(SlotBuffers& buffers)
      : buffers_(buffers),
        index_(buffers.unit()),
        slots_(buffers.shape().slots),
        expects_(buffers.shape().slots) {}

  PrefixIndex& index() { return index_; }
  const PrefixIndex& index() const { return index_; }

  // What the index has of a request's tokens, but never all of them.
  struct Found {
    std::vector<Prefix> parts;
    std::size_t length;  // positions that lie wholly in these
  };
  Found find(std::span<const Token> tokens, const std::string& salt);
  // Counts a request that asked for `asked` tokens and found `found`.
  void count(std::size_t asked, std::size_t found) {
    queries_ += asked;
    hits_ += found;
  }
  std::size_t queries() const { return queries_; }
  std::size_t hits() const { return hits_; }

  // A slot begins with these tokens. `expected`: their pages may not be mapped yet.
  void begin(std::size_t slot, std::vector<Token> tokens, bool expected) {
    slots_[slot] = {std::move(tokens), 0};
    expects_[slot] = expected;
  }
  void end(std::size_t slot) noexcept {
    slots_[slot] = {};
    expects_[slot] = false;
  }
  void truncate(std::size_t slot, std::size_t length) {
    slots_[slot].tokens.resize(std::min(slots_[slot].tokens.size(), length));
  }
  // Those that the index knows the slot by, from position 0 on.
  const std::vector<Token>& tokens(std::size_t slot) const { return slots_[slot].tokens; }

  // Whether pages that the slot begins with may not be mapped yet. `finish` maps them.
  bool expects(std::size_t slot) const { return expects_[slot] != 0; }
  void finish(const Caller& caller, std::size_t slot);

  // Units of the tokens that the index knows, before a slot of `length` publishes the others.
  // Throws InvalidArgument if the tokens are not the slot's first, or if it has given back pages
  // that would be published.
  std::size_t known(const Caller& caller, std::size_t slot, std::size_t length,
                    std::span<const Token> tokens, const std::string& salt) const;
  // Puts the whole units of the tokens behind the first `known` into the index. Returns how many
  // tokens it has of them.
  std::size_t publish(const Caller& caller, std::size_t slot, std::span<const Token> tokens,
                      const std::string& salt, std::size_t known);
  // To be called before something may write to positions from `begin` on.
  void protect(const Caller& caller, std::size_t slot, std::size_t begin);

 private:
  struct Slot {
    std::vector<Token> tokens;
    // Positions from here on lie in no page that the index has and that may still be writable.
    std::size_t offered = 0;
  };

  std::size_t covered(std::size_t position) const;
  std::vector<Prefix> offer(const Caller& caller, std::size_t slot, std::size_t first,
                            std::size_t end);

  SlotBuffers& buffers_;
  PrefixIndex index_;
  std::vector<Slot> slots_;
  std::vector<std::uint8_t> expects_;   // whether each slot does; a step asks all that it grows
  std::size_t queries_ = 0, hits_ = 0;  // tokens
};

}  // namespace vtensor
