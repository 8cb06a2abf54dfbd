// The pages that slots of a cache share with earlier requests, through the prefix index.
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "kv/slot_cache.h"

namespace vtensor {

std::size_t SlotCache::alloc(const Caller& caller, std::span<const Token> tokens,
                             const std::string& salt, std::size_t expected, bool deferred) {
  const std::size_t unit = prefixes_.unit();
  // Never for all of the tokens, since the last one must be computed.
  std::vector<Prefix> parts =
      prefixes_.take(tokens, salt, tokens.empty() ? 0 : (tokens.size() - 1) / unit);
  const std::size_t length = whole_positions(parts.size() * unit);
  // If a position takes several pages, the last unit may hold no whole one.
  while (!parts.empty() && whole_positions((parts.size() - 1) * unit) == length) parts.pop_back();
  const std::span<const Token> found = tokens.first(length);
  const std::size_t slot = length == 0 ? alloc(caller, std::max(expected, tokens.size()))
                                       : accept(caller, parts, length, {found.begin(), found.end()},
                                                std::nullopt, deferred && buffers_.looks_ahead());
  prefix_queries_ += tokens.size();
  prefix_hits_ += length;
  return slot;
}

// A free slot that maps the pages of `parts`, for the first `length` positions or the positions of
// `source`.
std::size_t SlotCache::accept(const Caller& caller, std::span<const Prefix> parts,
                              std::size_t length, std::vector<Token> tokens,
                              std::optional<std::size_t> source, bool deferred) {
  std::size_t pages = 0;  // indices, of the row group that has most
  std::vector<PageSets> page_sets(buffers_.groups());
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    for (const Prefix& part : parts) {
      if (part.at(group)->indices().empty()) continue;
      page_sets[group].push_back(part[group]);
      pages = std::max(pages, part[group]->indices().end);
    }
  }
  const std::size_t slot = free_.take_empty(caller, pages);
  try {
    for (std::size_t group = 0; group < buffers_.groups(); ++group) {
      if (page_sets[group].empty()) continue;
      const Interval positions =
          source ? buffers_.at(*source, group).positions() : Interval{0, length};
      buffers_.at(slot, group).accept(caller, positions, page_sets[group], deferred);
    }
    begin(caller, slot, length);
    prompts_[slot] = {std::move(tokens), 0};
    is_deferred_[slot] = deferred;
    look_further({&slot, 1});
  } catch (...) {
    leave(slot);
    throw;
  }
  return slot;
}

// Maps the slot's deferred prefix; called before anything reads or grows the slot's pages.
void SlotCache::finish_prefix(const Caller& caller, std::size_t slot) {
  if (!is_deferred(slot)) return;
  for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot)) buffer->accept_deferred(caller);
  is_deferred_[slot] = false;
  lengths_->forget_room(slot);
}

bool SlotCache::evict(unsigned tries) {
  std::size_t rows = 0;
  for (const RowGroup& group : buffers_.shape().row_groups) rows += group.rows;
  return prefixes_.evict(rows << std::min(tries, 10U)) != 0;
}

std::size_t SlotCache::publish(const Caller& caller, std::size_t slot,
                               std::span<const Token> tokens, const std::string& salt) {
  lengths_->require_whole(caller, slot);
  if (tokens.size() > lengths_->length(slot)) {
    throw InvalidArgument("[", caller.operation, "] ", tokens.size(), " tokens were given, slot ",
                          slot, " has ", lengths_->length(slot),
                          ": give those whose K and V are in it");
  }
  std::vector<Token>& own = prompts_[slot].tokens;
  const auto same = static_cast<std::ptrdiff_t>(std::min(own.size(), tokens.size()));
  if (!std::equal(own.begin(), own.begin() + same, tokens.begin())) {
    throw InvalidArgument("[", caller.operation, "] the tokens disagree with those that slot ",
                          slot, " was given for its first ", own.size(),
                          ": name the tokens whose K and V it has");
  }
  const std::size_t units = tokens.size() / prefixes_.unit();
  const std::size_t known = prefixes_.known(tokens, salt);
  if (known != units) {
    require_first_pages(caller, slot);
    await_arrival(caller, slot);
    lengths_->forget_room(slot);
  }
  const std::span<const Token> published = tokens.first(units * prefixes_.unit());
  std::vector<Token> after(published.begin(), published.end());
  prefixes_.add(tokens, salt, known, offer(caller, slot, known, units));
  if (after.size() > own.size()) own = std::move(after);
  if (known != units) look_further({&slot, 1});
  return published.size();
}

// Throws if a window has given back pages that would be published.
void SlotCache::require_first_pages(const Caller& caller, std::size_t slot) const {
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    if (buffers_.begin(slot, group) == 0) continue;
    const std::size_t window = buffers_.group(group).window;
    throw InvalidArgument("[", caller.operation, "] slot ", slot, " has layers with a window of ",
                          window, " that gave their first pages back: publish before it is ",
                          window, " tokens long");
  }
}

// The whole pages of units from `first` up to `end`, to be mapped by later requests.
std::vector<Prefix> SlotCache::offer(const Caller& caller, std::size_t slot, std::size_t first,
                                     std::size_t end) {
  if (first == end) return {};
  const bool writable = buffers_.looks_ahead();  // until another slot accepts the pages
  if (writable) prompts_[slot].offered = std::max(prompts_[slot].offered, end * prefixes_.unit());
  std::vector<Prefix> parts(end - first);
  std::vector<Interval> pages(parts.size());
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      pages[i] = {buffers_.page_of(group, (first + i) * prefixes_.unit()),
                  buffers_.page_of(group, (first + i + 1) * prefixes_.unit())};
    }
    PageSets page_sets = buffers_.at(slot, group).offer(caller, pages, writable);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(std::move(page_sets[i]));
  }
  return parts;
}

// Positions that lie wholly in whole pages of [0, position).
std::size_t SlotCache::whole_positions(std::size_t position) const {
  std::size_t covered = position;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const std::size_t bytes = buffers_.page_of(group, position) * buffers_.pool()->page_size();
    covered = std::min(covered, bytes / buffers_.group(group).item_bytes);
  }
  return covered;
}

// Makes pages copy-on-write that the index was offered and that hold positions from `begin` on;
// called before anything writes there.
void SlotCache::protect(const Caller& caller, std::size_t slot, std::size_t begin) {
  std::size_t& offered = prompts_[slot].offered;
  if (begin >= offered) return;
  for (std::size_t group = 0; group < buffers_.groups(); ++group)
    buffers_.at(slot, group).protect(caller, {0, buffers_.page_of(group, offered)});
  offered = 0;
}

}  // namespace vtensor
