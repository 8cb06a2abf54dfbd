// Sharing of pages: making them copy-on-write, and giving a writer a page of its own again. Each
// function is whole or nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/interval.h"
#include "vmm/reservation.h"

namespace vtensor {

// Makes writable runs copy-on-write, before their pages are shared. Releases the lock meanwhile,
// unless `lock` is null. Requires: no work that may write to the runs is left in any stream.
void make_copy_on_write(Reservation& range, PoolLock* lock, std::span<const PageTable::Run> runs)
    VT_LOCKED;

// Maps a page of its own, with the same bytes, writable at each index of the copy-on-write `runs`,
// and zeroes `stale` last, in `stream`. After a refusal, pages that the kernel had copied may stay
// unshared, which only counts show. Throws TimedOut if copies may still run in the side stream.
void unshare_pages(Reservation& range, PoolLock& lock, std::span<const PageTable::Run> runs,
                   std::span<const Reservation::Bytes> stale, Stream stream) VT_LOCKED;
// Pages that unsharing `runs` takes from the pool: a page with one reference is kept.
std::size_t count_fresh_pages(const Reservation& range, std::span<const PageTable::Run> runs)
    VT_LOCKED;

// Whether the next sharer that unshares `page` takes a new page: the last sharer keeps `page`,
// unless readers in other processes may see it. `unsharing` counts the sharers so far.
bool takes_fresh_page(const Reservation& range, const Page& page, std::uint32_t& unsharing)
    VT_LOCKED;

// Pages from `index` on, mapped in one state, that copy-on-write pages `to` replace. Requires: a
// driver that remaps in one step, because an owner would lose a page that cannot be put back.
struct PageChange {
  Reservation* range;
  std::size_t row, index;
  std::vector<Page*> to;
};
void remap_pages(std::span<const PageChange> changes) VT_LOCKED;

// The pages of copy-on-write runs that the kernel copied at a write, as the driver reports them. A
// page falsely reported as copied costs only a copy.
std::vector<std::uint8_t> find_private_copies(const Reservation& range, const PageTable::Run& run)
    VT_LOCKED;
std::vector<PageTable::Run> private_copies_in(const Reservation& range, Interval indices) VT_LOCKED;
// Private copies in `runs`, which unsharing gives back to the kernel.
std::size_t count_private_copies(const Reservation& range, std::span<const PageTable::Run> runs)
    VT_LOCKED;
// Private copies in the whole range. If the system does not say which pages it copied, all
// copy-on-write pages of a handle but one count as copies. `seen` collects the pages counted so
// far, in all ranges.
std::size_t count_private_copies(const Reservation& range, std::unordered_set<const Page*>& seen)
    VT_LOCKED;

}  // namespace vtensor
