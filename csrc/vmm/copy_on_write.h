// Pages that several page tables have: what makes them copy-on-write, and gives a writer a page of
// its own again. Each of these is whole or nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/interval.h"
#include "vmm/reservation.h"

namespace vtensor {

// Makes writable runs copy-on-write, which are about to be shared. Lets the lock go meanwhile,
// unless it is null. Requires: no work that may write to the runs is left in any stream.
void make_copy_on_write(Reservation& range, PoolLock* lock, std::span<const PageTable::Run> runs)
    VT_LOCKED;

// Gives each copy-on-write page of `runs` a page of its own with what is seen there, mapped
// writable, and zeroes `stale` at the end, in `stream`. If that is refused, pages that the kernel
// had copied may stay unshared, which only the counts show. Throws TimedOut if copies may still
// run, in the side stream.
void unshare_pages(Reservation& range, PoolLock& lock, std::span<const PageTable::Run> runs,
                   std::span<const Reservation::Bytes> stale, Stream stream) VT_LOCKED;
// Pages that unsharing `runs` takes from the pool: a page with one reference left is kept.
std::size_t count_fresh_pages(const Reservation& range, std::span<const PageTable::Run> runs)
    VT_LOCKED;

// Whether unsharing `page` takes a page for one more of its sharers, after `unsharing` of them: the
// last one keeps it, unless readers in other processes may see what is replaced.
bool takes_fresh_page(const Reservation& range, const Page& page, std::uint32_t& unsharing)
    VT_LOCKED;

// Pages from `index` on, of one state, to be replaced by `to`, copy-on-write. Requires: a driver
// that remaps in one step, because a page that cannot be put back would leave its owner without it.
struct PageChange {
  Reservation* range;
  std::size_t row, index;
  std::vector<Page*> to;
};
void remap_pages(std::span<const PageChange> changes) VT_LOCKED;

// The pages of copy-on-write runs that the kernel copied at a write, as the driver reports them. A
// page taken for copied by mistake costs a copy, not correctness.
std::vector<std::uint8_t> find_private_copies(const Reservation& range, const PageTable::Run& run)
    VT_LOCKED;
std::vector<PageTable::Run> private_copies_in(const Reservation& range, Interval indices) VT_LOCKED;
// Private copies in `runs`: pages that unsharing gives back to the kernel.
std::size_t count_private_copies(const Reservation& range, std::span<const PageTable::Run> runs)
    VT_LOCKED;
// Counts a whole range. If the system does not say what was copied, copy-on-write pages count as if
// each had memory of its own: all but one page of a handle are copies. `seen` has the pages counted
// so far, in this range and in others.
std::size_t count_private_copies(const Reservation& range, std::unordered_set<const Page*>& seen)
    VT_LOCKED;

}  // namespace vtensor
