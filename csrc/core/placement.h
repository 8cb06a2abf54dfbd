// Which free page a row gets next. On the host, neighbouring handles at neighbouring slots merge into one
// kernel mapping, so every row grows through a run of handles of its own; on CUDA handles have no order.
#pragma once

#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <set>
#include <vector>

#include "core/page.h"

namespace vtensor {

// Adjacent handles [first, first + length), made as they are first needed.
struct HandleRun {
  Handle first = 0;
  std::size_t length = 0;
  std::vector<Page*> pages;           // pages[i] has handle first + i
  std::set<std::size_t> free_kept;    // indices of free pages whose memory is kept
  std::set<std::size_t> free_empty;   // indices of free pages without memory
  std::size_t used = 0;
  bool open = false;  // a row grows through it
};

// The runs that one row grows through; the second and later ones serve where other tensors still hold pages
// of the first.
struct RowHome {
  std::size_t pages = 0;
  std::vector<HandleRun*> runs;
};

class Placement {
 public:
  virtual ~Placement() = default;

  virtual RowHome open_home(std::size_t pages) = 0;
  virtual void close_home(RowHome& home) = 0;
  // Picks a free page for the slot after `previous` (null at a row's start); it counts as used from then on. Its
  // memory is kept or empty. May call Driver::create.
  virtual Page* pick(RowHome& home, const Page* previous) = 0;
  // The page is free again, its memory kept or, by `page->resident`, empty.
  virtual void put_back(Page* page) = 0;
  // The memory of a free page was given back.
  virtual void emptied(Page* page) = 0;

 protected:
  Page* new_record(Handle handle);
  void recycle_record(Page* page) { spare_.push_back(page); }

 private:
  std::deque<Page> records_;
  std::vector<Page*> spare_;
};

// `kept` is the pool's list of free pages whose memory is kept.
std::unique_ptr<Placement> make_placement(Driver& driver, const KeptPages& kept);

}  // namespace vtensor
