#include "tensor/page_set.h"

#include <algorithm>

namespace vtensor {

PageReferences::PageReferences(PageStore& store, std::vector<Page*> pages)
    : store_(store), pages_(std::move(pages)) {
  store_.count_in_page_sets(static_cast<std::ptrdiff_t>(pages_.size()));
  for (Page* page : pages_) {
    ++page->in_sets;
    store_.share(page);
  }
}

PageReferences::~PageReferences() {
  store_.count_in_page_sets(-static_cast<std::ptrdiff_t>(pages_.size()));
  for (Page* page : pages_) {
    --page->in_sets;
    store_.drop(page);
  }
}

bool PageSet::in_use() const {
  return std::any_of(references_->pages().begin(), references_->pages().end(),
                     [](const Page* page) { return page->references > 1; });
}

}  // namespace vtensor
