#include "tensor/page_set.h"

#include <algorithm>

#include "base/process.h"

namespace vtensor {

PageSet::~PageSet() {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  const PoolLock lock(pool_);
  pool_->store().count_in_page_sets(-static_cast<std::ptrdiff_t>(pages_.size()));
  for (Page* page : pages_) {
    --page->in_sets;
    pool_->store().drop(page);
  }
}

bool PageSet::in_use() const {
  return std::any_of(pages_.begin(), pages_.end(),
                     [](const Page* page) { return page->references > 1; });
}

}  // namespace vtensor
