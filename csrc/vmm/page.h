// The record of one page handle: how many references it has, and what its memory holds; and lists
// of pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

namespace vtensor {

inline constexpr std::uint64_t kNoOwner = 0;  // no client has this id

struct Page {
  Handle handle = 0;
  std::uint32_t references = 0;         // of page tables and page sets
  bool resident = false;                // its memory is made: in use, or spare
  bool dirty = false;                   // may hold bytes other than 0
  bool asleep = false;                  // in page tables, and mapped nowhere
  bool stale = false;                   // asleep: its memory has bytes; `dirty` is of its contents
  bool fresh = false;                   // its memory was made, and not taken since
  std::uint32_t in_sets = 0;            // of the references: from page sets
  std::uint64_t last_owner = kNoOwner;  // id of the client that had it last
  std::uint64_t sleep = 0;              // number of the last sleep that it was in
  std::size_t sleep_slot = 0;           // index of its bytes in the saved image of that sleep
  std::size_t index = 0;                // of a cached page of an arena
  // Neighbours in the list that has the page. Reservation::kept_ links pages by `older`.
  Page* older = nullptr;
  Page* newer = nullptr;
};

// Pages in the order in which they came, oldest first. A page is in one list at a time.
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
