// Ranges of addresses that other processes read (vmm/shared_layout.h), and pages that only readers
// still use: epoch-based reclamation, with the version that each reader holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/align.h"
#include "base/descriptor.h"
#include "vmm/page_store.h"
#include "vmm/pool_lock.h"
#include "vmm/shared_file.h"
#include "vmm/shared_layout.h"

namespace vtensor {

class SharedRanges;

class SharedRange {
 public:
  Address base() const { return base_; }

  // -- the table; readers see all changes of one hold of the lock at once

  // `pages` pages will be mapped, and later unmapped: makes room to keep them. Throws bad_alloc.
  void expect(std::size_t pages) VT_LOCKED;
  // `pages` of the expected pages will not be mapped.
  void forgo(std::size_t pages) noexcept VT_LOCKED { expected_ -= pages; }
  // `page` was mapped at the n-th page of the range.
  void came(std::size_t n, const Page* page) noexcept VT_LOCKED;
  // `page` was unmapped from the n-th page of the range. Takes over its reference, and drops it
  // once no reader can read the page.
  void went(std::size_t n, Page* page) noexcept VT_LOCKED;

  // -- words; one thread at a time

  std::uint64_t word(std::size_t n) const noexcept {
    return parts_.word(n).load(std::memory_order_relaxed);
  }
  // Prefetches the memory that set_words writes: after a decode step it is in no cache.
  void prefetch_words() const noexcept {
    __builtin_prefetch(&parts_.header().words_version, 1);
    prefetch_lines<true>(&parts_.word(0), parts_.sizes.words * sizeof(shared::Word));
  }
  // Sets the words from `first` on to `values`, which readers see as one change; does nothing if
  // they have these values.
  void set_words(std::size_t first, std::span<const std::int64_t> values) noexcept;

  // Tells readers that the memory is asleep, or awake.
  void set_asleep(bool asleep) noexcept VT_LOCKED {
    set_state(asleep ? shared::State::asleep : shared::State::open);
  }
  // Tells readers that the owner has left; they keep the pages that they have.
  void close() noexcept VT_LOCKED { set_state(shared::State::closed); }
  // Whether a reader lives, by one system call; how many readers live.
  bool is_read() const { return file_.is_locked(shared::kReaderLives, shared::kMostReaders); }
  std::size_t readers() const;
  // An open file of its own over the shared file, for another process.
  Descriptor open_for_reader(const char* operation) const;

 private:
  friend class SharedRanges;

  struct Kept {
    Page* page;
    std::uint64_t version;  // version of the first table without the page
  };

  SharedRange(SharedRanges& all, const char* operation, Address base, shared::Sizes sizes,
              Backed backed) VT_LOCKED;
  void set_state(shared::State state) noexcept VT_LOCKED;
  bool closed() const {
    return parts_.header().state.load(std::memory_order_relaxed) ==
           static_cast<std::uint64_t>(shared::State::closed);
  }
  void change(std::size_t n, std::uint64_t entry) noexcept VT_LOCKED;
  void publish() noexcept VT_LOCKED;
  // Calls visit(place) for the living readers.
  template <typename Visit>
  void each_reader(Visit visit) const;

  SharedRanges& all_;
  const Address base_;
  SharedFile file_;
  shared::Parts parts_{};
  std::uint64_t version_ VT_GUARDED = 2;  // the last published version of the table; even
  bool changing_ VT_GUARDED = false;      // the published version is odd
  std::vector<Kept> kept_ VT_GUARDED;     // oldest first, with capacity for `expected_` more
  std::size_t expected_ VT_GUARDED = 0;   // mapped and expected pages, each of which may go
};

// The shared ranges of a pool.
class SharedRanges {
 public:
  SharedRanges(Driver& driver, PageStore& store) : driver_(driver), store_(store) {}
  SharedRanges& operator=(SharedRanges&&) = delete;

  // A range of `pages` pages with `words` words. `backed`: as the range was reserved. Throws
  // InvalidArgument if the memory is not shareable, DriverError.
  std::shared_ptr<SharedRange> add(const char* operation, Address base, std::size_t pages,
                                   std::size_t words, Backed backed) VT_LOCKED;
  // Identifies the memory of the pages, for all ranges.
  FileId memory() const VT_LOCKED { return memory_; }
  // Called before the lock is released: publishes changes to readers, and drops pages that no
  // reader can read. True if pages were kept since the last call, so that collect() is to be called
  // soon.
  bool publish() noexcept VT_LOCKED;
  // Drops pages that no reader can read any more. False if none is left.
  bool collect() noexcept VT_LOCKED;
  // Pages that have left a table and are kept for readers; a page table may have them too.
  std::size_t kept() const VT_LOCKED;
  // Ranges with living readers.
  std::unordered_set<const SharedRange*> read() const VT_LOCKED;

 private:
  friend class SharedRange;

  Driver& driver_;
  PageStore& store_;
  FileId memory_ VT_GUARDED;  // zeros until a range is shared; on a device, the first range's file
  std::vector<std::shared_ptr<SharedRange>> all_ VT_GUARDED;
  std::vector<SharedRange*> changing_ VT_GUARDED;
  bool keeps_ VT_GUARDED = false;  // a page was kept since the last `publish`
};

}  // namespace vtensor
