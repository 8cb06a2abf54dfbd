// The record of one page, and lists of pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

namespace vtensor {

inline constexpr std::uint64_t kNoOwner = 0;  // no client has this id

struct Page {
  Handle handle = 0;
  std::uint32_t references = 0;         // in page tables and page sets
  bool resident = false;                // has memory, in use or spare
  bool dirty = false;                   // may hold bytes other than 0
  bool asleep = false;                  // in page tables, but not mapped
  bool stale = false;                   // asleep: its memory has bytes, not the contents
  bool fresh = false;                   // memory was made for it, and it was not taken since
  std::uint32_t in_sets = 0;            // of `references`: those of page sets
  std::uint64_t last_owner = kNoOwner;  // id of the last client that had it
  std::uint64_t sleep = 0;              // number of its last sleep
  std::size_t sleep_slot = 0;           // index of its bytes in the saved image of that sleep
  std::size_t index = 0;                // cached pages of an arena: its page index
  // Neighbours in a list. Reservation::kept_ links pages by `older`.
  Page* older = nullptr;
  Page* newer = nullptr;
};

// Pages in order of arrival, oldest first. A page is in one list at a time.
class PageList {
 public:
  std::size_t size() const { return size_; }
  Page* oldest() const { return oldest_; }
  Page* newest() const { return newest_; }

  void push(Page* page) {
    page->older = newest_;
    page->newer = nullptr;
    (newest_ ? newest_->newer : oldest_) = page;
    newest_ = page;
    ++size_;
  }

  void remove(Page* page) {
    (page->older ? page->older->newer : oldest_) = page->newer;
    (page->newer ? page->newer->older : newest_) = page->older;
    page->older = page->newer = nullptr;
    --size_;
  }

 private:
  Page* oldest_ = nullptr;
  Page* newest_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace vtensor
