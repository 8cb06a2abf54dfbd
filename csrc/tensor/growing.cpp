#include "tensor/growing.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "policy/make_room.h"
#include "vmm/copy_on_write.h"

namespace vtensor {
namespace {

// The growth of one buffer: its missing and shared pages, and how far it has come.
class Growing {
 public:
  Growing(const Growth& growth, const Caller& caller) VT_LOCKED
      : buffer_(*growth.buffer),
        range_(buffer_.range()),
        growth_(growth),
        caller_(caller),
        wanted_(wider(buffer_.indices_of(growth.positions), buffer_.extent())),
        written_(buffer_.indices_of(growth.written)),
        added_(buffer_.extent().empty() ? wanted_ : Interval{buffer_.extent().end, wanted_.end}) {
    range_.reserve(wanted_);
  }

  // Finds the pages to map and to unshare now. Throws if a capture forbids it.
  void look() VT_LOCKED {
    arrival_.runs = range_.collect(added_, is_unmapped);
    copy_on_write_.clear();
    if (buffer_.shares()) copy_on_write_ = range_.collect(written_, is_copy_on_write);
    missing_ = 0;
    for (const Reservation::Run& run : arrival_.runs) missing_ += run.indices.size();
    unordered_ = !added_.empty() && !buffer_.is_quiet();
    if (missing_ != 0 || !copy_on_write_.empty() || unordered_ ||
        !range_.unclean_in(added_, 1).empty())
      buffer_.require_no_capture(caller_);
  }

  // Remapping is not ordered with streams, so pages that unsharing remaps must not be in use.
  void await_streams(PoolLock& lock) VT_LOCKED {
    if (!copy_on_write_.empty()) buffer_.await_streams(lock, caller_);
  }

  // True if that let the lock go.
  bool await_turn(PoolLock& lock) VT_LOCKED { return buffer_.await_turn(lock, caller_); }
  std::size_t missing() const { return missing_; }
  std::span<const Reservation::Run> copy_on_write() const { return copy_on_write_; }
  const Page* page_at(std::size_t row, std::size_t index) const VT_LOCKED {
    return range_.at(row, index).page();
  }
  // Pages that unsharing takes now.
  std::size_t fresh() const VT_LOCKED { return count_fresh_pages(range_, copy_on_write_); }

  // From here on the buffer is busy. Requires: it was not.
  void begin(PoolLock& lock) VT_LOCKED {
    busy_ = std::make_unique<Buffer::Busy>(buffer_, lock, caller_);
    buffer_.note(caller_);
  }

  void add_arriving(std::vector<Reservation::Arriving>& arriving) {
    if (missing_ != 0) arriving.push_back({&range_, &arrival_});
  }

  // Zeroes and unshares: the driver calls beside mapping new pages.
  void finish(PoolLock& lock) VT_LOCKED {
    if (unordered_) buffer_.order(caller_.stream);
    range_.make_clean(range_.unclean_in(added_), caller_.stream);
    buffer_.unshare(lock, caller_, copy_on_write_, growth_.stale);
  }

  // What came is unneeded, and goes after the caller's work.
  void give_back() VT_LOCKED { buffer_.note(caller_); }

  // Cannot fail.
  void commit() VT_LOCKED { buffer_.grow_to(growth_.positions, wanted_, missing_ == 0); }

 private:
  // An accepted prefix may be longer in pages than in positions.
  static Interval wider(Interval wanted, Interval extent) {
    return wanted.empty() ? wanted : Interval{wanted.begin, std::max(wanted.end, extent.end)};
  }

  Buffer& buffer_;
  Reservation& range_;
  const Growth growth_;
  const Caller& caller_;
  const Interval wanted_;   // page indices that the positions need
  const Interval written_;  // page indices to be writable
  const Interval added_;    // page indices past the extent: some may be missing
  Reservation::Arrival arrival_;
  std::vector<Reservation::Run> copy_on_write_;
  std::size_t missing_ = 0;
  bool unordered_ = false;
  std::unique_ptr<Buffer::Busy> busy_;
};

// Pages that a growth takes after it has let the lock go: until then nothing else gets them.
class Promise {
 public:
  Promise(PageStore& store, std::size_t pages) VT_LOCKED : store_(store), pages_(pages) {
    store_.promise(static_cast<std::ptrdiff_t>(pages));
  }
  ~Promise() VT_LOCKED { redeem(pages_); }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  // About to be taken, as far as they were promised.
  void redeem(std::size_t pages) VT_LOCKED {
    pages = std::min(pages, pages_);
    pages_ -= pages;
    store_.promise(-static_cast<std::ptrdiff_t>(pages));
  }

 private:
  PageStore& store_;
  std::size_t pages_;
};

// How many pages unsharing takes in all: if all that share a page unshare it, the last one keeps
// it.
std::size_t fresh_pages_for(std::span<const Growing> all) VT_LOCKED {
  if (all.size() == 1) return all.front().fresh();
  std::size_t fresh = 0;
  std::unordered_map<const Page*, std::uint32_t> unsharing;
  for (const Growing& one : all) {
    for (const Reservation::Run& run : one.copy_on_write()) {
      for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
        const Page* page = one.page_at(run.row, index);
        fresh += ++unsharing[page] < page->references;
      }
    }
  }
  return fresh;
}

}  // namespace

void grow_all(const Caller& caller, std::span<const Growth> growths, bool populate) {
  if (growths.empty()) return;
  const std::shared_ptr<PagePool>& pool = growths.front().buffer->pool();
  PoolLock lock(pool);
  pool->reap();
  std::vector<Growing> all;
  all.reserve(growths.size());
  for (const Growth& growth : growths) all.emplace_back(growth, caller);
  for (Growing& one : all) one.look();
  for (Growing& one : all) one.await_streams(lock);
  std::size_t to_unshare = 0;
  for (bool again = true; again;) {
    again = false;
    for (Growing& one : all) again |= one.await_turn(lock);
    if (again) continue;  // while one was waited for, another may have become busy
    std::size_t missing = 0;
    for (Growing& one : all) {
      one.look();
      missing += one.missing();
    }
    to_unshare = fresh_pages_for(all);
    again = MakeRoom(*pool).ready(lock, caller.operation, missing + to_unshare);
  }
  for (Growing& one : all) one.begin(lock);
  std::vector<Reservation::Arriving> arriving;
  for (Growing& one : all) one.add_arriving(arriving);
  Promise promise(pool->store(), to_unshare);
  try {
    Reservation::map(lock, arriving, caller.stream, populate);
    for (Growing& one : all) {
      promise.redeem(one.fresh());
      one.finish(lock);
    }
    promise.redeem(to_unshare);
  } catch (...) {
    promise.redeem(to_unshare);
    for (Growing& one : all) one.give_back();
    throw;
  }
  for (Growing& one : all) one.commit();
}

}  // namespace vtensor
