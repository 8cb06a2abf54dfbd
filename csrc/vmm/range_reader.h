// A range of addresses at which this process reads the pages of another's shared range
// (vmm/shared_range.h). What it shows changes in `sync` alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/fault_report.h"
#include "base/interval.h"
#include "base/process.h"
#include "base/sparse_array.h"
#include "driver/driver.h"
#include "vmm/shared_file.h"
#include "vmm/shared_layout.h"

namespace vtensor {

class RangeReader {
 public:
  // `range` and `memory` are what SharedRange::open_for_reader and Driver::open_memory returned in
  // the other process; they are closed in any case. `words`: how many the owner keeps. Throws
  // InvalidArgument if they are no such files or do not belong together, Error if there are too
  // many readers, DriverError. Nothing is mapped before all is checked.
  RangeReader(int range, int memory, std::size_t words);
  ~RangeReader();
  RangeReader(const RangeReader&) = delete;
  RangeReader& operator=(const RangeReader&) = delete;

  // Whether a sync would find anything new.
  static bool stale(std::span<RangeReader* const> ranges);
  // Shows what the first range's words and all tables say now, the words of one moment. The other
  // ranges belong to the same writer. Returns whether anything has changed. Makes no system call
  // if nothing has, but for one look each kLook at whether the writer lives. Not two threads at a
  // time. Throws Closed if the owner has left or its process has ended, Asleep, TimedOut if the
  // writer is stopped while it changes something, DriverError; what was shown before is still
  // shown then, but for pages that came since.
  static bool sync(std::span<RangeReader* const> ranges);

  // Whether it is one of a process that this one was forked from: then it has neither memory nor a
  // place any more, and must not be used or destroyed.
  bool left_behind() const { return fork_depth.load(std::memory_order_relaxed) != fork_depth_; }

  Address base() const { return base_; }
  std::size_t bytes() const { return parts_.sizes.pages * page_size_; }
  std::size_t page_size() const { return page_size_; }
  // As last synced.
  std::span<const std::uint64_t> words() const { return words_; }
  std::size_t mapped() const { return mapped_; }  // pages
  CallMeter& meter() { return driver_->meter(); }
  // The page of the writer's memory at the n-th page; -1 if there is none.
  std::int64_t handle_at(std::size_t n) const;

 private:
  // Of a page: 1 + its handle; 0 if none is mapped.
  using Entry = std::uint64_t;
  static constexpr std::chrono::milliseconds kLook{50};

  std::uint64_t table_version() const {
    return parts_.header().table_version.load(std::memory_order_seq_cst);
  }
  std::uint64_t words_version() const {
    return parts_.header().words_version.load(std::memory_order_acquire);
  }
  void take_place();
  void require_open(bool look);
  bool writer_lives() const { return file_.is_locked(shared::kWriterLife, 1); }
  std::vector<Interval> changed_since_sync(std::uint64_t version) const;
  bool read_words(std::uint64_t& version, std::vector<std::uint64_t>& words) const;
  void read_table();
  void show(std::span<const Interval> changed, std::span<const Entry> entries);
  void map_fresh(std::span<const Interval> fresh, std::span<const Handle> handles);
  template <typename Read>
  void read_whole(Read read);

  const std::uint32_t fork_depth_ = fork_depth.load(std::memory_order_relaxed);  // when it was made
  SharedFile file_;
  shared::Parts parts_{};
  std::size_t page_size_ = 0;
  std::uint64_t memory_pages_ = 0;  // of the writer's memory
  std::size_t place_ = 0;
  std::unique_ptr<Driver> driver_;
  Address base_ = 0;
  SparseArray<Entry> entries_;  // what is mapped
  std::size_t mapped_ = 0;      // pages
  std::vector<std::uint64_t> words_;
  std::uint64_t seen_words_ = 0, seen_table_ = 0;  // versions
  std::chrono::steady_clock::time_point looked_at_{};
  faults::Known known_;
};

}  // namespace vtensor
