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

  // A buffer of `shape` whose row i has the pages of row rows[i]. No byte is copied; the pages are
  // copy-on-write in both unless `exclusive`, which is for an owner that leaves this buffer and
  // that no generation covers. Waits for the work of all streams that use this buffer.
  std::shared_ptr<Buffer> share(const RowShape& shape, std::span<const std::size_t> rows,
                                bool exclusive) const;
  // Makes the pages behind `positions` writable: those that are copy-on-write are unshared.
  void unshare(Interval positions) const;

  // The pages behind `indices` of every row, to be mapped copy-on-write elsewhere; they are
  // copy-on-write here from now on. One page set for each of `indices`, which lie in the extent.
  // Waits for the work of all streams that use this buffer.
  PageSets offer(std::span<const Interval> indices) const;
  // The same without a wait, and without a driver call that maps: pages stay writable here until
  // another buffer accepts them. Requires: nothing is written there before `protect`. As `offer`
  // if some of them are copy-on-write already, because the kernel may have copied these.
  PageSets offer_writable(std::span<const Interval> indices) const;
  // Makes what others were offered of `indices`, and is still writable here, copy-on-write. Waits
  // for the work of all streams that use this buffer if there is any.
  void protect(Interval indices) const;
  // Maps the pages of `page_sets`, which lie behind one another and hold `positions`, copy-on-write
  // at their pages: they are the owner's then. Waits for what is on its way out there. Pages may
  // have become copy-on-write where they come from even if that fails. Requires: nothing is owned,
  // and nothing ready or cached there.
  void accept(Interval positions, std::span<const std::shared_ptr<PageSet>> page_sets) const;
  // The same in two steps. `expect`: the pages are the owner's to have, and are kept for it; the
  // mapper may map them first. `accept_expected` maps what it has not, and does nothing if nothing
  // is expected.
  void expect(Interval positions, std::span<const std::shared_ptr<PageSet>> page_sets) const;
  void accept_expected() const;

  // Row i gets the pages of row rows[i], at the same addresses; in all of these buffers or, if the
  // driver refuses, in none. Requires: buffers of one pool, each named once, no generation of which
  // is alive, and a driver that remaps in one step, because a page that cannot be put back would
  // leave the owner without it.
  struct Reindexing {
    Buffer* buffer;
    std::span<const std::size_t> rows;
  };
  static void reindex(const Caller& caller, std::span<const Reindexing> all);

 private:
  // Finds runs of pages to unshare, and has memory for them, with the lock held since it was asked.
  template <typename Find>
  std::vector<Reservation::Run> have_ready(PoolLock& lock, Find find) const VT_LOCKED;
  // Before pages are shared, or change their rows: no work is left that may write to them, and what
  // the kernel copied has handles of its own, so that it can be shared again (I6). Busy from then
  // on.
  std::unique_ptr<Buffer::Busy> quieten(PoolLock& lock) const VT_LOCKED;
  // A page set lets its pages go with the lock, so `to` must outlive the caller's.
  void add_page_sets(PageSets& to, std::span<const Interval> indices) const VT_LOCKED;
  // Writable pages that something else keeps too.
  std::vector<Reservation::Run> offered_in(Interval indices) const VT_LOCKED;
  // Before their pages are mapped here: nothing writes to them any more.
  void protect_origins(std::span<const std::shared_ptr<PageSet>> page_sets) const;
  [[noreturn]] void raise_lost() const;
  // Waits until nothing is mapped at `indices`, and makes entries for them.
  void await_places(PoolLock& lock, Interval indices) const VT_LOCKED;

  Buffer& buffer_;
  Reservation& range_;
  PagePool& pool_;
  const Caller& caller_;
};

}  // namespace vtensor
