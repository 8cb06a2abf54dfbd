#include "kv/prefix_index.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

namespace vtensor {

// The unit's tokens; those of the first one stand behind the salt.
std::vector<Token> PrefixIndex::edge(std::span<const Token> tokens, const std::string& salt,
                                     std::size_t unit) const {
  std::vector<Token> edge;
  if (unit == 0) edge.assign(salt.begin(), salt.end());
  const auto of_unit = tokens.subspan(unit * unit_, unit_);
  edge.insert(edge.end(), of_unit.begin(), of_unit.end());
  return edge;
}

// The nodes of the first `units` of the tokens, as far as they are known.
std::vector<PrefixIndex::Node*> PrefixIndex::walk(std::span<const Token> tokens,
                                                  const std::string& salt,
                                                  std::size_t units) const {
  std::vector<Node*> path;
  units = std::min(units, tokens.size() / unit_);
  for (const Node* node = &root_; path.size() < units; node = path.back()) {
    const auto child = node->children.find(edge(tokens, salt, path.size()));
    if (child == node->children.end()) break;
    path.push_back(child->second.get());
  }
  return path;
}

// Parents last, so that they go after their children.
void PrefixIndex::touch(Node* node) noexcept {
  for (; node->parent != nullptr; node = node->parent)
    recent_.splice(recent_.end(), recent_, node->recent);
}

std::size_t PrefixIndex::known(std::span<const Token> tokens, const std::string& salt) const {
  return walk(tokens, salt, std::numeric_limits<std::size_t>::max()).size();
}

std::vector<Prefix> PrefixIndex::take(std::span<const Token> tokens, const std::string& salt,
                                      std::size_t units) {
  const std::vector<Node*> path = walk(tokens, salt, units);
  std::vector<Prefix> pages;
  pages.reserve(path.size());
  for (const Node* node : path) pages.push_back(node->pages);
  if (!path.empty()) touch(path.back());
  return pages;
}

void PrefixIndex::add(std::span<const Token> tokens, const std::string& salt, std::size_t known,
                      std::vector<Prefix> pages) {
  const std::vector<Node*> path = walk(tokens, salt, known);
  Node* const parent = path.empty() ? &root_ : path.back();
  Node* leaf = parent;
  try {
    for (Prefix& some : pages) {
      std::list<Node*> recent(1);
      auto node = std::make_unique<Node>();
      node->parent = leaf;
      node->pages = std::move(some);
      const auto place = leaf->children.emplace(edge(tokens, salt, known++), std::move(node)).first;
      leaf = place->second.get();
      leaf->place = place;
      leaf->recent = recent.begin();
      recent.front() = leaf;
      recent_.splice(recent_.end(), recent);
      pages_ += pages_of(*leaf);
    }
  } catch (...) {
    while (leaf != parent) forget(std::exchange(leaf, leaf->parent));
    throw;
  }
  touch(leaf);
}

// Adds to `found` the least recently used nodes that nothing else uses, with `pages` pages or all
// there are, children before their parents. Returns their pages.
std::size_t PrefixIndex::idle(std::size_t pages, std::vector<Node*>& found) const {
  std::unordered_set<const Node*> gone;
  std::size_t freed = 0;
  for (Node* node : recent_) {
    if (freed >= pages) break;
    const bool in_use =
        std::any_of(node->pages.begin(), node->pages.end(),
                    [](const auto& page_set) VT_LOCKED { return page_set->in_use(); });
    if (in_use) continue;
    const bool has_children =
        std::any_of(node->children.begin(), node->children.end(),
                    [&gone](const auto& child) { return !gone.contains(child.second.get()); });
    if (has_children) continue;
    freed += pages_of(*node);
    found.push_back(node);
    gone.insert(node);
  }
  return freed;
}

std::size_t PrefixIndex::pages_of(const Node& node) {
  std::size_t pages = 0;
  for (const auto& page_set : node.pages) pages += page_set->all().size();
  return pages;
}

std::size_t PrefixIndex::evictable(std::size_t enough) const {
  std::vector<Node*> found;
  return idle(enough, found);
}

std::size_t PrefixIndex::evict(std::size_t pages) {
  if (recent_.empty()) return 0;
  std::vector<Node*> going;
  std::size_t freed = 0;
  {
    const PoolLock lock(recent_.front()->pages.front()->pool());
    freed = idle(pages, going);
  }
  for (Node* node : going) forget(node);
  evictions_ += going.size();
  return freed;
}

// One by one, because a long prompt's nodes would end inside one another.
void PrefixIndex::clear() {
  while (!recent_.empty()) forget(recent_.front());
}

void PrefixIndex::forget(Node* node) {
  recent_.erase(node->recent);
  pages_ -= pages_of(*node);
  node->parent->children.erase(node->place);
}

}  // namespace vtensor
