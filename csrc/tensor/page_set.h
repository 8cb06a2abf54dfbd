// Pages kept without a mapping, to be mapped again: what a prefix index holds past the end
// of the request that computed it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "policy/page_pool.h"

namespace vtensor {

class Buffer;

// Neighbouring pages of every row of a buffer, row after row, each with a reference of its own.
// They are copy-on-write wherever they are mapped, but where they come from: there they may stay
// writable until another buffer accepts them. Nobody writes to them there either, without having
// them made copy-on-write first.
class PageSet {
 public:
  // Takes the references over.
  PageSet(std::shared_ptr<PagePool> pool, Interval indices, std::vector<Page*> pages) VT_LOCKED
      : pool_(std::move(pool)),
        indices_(indices),
        pages_(std::move(pages)) {
    pool_->store().count_in_page_sets(static_cast<std::ptrdiff_t>(pages_.size()));
    for (Page* page : pages_) ++page->in_sets;
  }
  // Takes the pool's lock.
  ~PageSet();
  PageSet(const PageSet&) = delete;
  PageSet& operator=(const PageSet&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  Interval indices() const { return indices_; }
  std::span<Page* const> row(std::size_t row) const {
    return std::span(pages_).subspan(row * indices_.size(), indices_.size());
  }
  std::size_t pages() const { return pages_.size(); }
  // Whether some page is mapped, or on another page set.
  bool in_use() const VT_LOCKED;

  // Where they come from and may still be writable, and points behind the work that may still write
  // to them there. Null once that is seen to.
  struct Origin {
    std::weak_ptr<Buffer> buffer;
    std::vector<FencePtr> after;
  };
  std::shared_ptr<const Origin> origin;

 private:
  const std::shared_ptr<PagePool> pool_;
  const Interval indices_;
  const std::vector<Page*> pages_;
};

}  // namespace vtensor
