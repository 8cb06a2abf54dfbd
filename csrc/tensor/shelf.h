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

// The pages of neighbouring slots of every row of a buffer, row after row, each with a reference of
// its own. Nobody writes to them: they are guarded wherever they are mapped.
class Shelf {
 public:
  // Takes the references over. Requires: the pool's lock.
  Shelf(std::shared_ptr<PagePool> pool, Interval slots, std::vector<Page*> pages)
      : pool_(std::move(pool)), slots_(slots), pages_(std::move(pages)) {
    pool_->store().shelve(static_cast<std::ptrdiff_t>(pages_.size()));
  }
  // Takes the pool's lock.
  ~Shelf();
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  Interval slots() const { return slots_; }
  std::span<Page* const> row(std::size_t row) const {
    return std::span(pages_).subspan(row * slots_.size(), slots_.size());
  }
  std::size_t pages() const { return pages_.size(); }
  // Whether some page is mapped, or on another shelf. Requires: the pool's lock.
  bool in_use() const;

 private:
  const std::shared_ptr<PagePool> pool_;
  const Interval slots_;
  const std::vector<Page*> pages_;
};

}  // namespace vtensor
