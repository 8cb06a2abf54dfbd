// Buffer: growing. Pages are claimed with the lock, mapped without it, and entered with it again.
#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "policy/make_room.h"
#include "tensor/buffer.h"
#include "vmm/copy_on_write.h"

namespace vtensor {

// The growth of one buffer: its missing and shared pages, and how far it has come.
struct Buffer::Growing {
  Growing(const Growth& growth, const Caller& caller) VT_LOCKED
      : buffer(*growth.buffer),
        range(buffer.range_),
        growth(growth),
        caller(caller),
        wanted(buffer.extent_of(growth.positions)),
        written(buffer.indices_of(growth.written)),
        added(buffer.extent_.empty() ? wanted : Interval{buffer.extent_.end, wanted.end}) {
    range.reserve(wanted);
  }

  // Finds the pages to map and to unshare now. Throws if a capture forbids it.
  void look() VT_LOCKED {
    arrival.runs = range.collect(added, is_unmapped);
    copy_on_write.clear();
    if (buffer.shares()) copy_on_write = range.collect(written, is_copy_on_write);
    missing = Reservation::pages_of(arrival.runs);
    unordered = !added.empty() && !buffer.is_quiet();
    if (missing != 0 || !copy_on_write.empty() || unordered || !range.unclean_in(added, 1).empty())
      buffer.require_no_capture(caller);
  }

  // Remapping is not ordered with streams, so pages that unsharing remaps must not be in use: waits
  // once, if there are any. True if it let the lock go.
  bool await_writers(PoolLock& lock) VT_LOCKED {
    if (awaited || copy_on_write.empty()) return false;
    buffer.await_streams(lock, caller);
    return awaited = true;
  }

  // Pages that unsharing takes now.
  std::size_t fresh() const VT_LOCKED { return count_fresh_pages(range, copy_on_write); }

  // Zeroes and unshares: the driver calls beside mapping new pages.
  void finish(PoolLock& lock) VT_LOCKED {
    if (unordered) buffer.order(caller.stream);
    range.make_clean(lock, range.unclean_in(added), caller.stream);
    buffer.unshare_runs(lock, caller, copy_on_write, growth.stale);
  }

  Buffer& buffer;
  Reservation& range;
  const Growth growth;
  const Caller& caller;
  const Interval wanted;   // page indices that the positions need
  const Interval written;  // page indices to be writable
  const Interval added;    // page indices past the extent: some may be missing
  Reservation::Arrival arrival;
  std::vector<Reservation::Run> copy_on_write;
  std::size_t missing = 0;
  bool unordered = false;
  bool awaited = false;  // the streams
  std::unique_ptr<Busy> busy;
};

// How many pages unsharing takes in all: if all that share a page unshare it, the last one keeps
// it.
std::size_t Buffer::fresh_pages_for(std::span<const Growing> all) {
  if (all.size() == 1) return all.front().fresh();
  std::size_t fresh = 0;
  std::unordered_map<const Page*, std::uint32_t> unsharing;
  for (const Growing& one : all) {
    for (const Reservation::Run& run : one.copy_on_write) {
      one.range.each_page(run, [&](const Page* page) VT_LOCKED {
        fresh += takes_fresh_page(one.range, *page, unsharing[page]);
      });
    }
  }
  return fresh;
}

void Buffer::grow(const Caller& caller, Interval positions, bool populate, Interval stale) {
  const Interval added{std::max(positions_.end, positions.begin), positions.end};
  const Growth growth{this, positions, added, stale};
  grow_all(caller, {&growth, 1}, populate);
}

void Buffer::unshare(const Caller& caller, Interval positions) {
  const Growth growth{this, positions_, positions};
  grow_all(caller, {&growth, 1}, false);
}

void Buffer::grow_all(const Caller& caller, std::span<const Growth> growths, bool populate) {
  if (growths.empty()) return;
  const std::shared_ptr<PagePool>& pool = growths.front().buffer->pool_;
  PoolLock lock(pool);
  std::vector<Growing> all;
  all.reserve(growths.size());
  for (const Growth& growth : growths) all.emplace_back(growth, caller);
  std::size_t to_unshare = 0;
  const auto needed = [&]() VT_LOCKED {
    std::size_t missing = 0;
    for (Growing& one : all) {
      one.look();
      missing += one.missing;
    }
    to_unshare = fresh_pages_for(all);
    return missing + to_unshare;
  };
  for (bool again = true; again;) {
    again = false;
    for (Growing& one : all) again |= one.buffer.await_turn(lock, caller);
    if (again) continue;  // while one was waited for, another may have become busy
    const std::size_t pages = needed();
    for (Growing& one : all) again |= one.await_writers(lock);
    if (again) continue;
    std::size_t copied = 0;  // by the kernel: unsharing replaces these pages
    if (pages > pool->store().unused()) {
      for (const Growing& one : all) copied += count_private_copies(one.range, one.copy_on_write);
    }
    try {
      again = MakeRoom(*pool).ready(lock, caller.operation, pages, copied);
    } catch (const OutOfPages&) {
      // By now other sharers may have left, so that fewer pages are to be copied.
      again = needed() < pages;
      if (!again) throw;
    }
  }
  for (Growing& one : all) one.busy = std::make_unique<Busy>(one.buffer, lock, caller);
  std::vector<Reservation::Arrival*> arriving;
  for (Growing& one : all) {
    one.buffer.work_.note(caller);
    one.arrival.range = &one.range;
    if (one.missing != 0) arriving.push_back(&one.arrival);
  }
  // Pages that are taken once the lock was let go: until then nothing else gets them.
  std::size_t promised = to_unshare;
  pool->store().promise(static_cast<std::ptrdiff_t>(promised));
  const auto redeem = [&](std::size_t pages) VT_LOCKED {
    pages = std::min(pages, promised);
    promised -= pages;
    pool->store().promise(-static_cast<std::ptrdiff_t>(pages));
  };
  try {
    Reservation::map(lock, arriving, caller.stream, populate);
    for (Growing& one : all) {
      redeem(one.fresh());
      one.finish(lock);
    }
    redeem(promised);
  } catch (...) {
    redeem(promised);
    // What came goes after the caller's work, and is used after its zeroing, in whichever stream.
    for (Growing& one : all) one.buffer.zeroing_ = true;
    for (Growing& one : all) one.buffer.work_.note(caller);
    throw;
  }
  // From here on nothing can fail.
  for (Growing& one : all) one.buffer.grow_to(one.growth.positions, one.wanted, one.missing == 0);
}

}  // namespace vtensor
