// Which free page a row gets next. On the host, neighbouring handles at neighbouring pages merge
// into one kernel mapping, so each row grows through a run of handles of its own. On CUDA handles
// have no order.
#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "vmm/page.h"

namespace vtensor {

// Runs by a number of their pages, and by their first handles.
using RunsBySize = std::set<std::pair<std::size_t, Handle>>;

// Adjacent handles [first, first + length). Some row grows through it, or pages of it are in use,
// or it is idle. A page is free while it has no reference, and spare if it is resident too.
struct HandleRun {
  Handle first = 0;
  std::size_t length = 0;
  std::size_t used = 0;        // pages that have references
  std::size_t spare = 0;       // spare pages
  std::size_t spare_from = 0;  // no spare page lies below this index
  std::size_t empty_from = 0;  // no other free page lies below this index
  bool open = false;           // a row grows through it
  // Of the lists of idle runs, kept while it is in none: becoming idle allocates nothing.
  RunsBySize::node_type by_length = {}, by_spare = {};
};

// The runs that one row grows through: the second and later ones while other tensors still have
// pages of the first.
struct RowHome {
  std::size_t pages = 0;
  std::vector<HandleRun*> runs;
  // Takes kept memory of any run before kept memory has to be given back to make other. Such a page
  // costs a kernel mapping, which takes less time than making memory.
  bool stitched = false;
  // Of a stitched one, how many pages may get new memory before that.
  std::size_t fresh = 0;
};

class Placement {
 public:
  virtual ~Placement() = default;

  virtual RowHome open_home(std::size_t pages) = 0;
  virtual void close_home(RowHome& home) = 0;
  // Adds to `out` `n` free pages, to be mapped after `previous` (null at a row's start), each with
  // one reference and off the pool's list of spare pages. Those that are not resident have no
  // memory yet. May call Driver::create; if that throws, `out` has what was added so far. Requires:
  // `out` has room for them.
  virtual void pick(RowHome& home, const Page* previous, std::size_t n,
                    std::vector<Page*>& out) = 0;
  // A page without a handle, for one that the driver makes in advance. `emptied` takes it back.
  // Requires: handles are made one by one.
  virtual Page* blank() = 0;
  // The page has no reference any more; it is resident or empty.
  virtual void put_back(Page* page) = 0;
  // The memory of a free page was given back.
  virtual void emptied(Page* page) = 0;

 protected:
  Page* new_record(Handle handle);
  void recycle_record(Page* page) noexcept { spare_.push_back(page); }

 private:
  static constexpr std::size_t kRecordsAtOnce = 256;
  std::vector<std::unique_ptr<Page[]>> records_;
  std::size_t records_used_ = kRecordsAtOnce;  // of the last array
  std::vector<Page*> spare_;                   // with room for all records
};

// `spare` is the pool's list of free pages whose memory is kept.
std::unique_ptr<Placement> make_placement(Driver& driver, SparePages& spare);

}  // namespace vtensor
