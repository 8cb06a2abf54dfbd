#include "kv/slot_prefixes.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "tensor/sharing.h"

namespace vtensor {

SlotPrefixes::Found SlotPrefixes::find(std::span<const Token> tokens, const std::string& salt) {
  const std::size_t unit = index_.unit();
  Found found{index_.take(tokens, salt, tokens.empty() ? 0 : (tokens.size() - 1) / unit), 0};
  found.length = covered(found.parts.size() * unit);
  // If a position takes several pages, the last unit may hold no whole one.
  while (!found.parts.empty() && covered((found.parts.size() - 1) * unit) == found.length)
    found.parts.pop_back();
  return found;
}

void SlotPrefixes::finish(const Caller& caller, std::size_t slot) {
  for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot))
    Sharing(*buffer, caller).accept_expected();
  expects_[slot] = false;
}

std::size_t SlotPrefixes::known(const Caller& caller, std::size_t slot, std::size_t length,
                                std::span<const Token> tokens, const std::string& salt) const {
  if (tokens.size() > length) {
    throw InvalidArgument("[", caller.operation, "] ", tokens.size(), " tokens were given, slot ",
                          slot, " has ", length, ": give those whose K and V are in it");
  }
  const std::vector<Token>& own = slots_[slot].tokens;
  const auto same = static_cast<std::ptrdiff_t>(std::min(own.size(), tokens.size()));
  if (!std::equal(own.begin(), own.begin() + same, tokens.begin())) {
    throw InvalidArgument("[", caller.operation, "] the tokens disagree with those that slot ",
                          slot, " was given for its first ", own.size(),
                          ": name the tokens whose K and V it has");
  }
  const std::size_t known = index_.known(tokens, salt);
  if (tokens.size() / index_.unit() == known) return known;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    if (buffers_.begins(slot)[group] == 0) continue;
    const std::size_t window = buffers_.group(group).window;
    throw InvalidArgument("[", caller.operation, "] slot ", slot, " has layers with a window of ",
                          window, " that gave their first pages back: publish before it is ",
                          window, " tokens long");
  }
  return known;
}

std::size_t SlotPrefixes::publish(const Caller& caller, std::size_t slot,
                                  std::span<const Token> tokens, const std::string& salt,
                                  std::size_t known) {
  const std::size_t units = tokens.size() / index_.unit();
  const std::size_t published = units * index_.unit();
  std::vector<Token> after(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(published));
  index_.add(tokens, salt, known, offer(caller, slot, known, units));
  std::vector<Token>& own = slots_[slot].tokens;
  if (published > own.size()) own = std::move(after);
  return published;
}

// The whole pages of units from `first` up to `end`, to be mapped by later requests.
std::vector<Prefix> SlotPrefixes::offer(const Caller& caller, std::size_t slot, std::size_t first,
                                        std::size_t end) {
  if (first == end) return {};
  const bool writable = buffers_.looks_ahead();  // until another slot accepts the pages
  if (writable) slots_[slot].offered = std::max(slots_[slot].offered, end * index_.unit());
  std::vector<Prefix> parts(end - first);
  std::vector<Interval> pages(parts.size());
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      pages[i] = {buffers_.page_of(group, (first + i) * index_.unit()),
                  buffers_.page_of(group, (first + i + 1) * index_.unit())};
    }
    const Sharing sharing(buffers_.at(slot, group), caller);
    PageSets page_sets = writable ? sharing.offer_writable(pages) : sharing.offer(pages);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(std::move(page_sets[i]));
  }
  return parts;
}

// Positions that lie wholly in whole pages of [0, position).
std::size_t SlotPrefixes::covered(std::size_t position) const {
  std::size_t covered = position;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const std::size_t bytes = buffers_.page_of(group, position) * buffers_.pool()->page_size();
    covered = std::min(covered, bytes / buffers_.group(group).item_bytes);
  }
  return covered;
}

void SlotPrefixes::protect(const Caller& caller, std::size_t slot, std::size_t begin) {
  std::size_t& offered = slots_[slot].offered;
  if (begin >= offered) return;
  for (std::size_t group = 0; group < buffers_.groups(); ++group)
    Sharing(buffers_.at(slot, group), caller).protect({0, buffers_.page_of(group, offered)});
  offered = 0;
}

}  // namespace vtensor
