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

// Pages of neighbouring indices of every row of a buffer, [row][index], with a reference to each.
// These pages are copy-on-write wherever they are mapped. The buffer that they come from may keep
// them writable until another buffer accepts them; it makes them copy-on-write before it writes.
class PageSet final : public Ended {
 public:
  PageSet(std::shared_ptr<PagePool> pool, Interval indices, std::vector<Page*> pages) VT_LOCKED;
  ~PageSet() override VT_LOCKED;
  // The last owner may let it go in any thread, which may have the pool's lock.
  static std::shared_ptr<PageSet> make(const std::shared_ptr<PagePool>& pool, Interval indices,
                                       std::vector<Page*> pages) VT_LOCKED;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  Interval indices() const { return indices_; }
  std::span<Page* const> row(std::size_t row) const {
    return all().subspan(row * indices_.size(), indices_.size());
  }
  std::span<Page* const> all() const { return pages_; }
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
  void take_effect() noexcept override {}  // its destructor does

  const std::shared_ptr<PagePool> pool_;
  const Interval indices_;
  const std::vector<Page*> pages_;
};

using PageSets = std::vector<std::shared_ptr<PageSet>>;
using PageSetSpan = std::span<const std::shared_ptr<PageSet>>;

}  // namespace vtensor
