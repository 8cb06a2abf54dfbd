// Pages kept without a mapping, to be mapped again: what a prefix index holds past the end
// of the request that computed it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "policy/generation.h"
#include "policy/page_pool.h"

namespace vtensor {

class Buffer;

// One reference to each of some pages, without mappings. Ends with the lock held.
class PageReferences final : public Ended {
 public:
  PageReferences(PageStore& store, std::vector<Page*> pages) VT_LOCKED;
  ~PageReferences() override VT_LOCKED;

  void reap() noexcept override {}  // its destructor does

  const std::vector<Page*>& pages() const { return pages_; }

 private:
  PageStore& store_;
  const std::vector<Page*> pages_;
};

// Pages of neighbouring indices of every row of a buffer, [row][index]. They are copy-on-write
// wherever they are mapped. The buffer that they come from may keep them writable until another
// buffer accepts them; it makes them copy-on-write before it writes there.
class PageSet {
 public:
  PageSet(std::shared_ptr<PagePool> pool, Interval indices, std::vector<Page*> pages) VT_LOCKED
      : pool_(std::move(pool)),
        indices_(indices),
        references_(std::make_unique<PageReferences>(pool_->store(), std::move(pages))) {}
  // In any thread, which may have the pool's lock.
  ~PageSet() { pool_->end(references_.release()); }
  PageSet(const PageSet&) = delete;
  PageSet& operator=(const PageSet&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  Interval indices() const { return indices_; }
  std::span<Page* const> row(std::size_t row) const {
    return std::span(references_->pages()).subspan(row * indices_.size(), indices_.size());
  }
  std::span<Page* const> all() const { return references_->pages(); }
  std::size_t pages() const { return all().size(); }
  // Whether some page is mapped, or in another page set.
  bool in_use() const VT_LOCKED;

  // The buffer in which the pages may still be writable, and fences after the work that may write
  // to them there. Null once they are copy-on-write and that work has passed.
  struct Origin {
    std::weak_ptr<Buffer> buffer;
    std::vector<FencePtr> after;
  };
  std::shared_ptr<const Origin> origin;

 private:
  const std::shared_ptr<PagePool> pool_;
  const Interval indices_;
  std::unique_ptr<PageReferences> references_;
};

using PageSets = std::vector<std::shared_ptr<PageSet>>;
using PageSetSpan = std::span<const std::shared_ptr<PageSet>>;

// Pages of others, [row][index], that a buffer's owner gets at `indices` once they are mapped
// there. Ends with the lock held.
struct ExpectedPages {
  ExpectedPages(PageStore& store, Interval positions, Interval indices, std::vector<Page*> pages)
      VT_LOCKED : positions(positions),
                  indices(indices),
                  references(store, std::move(pages)) {}

  const Interval positions;
  const Interval indices;
  const PageReferences references;

  const Page* at(std::size_t row, std::size_t index) const {
    return references.pages()[row * indices.size() + index - indices.begin];
  }
};

}  // namespace vtensor
