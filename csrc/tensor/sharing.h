// Sharing pages between buffers and rows, and unsharing them again.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/interval.h"
#include "tensor/buffer.h"
#include "tensor/page_set.h"
#include "vmm/caller.h"
#include "vmm/row_shape.h"

namespace vtensor {

using PageSets = std::vector<std::shared_ptr<PageSet>>;

// Operations on one buffer. Each takes the lock, and is whole or nothing.
class Sharing {
 public:
  Sharing(Buffer& buffer, const Caller& caller)
      : buffer_(buffer), range_(buffer.range()), pool_(*buffer.pool()), caller_(caller) {}

  // A buffer of `shape` whose row i has the pages of row rows[i]. Copies no byte. The pages are
  // copy-on-write in both buffers unless `exclusive`: then this buffer's owner is leaving, and no
  // generation covers it. Waits for the work of all streams that use this buffer.
  std::shared_ptr<Buffer> share(const RowShape& shape, std::span<const std::size_t> rows,
                                bool exclusive) const;
  // Unshares the copy-on-write pages of `positions`.
  void unshare(Interval positions) const;

  // Makes the pages of `indices`, which lie in the extent, copy-on-write in every row. Returns a
  // page set for each interval, to be mapped in other buffers. Waits for the work of all streams
  // that use this buffer.
  PageSets offer(std::span<const Interval> indices) const;
  // `offer` without a wait and without a mapping call: the pages stay writable here until another
  // buffer accepts them. Requires: nothing is written there before `protect`. If some pages are
  // copy-on-write already this is `offer`, because the kernel may have copied them.
  PageSets offer_writable(std::span<const Interval> indices) const;
  // Makes pages of `indices` copy-on-write that were offered and are still writable here. If there
  // are any, waits for the work of all streams that use this buffer.
  void protect(Interval indices) const;
  // Maps the pages of adjacent `page_sets`, which hold `positions`, copy-on-write at their indices:
  // they are the owner's then. Waits for pages that are leaving there. If it fails, pages may have
  // become copy-on-write in the buffer that they come from. Requires: the owner has no positions,
  // and nothing is ready or cached at those indices.
  void accept(Interval positions, std::span<const std::shared_ptr<PageSet>> page_sets) const;
  // `accept` in two steps. `expect` takes references to the pages; the mapper may then map them.
  // `accept_expected` maps them if the mapper has not.
  void expect(Interval positions, std::span<const std::shared_ptr<PageSet>> page_sets) const;
  void accept_expected() const;

  // In each buffer row i gets the pages of row rows[i], at the same addresses; if the driver
  // refuses, in no buffer. Requires: the buffers are of one pool, each named once, without living
  // generations, and the driver remaps in one step, because the owner would lose a page that cannot
  // be put back.
  struct Reindexing {
    Buffer* buffer;
    std::span<const std::size_t> rows;
  };
  static void reindex(const Caller& caller, std::span<const Reindexing> all);

 private:
  // Finds runs of pages to unshare, and memory for their copies, under one hold of the lock.
  template <typename Find>
  std::vector<Reservation::Run> have_ready(PoolLock& lock, Find find) const VT_LOCKED;
  // Prepares the buffer for sharing or reindexing its pages: waits for the work that may write to
  // them, gives private copies handles so that they can be shared (I6), and marks the buffer busy.
  std::unique_ptr<Buffer::Busy> quieten(PoolLock& lock) const VT_LOCKED;
  // The end of a page set takes the lock, so `to` must outlive the caller's hold of it.
  void add_page_sets(PageSets& to, std::span<const Interval> indices) const VT_LOCKED;
  // Writable pages with more than one reference: those that were offered.
  std::vector<Reservation::Run> offered_in(Interval indices) const VT_LOCKED;
  // Makes the pages copy-on-write in the buffers that they come from, and waits for work that
  // writes to them.
  void protect_origins(std::span<const std::shared_ptr<PageSet>> page_sets) const;
  // Waits until nothing is mapped at `indices`, and makes entries for them.
  void await_places(PoolLock& lock, Interval indices) const VT_LOCKED;

  Buffer& buffer_;
  Reservation& range_;
  PagePool& pool_;
  const Caller& caller_;
};

}  // namespace vtensor
