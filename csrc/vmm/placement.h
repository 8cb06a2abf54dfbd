// The free pages, and which of them a row gets next. On the host, neighbouring handles at
// neighbouring pages merge into one kernel mapping, so each row grows through handle runs of its
// own. On CUDA handles are made one by one and have no order.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "base/sparse_array.h"
#include "driver/driver.h"
#include "vmm/page.h"

namespace vtensor {

// Idle runs, by (spare pages, length, first handle).
using IdleRuns = std::set<std::tuple<std::size_t, std::size_t, Handle>>;

// Adjacent handles [first, first + length). A run is open if a row grows through it, and idle if it
// is neither open nor has pages in use. A page is free while it has no reference; a free page is
// spare if it is resident.
struct HandleRun {
  Handle first = 0;
  std::size_t length = 0;
  std::size_t used = 0;        // pages that have references
  std::size_t spare = 0;       // spare pages
  std::size_t spare_from = 0;  // no spare page lies below this index
  std::size_t empty_from = 0;  // no free page without memory lies below this index
  bool open = false;           // a row grows through it
  // The run's node for Placement::idle_, kept while the run is not idle: becoming idle allocates
  // nothing.
  IdleRuns::node_type idle = {};
};

// The runs through which one row grows: more than one while other tensors have pages of the first.
// None if handles are made one by one.
struct RowHome {
  std::size_t pages = 0;  // the most that the row may have
  std::vector<HandleRun*> runs = {};
};

class Placement {
 public:
  explicit Placement(Driver& driver) : driver_(driver) {}
  Placement& operator=(Placement&&) = delete;

  // The row takes no more pages.
  void close(RowHome& home) noexcept;
  // Adds `n` free pages to `out`, each with one reference, to be mapped after `previous` (null at a
  // row's start). Pages that are not resident have no memory yet; after `fresh` such pages, takes
  // spare pages of any run. May call Driver::create; if that throws, or there is no memory, `out`
  // has what was added so far. Requires: `out` has room for them.
  void pick(RowHome& home, const Page* previous, std::size_t n, std::size_t fresh,
            std::vector<Page*>& out);
  // A page with a reference, for a handle that the driver makes by itself.
  Page* blank();
  // Free pages whose memory is kept.
  const PageList& spare() const { return spare_; }
  // Gives a spare page a reference.
  void take_spare(Page* page) noexcept;
  // The page has lost its last reference. It is spare if it is resident.
  void put_back(Page* page) noexcept;

 private:
  using Runs = std::map<Handle, HandleRun>;

  Page* new_record(Handle handle);
  HandleRun& run_of(const Page* page);
  void pick_from(HandleRun& run, const Page* previous, std::size_t n, std::vector<Page*>& out);
  void begin_use(HandleRun& run, Page* page) noexcept;
  std::size_t first_free(HandleRun& run, bool resident) const;
  bool is_free(const HandleRun& run, std::size_t index, bool resident) const;
  void close(HandleRun& run) noexcept;
  void begin_idle(HandleRun& run) noexcept;
  void end_idle(HandleRun& run) noexcept;
  HandleRun& add_run(Handle first, std::size_t length);
  void join(Runs::iterator at, Runs::iterator next) noexcept;
  HandleRun& split(HandleRun& run, std::size_t index);
  HandleRun* best_idle(std::size_t pages, std::size_t least);
  HandleRun* open_run(std::size_t pages, std::size_t least);

  static constexpr std::size_t kMostLooks = 32;
  static constexpr std::size_t kRecordsAtOnce = 256;

  Driver& driver_;
  PageList spare_;
  SparseArray<Page*, 32> pages_;  // by handle, if handles are adjacent
  Runs runs_;                     // by their first handles
  IdleRuns idle_;
  std::vector<std::unique_ptr<Page[]>> records_;
  std::size_t records_used_ = kRecordsAtOnce;  // in the last array
  std::vector<Page*> unused_records_;          // has capacity for all records
};

}  // namespace vtensor
