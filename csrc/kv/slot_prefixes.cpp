// What requests share with those before them: pages that the prefix index keeps.
#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "kv/slot_cache.h"
#include "tensor/sharing.h"

namespace vtensor {

std::size_t SlotCache::alloc(const Caller& caller, std::span<const Token> tokens,
                             const std::string& salt, std::size_t expected, bool deferred) {
  const std::size_t most = tokens.empty() ? 0 : (tokens.size() - 1) / unit();
  std::vector<Prefix> found = prefixes_.take(tokens, salt, most);
  const std::size_t length = covered(found.size() * unit());
  // Where a position takes several pages, the last unit may hold no whole one.
  while (!found.empty() && covered((found.size() - 1) * unit()) == length) found.pop_back();
  std::vector<Token> shared(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(length));
  const std::size_t slot = length == 0
                               ? alloc(caller, std::max(expected, tokens.size()))
                               : alloc_prefix(caller, found, length, deferred && looks_ahead());
  slots_[slot].tokens = std::move(shared);
  prefix_queries_ += tokens.size();
  prefix_hits_ += length;
  return slot;
}

std::size_t SlotCache::publish(const Caller& caller, std::size_t slot,
                               std::span<const Token> tokens, const std::string& salt) {
  require_together(caller, slot);
  const std::string operation = "[" + std::string(caller.operation) + "] ";
  if (tokens.size() > static_cast<std::size_t>(lengths_[slot])) {
    throw InvalidArgument(operation + std::to_string(tokens.size()) + " tokens were given, slot " +
                          std::to_string(slot) + " has " + std::to_string(lengths_[slot]) +
                          ": give those whose K and V are in it");
  }
  std::vector<Token>& before = slots_[slot].tokens;
  const std::size_t same = std::min(before.size(), tokens.size());
  if (!std::equal(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(same),
                  tokens.begin())) {
    throw InvalidArgument(operation + "the tokens disagree with those that slot " +
                          std::to_string(slot) + " was given for its first " +
                          std::to_string(before.size()) + ": name the tokens whose K and V it has");
  }
  const std::size_t known = prefixes_.known(tokens, salt);
  const std::size_t units = std::max(known, tokens.size() / unit());
  std::vector<std::size_t> bounds;
  for (std::size_t i = known; i <= units; ++i) bounds.push_back(i * unit());
  const std::size_t published = units * unit();
  std::vector<Token> after(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(published));
  prefixes_.add(tokens, salt, known, offer(caller, slot, bounds));
  if (published > before.size()) before = std::move(after);
  return published;
}

bool SlotCache::evict(unsigned tries) {
  std::size_t rows = 0;
  for (const GroupRange& group : row_groups_) rows += group.shape.rows;
  return prefixes_.evict(rows << std::min(tries, 10U)) != 0;
}

// The positions below are wholly in the pages that are offered of [0, position).
std::size_t SlotCache::covered(std::size_t position) const {
  std::size_t covered = position;
  for (const GroupRange& group : row_groups_) {
    covered =
        std::min(covered, page_of(group, position) * pool_->page_size() / group.shape.item_bytes);
  }
  return covered;
}

// The whole pages of the positions between neighbouring `bounds`, which ascend from a multiple of
// the unit on, to be mapped by later requests.
std::vector<Prefix> SlotCache::offer(const Caller& caller, std::size_t slot,
                                     std::span<const std::size_t> bounds) {
  if (bounds.size() < 2) return {};
  if (bounds.back() > static_cast<std::size_t>(lengths_[slot])) {
    throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                          " has " + std::to_string(lengths_[slot]) + " tokens, " +
                          std::to_string(bounds.back()) +
                          " were named: publish no more than it has");
  }
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    if (slots_[slot].begins[group] == 0) continue;
    throw InvalidArgument("[" + std::string(caller.operation) + "] slot " + std::to_string(slot) +
                          " has layers with a window of " +
                          std::to_string(row_groups_[group].shape.window) +
                          " that gave their first pages back: publish before it is " +
                          std::to_string(row_groups_[group].shape.window) + " tokens long");
  }
  await_arrival(caller, slot);
  expect_unsharing(slot);
  std::size_t& offered = slots_[slot].offered;
  if (looks_ahead()) offered = std::max(offered, bounds.back());
  std::vector<Prefix> parts(bounds.size() - 1);
  std::vector<Interval> pages(parts.size());
  for (std::size_t group = 0; group < row_groups_.size(); ++group) {
    for (std::size_t i = 0; i < parts.size(); ++i)
      pages[i] = {page_of(row_groups_[group], bounds[i]),
                  page_of(row_groups_[group], bounds[i + 1])};
    const Sharing sharing(*slots_[slot].buffers[group], caller);
    const PageSets page_sets = looks_ahead() ? sharing.offer_writable(pages) : sharing.offer(pages);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(page_sets[i]);
  }
  look_further({&slot, 1});
  return parts;
}

// Before something reads the slot's pages, or grows them.
void SlotCache::finish_prefix(const Caller& caller, std::size_t slot) {
  if (!slots_[slot].expects) return;
  for (const std::shared_ptr<Buffer>& buffer : slots_[slot].buffers)
    Sharing(*buffer, caller).accept_expected();
  slots_[slot].expects = false;
  room_[slot] = lengths_[slot];
}

// Before something may write to the slot's published positions.
void SlotCache::protect(const Caller& caller, std::size_t slot) {
  std::size_t& offered = slots_[slot].offered;
  if (offered == 0) return;
  for (std::size_t group = 0; group < row_groups_.size(); ++group)
    Sharing(*slots_[slot].buffers[group], caller)
        .protect({0, page_of(row_groups_[group], offered)});
  offered = 0;
}

}  // namespace vtensor
