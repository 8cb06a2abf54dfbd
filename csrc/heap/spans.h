// Divides a range of addresses into taken and free spans, up to the first byte that was never
// taken. Best fit: the smallest free span that fits is taken, the lowest of equals, and the rest of
// it stays free. Adjacent free spans are merged.
#pragma once

#include <cstddef>
#include <iterator>
#include <list>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/interval.h"

namespace vtensor {

class Spans {
 public:
  explicit Spans(std::size_t bytes) : bytes_(bytes) {}
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  bool all_free() const { return taken_.empty(); }
  std::size_t count() const { return taken_.size(); }
  std::size_t taken_bytes() const { return taken_bytes_; }
  bool is_taken(std::size_t begin) const { return taken_.count(begin) != 0; }
  // Requires: is_taken.
  Interval at(std::size_t begin) const { return taken_.find(begin)->second->bytes; }

  // Bytes of the free span that `take` would divide; SIZE_MAX if it would extend past the last
  // span; 0 if there is no room.
  std::size_t fit(std::size_t bytes) const {
    const auto found = free_.lower_bound({bytes, 0});
    if (found != free_.end()) return found->first.first;
    return bytes <= bytes_ - end_begin() ? SIZE_MAX : 0;
  }

  // Throws std::bad_alloc; nothing is taken then. Requires: fit(bytes) is not 0.
  Interval take(std::size_t bytes) {
    List made(1);
    made.front().node = make_node();
    const auto found = free_.lower_bound({bytes, 0});
    const bool at_end = found == free_.end();
    const std::size_t begin = at_end ? end_begin() : found->first.second;
    const bool joins = at_end && begin != top();  // the last span, which is free
    const auto span = at_end ? (joins ? std::prev(spans_.end()) : made.begin()) : found->second;
    taken_.emplace(begin, span);
    // Nothing below throws.
    if (at_end && !joins) {
      span->bytes.begin = begin;
      spans_.splice(spans_.end(), made);
    } else {
      span->node = free_.extract({span->bytes.size(), begin});
      if (const Interval rest{begin + bytes, span->bytes.end}; !rest.empty()) {
        made.front().bytes = rest;
        enter_free(made.begin());
        spans_.splice(std::next(span), made);
      }
    }
    span->bytes.end = begin + bytes;
    taken_bytes_ += bytes;
    return span->bytes;
  }

  // The taken span at `begin` is free again. Requires: is_taken.
  void give_back(std::size_t begin) noexcept {
    const auto taken = taken_.find(begin);
    const List::iterator span = taken->second;
    taken_.erase(taken);
    taken_bytes_ -= span->bytes.size();
    if (const auto after = std::next(span); after != spans_.end() && is_free(*after)) {
      span->bytes.end = after->bytes.end;
      remove_free(after);
    }
    if (span != spans_.begin()) {
      if (const auto before = std::prev(span); is_free(*before)) {
        span->bytes.begin = before->bytes.begin;
        remove_free(before);
      }
    }
    enter_free(span);
  }

 private:
  struct Span;
  using List = std::list<Span>;
  using BySize = std::map<std::pair<std::size_t, std::size_t>, List::iterator>;  // size, begin
  struct Span {
    Interval bytes;
    BySize::node_type node;  // of free_, kept while the span is taken: give_back allocates nothing
  };

  static BySize::node_type make_node() {
    BySize one;
    one.emplace(std::pair<std::size_t, std::size_t>{}, List::iterator{});
    return one.extract(one.begin());
  }
  static bool is_free(const Span& span) { return span.node.empty(); }
  std::size_t top() const { return spans_.empty() ? 0 : spans_.back().bytes.end; }
  // Where the free bytes at the end begin.
  std::size_t end_begin() const {
    return !spans_.empty() && is_free(spans_.back()) ? spans_.back().bytes.begin : top();
  }
  void enter_free(List::iterator span) noexcept {
    span->node.key() = {span->bytes.size(), span->bytes.begin};
    span->node.mapped() = span;
    free_.insert(std::move(span->node));
  }
  void remove_free(List::iterator span) noexcept {
    // A free span keeps the bytes that it was entered with.
    free_.erase({span->bytes.size(), span->bytes.begin});
    spans_.erase(span);
  }

  const std::size_t bytes_;
  std::size_t taken_bytes_ = 0;
  List spans_;
  BySize free_;
  std::unordered_map<std::size_t, List::iterator> taken_;  // by their first byte
};

}  // namespace vtensor
