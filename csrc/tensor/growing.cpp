// Growing: pages are claimed with the lock, mapped without it, and entered with it again; for one
// buffer or for many at once.
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "policy/make_room.h"
#include "tensor/buffer.h"
#include "vmm/copy_on_write.h"

namespace vtensor {

// What one buffer of a growth needs, and where it stands.
class Buffer::Growing {
 public:
  Growing(const Growth& growth, const Caller& caller) VT_LOCKED
      : buffer_(*growth.buffer),
        growth_(growth),
        caller_(caller),
        wanted_(wider(buffer_.indices_of(growth.positions), buffer_.extent_)),
        written_(buffer_.indices_of(growth.written)),
        searched_(buffer_.extent_.empty() ? wanted_ : Interval{buffer_.extent_.end, wanted_.end}) {
    buffer_.range_.reserve(wanted_.end);
  }

  // Finds what is missing now; throws where that cannot be had.
  void look() VT_LOCKED {
    buffer_.require_whole(caller_.operation);
    const Reservation& range = buffer_.range_;
    arrival_.runs = range.collect(searched_, is_unmapped);
    copy_on_write_.clear();
    if (range.copy_on_write() != 0) copy_on_write_ = range.collect(written_, is_copy_on_write);
    missing_ = 0;
    for (const Reservation::Run& run : arrival_.runs) {
      require_not_quarantined(run);
      missing_ += run.indices.size();
    }
    unordered_ = !searched_.empty() && !all_passed(buffer_.driver_, buffer_.ready_after_);
    if (missing_ != 0 || !copy_on_write_.empty() || unordered_ ||
        !range.unclean_in(searched_).empty())
      buffer_.require_no_capture(caller_);
  }

  // Remapping is not ordered with streams, so what unsharing remaps must not be in use.
  void await_streams(PoolLock& lock) VT_LOCKED {
    if (copy_on_write_.empty()) return;
    const Busy busy(buffer_, lock, caller_);
    buffer_.await_streams(lock, caller_);
  }

  bool busy() const VT_LOCKED { return buffer_.busy_; }
  void await_turn(PoolLock& lock) VT_LOCKED { buffer_.await_turn(lock, caller_); }
  std::size_t missing() const { return missing_; }
  std::span<const Reservation::Run> copy_on_write() const { return copy_on_write_; }
  const Page* page_at(std::size_t row, std::size_t index) const VT_LOCKED {
    return buffer_.range_.at(row, index).page;
  }
  // Pages that unsharing takes now.
  std::size_t fresh() const VT_LOCKED { return count_fresh_pages(buffer_.range_, copy_on_write_); }

  // From here on the buffer is busy. Requires: it was not.
  void begin(PoolLock& lock) VT_LOCKED {
    busy_ = std::make_unique<Busy>(buffer_, lock, caller_);
    buffer_.work_.note(caller_);
  }

  bool arrives() const { return missing_ != 0; }
  Reservation::Arriving arriving() { return {&buffer_.range_, &arrival_}; }

  // What needs driver calls beside the new pages.
  void finish(PoolLock& lock) VT_LOCKED {
    if (unordered_) {
      for (const FencePtr& fence : buffer_.ready_after_)
        buffer_.driver_.order(caller_.stream, *fence);
    }
    buffer_.range_.make_clean(buffer_.range_.unclean_in(searched_), caller_.stream);
    buffer_.unshare(lock, caller_, copy_on_write_, growth_.stale);
  }

  void undo(PoolLock& lock) noexcept VT_LOCKED {
    buffer_.range_.undo(lock, caller_.stream, arrival_);
  }

  // The extent is the owner's: cannot fail.
  void commit() VT_LOCKED {
    Buffer& buffer = buffer_;
    if (!buffer.unclean_.empty()) {
      buffer.unclean_.begin = std::max(buffer.unclean_.begin, wanted_.end);
      if (buffer.unclean_.empty()) buffer.unclean_ = {};
    }
    if (searched_.end > searched_.begin) {
      ++(missing_ == 0 ? buffer.pool_->counted.growths_ready
                       : buffer.pool_->counted.growths_mapped);
      if (missing_ == 0) {
        buffer.range_.event(trace::What::revive, searched_);
      }
    }
    buffer.pace_.step(growth_.positions.size() - buffer.positions_.size());
    buffer.set_positions(growth_.positions);
    buffer.extent_ = wanted_;
    buffer.unmap_.remove(wanted_);
    buffer.set_ready({wanted_.end, std::max(wanted_.end, buffer.ready_.end)});
    if (buffer.placed()) return;  // its host says how far to look ahead
    buffer.mark_pace();
    buffer.look_ahead();
  }

