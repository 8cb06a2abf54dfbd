#include "tensor/page_set.h"

#include <algorithm>

namespace vtensor {

PageSet::PageSet(std::shared_ptr<PagePool> pool, Interval indices, std::vector<Page*> pages)
    : pool_(std::move(pool)), indices_(indices), pages_(std::move(pages)) {
  pool_->store().count_in_page_sets(static_cast<std::ptrdiff_t>(pages_.size()));
  for (Page* page : pages_) {
    ++page->in_sets;
    pool_->store().share(page);
  }
}

PageSet::~PageSet() {
  pool_->store().count_in_page_sets(-static_cast<std::ptrdiff_t>(pages_.size()));
  for (Page* page : pages_) {
    --page->in_sets;
    pool_->store().drop(page);
  }
}

std::shared_ptr<PageSet> PageSet::make(const std::shared_ptr<PagePool>& pool, Interval indices,
                                       std::vector<Page*> pages) {
  return {new PageSet(pool, indices, std::move(pages)),
          [](PageSet* ended) { ended->pool_->end(ended); }};
}

bool PageSet::in_use() const {
  return std::any_of(pages_.begin(), pages_.end(),
                     [](const Page* page) { return page->references > 1; });
}

}  // namespace vtensor
