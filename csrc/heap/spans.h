// Divides a range of addresses into taken and free spans. Best fit: `take` takes the smallest free
// span that fits, the lowest of equal ones, and leaves its rest free. Adjacent free spans are
// merged.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/interval.h"
#include "base/make_node.h"

namespace vtensor {

class Spans {
 public:
  explicit Spans(std::size_t bytes) {
    spans_.emplace(0, Span{bytes});
    free_.emplace(bytes, 0);
  }
  Spans& operator=(Spans&&) = delete;

  bool all_free() const { return count() == 0; }
  // Taken spans.
  std::size_t count() const { return spans_.size() - free_.size(); }
  std::size_t taken_bytes() const { return taken_bytes_; }
  bool is_taken(std::size_t begin) const {
    const auto span = spans_.find(begin);
    return span != spans_.end() && !is_free(span);
  }
  // Requires: is_taken.
  Interval at(std::size_t begin) const { return {begin, spans_.find(begin)->second.end}; }

  // Bytes of the free span that `take` would divide; 0 if none fits.
  std::size_t fit(std::size_t bytes) const {
    const auto found = free_.lower_bound({bytes, 0});
    return found != free_.end() ? found->first : 0;
  }

  // Throws std::bad_alloc, with nothing taken. Requires: fit(bytes) is not 0.
  Interval take(std::size_t bytes) {
    const auto found = free_.lower_bound({bytes, 0});
    const auto [size, begin] = *found;
    const Interval taken{begin, begin + bytes};
    const auto span = spans_.find(begin);
    if (size > bytes) {
      auto node = make_node<BySize>();
      spans_.emplace(taken.end, Span{begin + size});
      enter_free({taken.end, begin + size}, std::move(node));
    }
    span->second.end = taken.end;
    span->second.node = free_.extract(found);
    taken_bytes_ += bytes;
    return taken;
  }

  // The taken span at `begin` is free again. Requires: is_taken.
  void give_back(std::size_t begin) noexcept {
    const auto span = spans_.find(begin);
    Interval free{begin, span->second.end};
    taken_bytes_ -= free.size();
    BySize::node_type node = std::move(span->second.node);
    if (const auto after = std::next(span); after != spans_.end() && is_free(after)) {
      free.end = after->second.end;
      free_.erase({free.end - after->first, after->first});
      spans_.erase(after);
    }
    auto first = span;
    if (span != spans_.begin() && is_free(std::prev(span))) {
      first = std::prev(span);
      free.begin = first->first;
      free_.erase({begin - free.begin, free.begin});
      spans_.erase(span);
    }
    first->second.end = free.end;
    enter_free(free, std::move(node));
  }

 private:
  using BySize = std::set<std::pair<std::size_t, std::size_t>>;  // size, begin
  struct Span {
    std::size_t end;
    BySize::node_type node = {};  // for free_, kept while taken: give_back allocates nothing
  };
  using All = std::map<std::size_t, Span>;  // by their first byte

  static bool is_free(All::const_iterator span) { return span->second.node.empty(); }
  void enter_free(Interval span, BySize::node_type node) noexcept {
    node.value() = {span.size(), span.begin};
    free_.insert(std::move(node));
  }

  std::size_t taken_bytes_ = 0;
  All spans_;
  BySize free_;
};

}  // namespace vtensor