 private:
  // An accepted prefix may be longer in pages than in positions.
  static Interval wider(Interval wanted, Interval extent) {
    return wanted.empty() ? wanted : Interval{wanted.begin, std::max(wanted.end, extent.end)};
  }
  void require_not_quarantined(const Reservation::Run& run) const VT_LOCKED {
    if (buffer_.range_.at(run.row, run.indices.begin).state != EntryState::quarantined) return;
    throw Error("[" + std::string(caller_.operation) + "] page " +
                std::to_string(run.indices.begin) + " of row " + std::to_string(run.row) +
                " is quarantined after a driver call that could not be undone: move the tensor to "
                "a new range with reallocate(capacity)");
  }

  Buffer& buffer_;
  const Growth growth_;
  const Caller& caller_;
  const Interval wanted_;    // pages that the positions need
  const Interval written_;   // of these, which are to be the buffer's own
  const Interval searched_;  // which may be missing
  Reservation::Arrival arrival_;
  std::vector<Reservation::Run> copy_on_write_;
  std::size_t missing_ = 0;
  bool unordered_ = false;
  std::unique_ptr<Busy> busy_;
};

void Buffer::grow(const Caller& caller, Interval positions, bool populate, Interval stale) {
  const Interval added{std::max(positions_.end, positions.begin), positions.end};
  const Growth growth{this, positions, added, stale};
  grow(caller, {&growth, 1}, populate);
}

// How many pages unsharing takes in all: if all that share a page unshare it, the last one keeps
// it.
std::size_t Buffer::fresh_pages_for(std::span<const Growing> all) {
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

void Buffer::grow(const Caller& caller, std::span<const Growth> growths, bool populate) {
  if (growths.empty()) return;
  const std::shared_ptr<PagePool>& pool = growths.front().buffer->pool_;
  PoolLock lock(pool);
  pool->reap();
  std::vector<Growing> all;
  all.reserve(growths.size());
  for (const Growth& growth : growths) all.emplace_back(growth, caller);
  for (Growing& one : all) one.look();
  for (Growing& one : all) one.await_streams(lock);
  std::size_t to_unshare = 0;
  for (bool again = true; again;) {
    for (Growing& one : all) one.await_turn(lock);
    if (std::any_of(all.begin(), all.end(),
                    [](const Growing& one) VT_LOCKED { return one.busy(); }))
      continue;  // again, while another was waited for
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
  for (Growing& one : all) {
    if (one.arrives()) arriving.push_back(one.arriving());
  }
  // Nobody else gets these while the lock is let go, here or in unsharing.
  auto promised = static_cast<std::ptrdiff_t>(to_unshare);
  pool->store().promise(promised);
  const auto redeem = [&](std::ptrdiff_t pages) VT_LOCKED {
    pool->store().promise(-pages);
    promised -= pages;
  };
  try {
    Reservation::map(lock, arriving, caller.stream, populate);
    for (Growing& one : all) {
      redeem(std::min(promised, static_cast<std::ptrdiff_t>(one.fresh())));
      one.finish(lock);
    }
    redeem(promised);
  } catch (...) {
    redeem(promised);
    for (Growing& one : all) one.undo(lock);
    throw;
  }
  for (Growing& one : all) one.commit();
}

void Buffer::require_ready(PoolLock& lock, const Caller& caller,
                           const std::function<std::pair<std::size_t, std::size_t>()>& missing) {
  bool again;
  do {
    await_turn(lock, caller);
    const auto [pages, private_copies] = missing();
    again = MakeRoom(*pool_).ready(lock, caller.operation, pages, private_copies);
  } while (again);
}

}  // namespace vtensor
