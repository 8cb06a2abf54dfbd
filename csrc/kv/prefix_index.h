// What requests computed, kept for those that begin with the same tokens.
//
// A radix tree over token ids whose edges are all one unit long: the tokens that fill a page
// (SGLang's RadixAttention, arXiv 2312.07104, has the tree; vTensor, arXiv 2407.15309, the pages
// mapped again).
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/page_set.h"

namespace vtensor {

using Token = std::int64_t;

// The pages of one run of positions: a page set for each row group.
using Prefix = std::vector<std::shared_ptr<PageSet>>;

class PrefixIndex {
 public:
  // `unit`: tokens of one edge.
  explicit PrefixIndex(std::size_t unit) : unit_(unit) {}
  ~PrefixIndex() { clear(); }
  PrefixIndex& operator=(PrefixIndex&&) = delete;

  std::size_t unit() const { return unit_; }
  // Units in the index.
  std::size_t size() const { return recent_.size(); }
  // Units evicted for want of memory, so far.
  std::size_t evictions() const { return evictions_; }

  // Units of the longest known beginning of `tokens`.
  std::size_t known(std::span<const Token> tokens, const std::string& salt) const;
  // The pages of the first `units` units of `tokens`; marks them as recently used.
  std::vector<Prefix> take(std::span<const Token> tokens, const std::string& salt,
                           std::size_t units);
  // Adds `pages` for the units after the first `known`; marks all units as recently used. All or
  // nothing.
  void add(std::span<const Token> tokens, const std::string& salt, std::size_t known,
           std::vector<Prefix> pages);
  // Evicts the least recently used units that nothing else uses, until `pages` pages are free or no
  // such unit is left. Returns the pages freed. Takes the pool's lock.
  std::size_t evict(std::size_t pages);
  // Pages that `evict` could free; stops counting at `enough`.
  std::size_t evictable(std::size_t enough) const VT_LOCKED;
  // Pages that the index has references to.
  std::size_t pages() const { return pages_; }
  // Drops every unit. Slots keep the pages that they have mapped.
  void clear();

 private:
  struct Node;
  using Nodes = std::map<std::vector<Token>, std::unique_ptr<Node>>;  // by their edges
  struct Node {
    Node* parent = nullptr;
    Prefix pages;
    Nodes children;
    Nodes::iterator place;  // among its parent's children
    std::list<Node*>::iterator recent;
  };

  std::vector<Token> edge(std::span<const Token> tokens, const std::string& salt,
                          std::size_t unit) const;
  std::vector<Node*> walk(std::span<const Token> tokens, const std::string& salt,
                          std::size_t units) const;
  std::size_t idle(std::size_t pages, std::vector<Node*>& found) const VT_LOCKED;
  static std::size_t pages_of(const Node& node);
  void touch(Node* node) noexcept;
  void forget(Node* node);

  const std::size_t unit_;
  Node root_;                // has no pages
  std::list<Node*> recent_;  // least recently used first, leaves before their parents
  std::size_t pages_ = 0;
  std::size_t evictions_ = 0;
};

}  // namespace vtensor
