// The pages that slots share with earlier requests, through the prefix index.
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

  // The pages that the index has for the first tokens of a request: never for all of them, since
  // the last token must be computed.
  struct Found {
    std::vector<Prefix> parts;
    std::size_t length;  // positions that lie wholly in these pages
  };
  Found find(std::span<const Token> tokens, const std::string& salt);
  // Counts a request of `asked` tokens of which the index had `found`.
  void count(std::size_t asked, std::size_t found) {
    queries_ += asked;
    hits_ += found;
  }
  std::size_t queries() const { return queries_; }
  std::size_t hits() const { return hits_; }

  // A slot begins with these tokens. `expected`: the mapper, or `finish`, is to map their pages.
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
  // The slot's tokens as the index knows them, from position 0 on.
  const std::vector<Token>& tokens(std::size_t slot) const { return slots_[slot].tokens; }

  // Whether the slot's first pages may not be mapped yet. `finish` maps them.
  bool expects(std::size_t slot) const { return expects_[slot] != 0; }
  void finish(const Caller& caller, std::size_t slot);

  // How many units of `tokens` the index has, asked before a slot of `length` publishes the rest.
  // Throws InvalidArgument if the tokens are not the slot's first, or if it has given back pages
  // that would be published.
  std::size_t known(const Caller& caller, std::size_t slot, std::size_t length,
                    std::span<const Token> tokens, const std::string& salt) const;
  // Adds the whole units of `tokens` after the first `known` to the index. Returns how many of the
  // tokens it then has.
  std::size_t publish(const Caller& caller, std::size_t slot, std::span<const Token> tokens,
                      const std::string& salt, std::size_t known);
  // Makes pages copy-on-write that the index was offered and that hold positions from `begin` on.
  // Requires: called before anything writes there.
  void protect(const Caller& caller, std::size_t slot, std::size_t begin);

 private:
  struct Slot {
    std::vector<Token> tokens;
    // Pages offered to the index and still writable here hold positions below this.
    std::size_t offered = 0;
  };

  std::size_t covered(std::size_t position) const;
  std::vector<Prefix> offer(const Caller& caller, std::size_t slot, std::size_t first,
                            std::size_t end);

  SlotBuffers& buffers_;
  PrefixIndex index_;
  std::vector<Slot> slots_;
  std::vector<std::uint8_t>
      expects_;  // for each slot: see expects(); beside slots_ for cache lines
  std::size_t queries_ = 0, hits_ = 0;  // tokens
};

}  // namespace vtensor
