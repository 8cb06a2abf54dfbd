// Ranges of addresses that other processes read (vmm/shared_layout.h), and the pages that only
// these still read. The idea of a version that each reader holds is that of epoch-based
// reclamation.
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

  // -- the table: each hold of the lock is one change to readers

  // So many pages are to come, and each to go: makes room to keep them. Throws std::bad_alloc.
  void expect(std::size_t pages) VT_LOCKED;
  // So many do not come.
  void forgo(std::size_t pages) noexcept VT_LOCKED { expected_ -= pages; }
  // `page` is mapped at the n-th page of the range.
  void came(std::size_t n, const Page* page) noexcept VT_LOCKED;
  // Page `page` is mapped there no longer. Takes over its reference, and drops it once no reader
  // can read the page.
  void went(std::size_t n, Page* page) noexcept VT_LOCKED;

  // -- words; not two threads at a time

  std::uint64_t word(std::size_t n) const noexcept {
    return parts_.word(n).load(std::memory_order_relaxed);
  }
  // Begins to bring near what set_words will write: after a decode step it is in no cache.
  void prefetch_words() const noexcept {
    __builtin_prefetch(&parts_.header().words_version, 1);
    prefetch_lines<true>(&parts_.word(0), parts_.sizes.words * sizeof(shared::Word));
  }
  // The words from `first` on become `values`, as one change to readers; none if they are so
  // already.
  void set_words(std::size_t first, std::span<const std::int64_t> values) noexcept;

  // Readers learn that the memory is away, or back.
  void set_asleep(bool asleep) noexcept VT_LOCKED {
    set_state(asleep ? shared::State::asleep : shared::State::open);
  }
  // Readers learn that the owner has left; they keep what they have.
  void close() noexcept VT_LOCKED { set_state(shared::State::closed); }
  // Whether a reader lives, in one question to the system; how many do.
  bool is_read() const { return file_.is_locked(shared::kReaderLives, shared::kMostReaders); }
  std::size_t readers() const;
  // An open file of its own over the shared file, for another process.
  Descriptor open_for_reader(const char* operation) const;

 private:
  friend class SharedRanges;

  struct Kept {
    Page* page;
    std::uint64_t version;  // of the first table without it
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
  std::uint64_t version_ VT_GUARDED = 2;  // of the table as published last; even
  bool changing_ VT_GUARDED = false;      // the published version is odd
  std::vector<Kept> kept_ VT_GUARDED;     // oldest first, with room for all that may go
  std::size_t expected_ VT_GUARDED = 0;   // pages that may go
};

// A pool's.
class SharedRanges {
 public:
  SharedRanges(Driver& driver, PageStore& store) : driver_(driver), store_(store) {}
  SharedRanges& operator=(SharedRanges&&) = delete;

  // A range of `pages` pages with `words` words. `backed`: as it was reserved. Throws
  // InvalidArgument if the memory is not shareable, DriverError.
  std::shared_ptr<SharedRange> add(const char* operation, Address base, std::size_t pages,
                                   std::size_t words, Backed backed) VT_LOCKED;
  // Which memory the pages lie in; the same for all ranges.
  FileId memory() const VT_LOCKED { return memory_; }
  // Before the lock is let go: readers see what has changed, and pages that none of them reads are
  // dropped. True if some were kept since the last time, for which collect() is to be called soon.
  bool publish() noexcept VT_LOCKED;
  // Drops pages that no reader can read any more. False if none is left.
  bool collect() noexcept VT_LOCKED;
  // Pages that are in use only because a reader may read them, or a page table has them too.
  std::size_t kept() const VT_LOCKED;
  // Ranges with living readers.
  std::unordered_set<const SharedRange*> read() const VT_LOCKED;

 private:
  friend class SharedRange;

  Driver& driver_;
  PageStore& store_;
  FileId memory_ VT_GUARDED;  // zeros until a range is shared; of a device, that range's file
  std::vector<std::shared_ptr<SharedRange>> all_ VT_GUARDED;
  std::vector<SharedRange*> changing_ VT_GUARDED;
  bool keeps_ VT_GUARDED = false;  // pages were kept since `publish`
};

}  // namespace vtensor
