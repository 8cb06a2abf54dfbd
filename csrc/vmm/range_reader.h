// The ranges of one object of another process (vmm/shared_range.h), at addresses where this process
// reads the pages. Their mappings change in `sync` only.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/descriptor.h"
#include "base/fault_report.h"
#include "base/process.h"
#include "base/sparse_array.h"
#include "driver/driver.h"
#include "vmm/shared_file.h"
#include "vmm/shared_layout.h"
#include "vmm/writer_memory.h"

namespace vtensor {

class RangeReader {
 public:
  Address base() const { return base_; }
  std::size_t pages() const { return parts_.sizes.pages; }
  // The owner's words, as of the last sync.
  std::span<const std::uint64_t> words() const { return words_; }
  std::size_t mapped() const { return mapped_; }  // pages
  // The writer's handle of the n-th page; -1 if there is none.
  std::int64_t handle_at(std::size_t n) const { return static_cast<std::int64_t>(entries_[n]) - 1; }

 private:
  friend class RangeReaders;

  // A page: 1 + the writer's handle; 0 if none is mapped.
  using Entry = std::uint64_t;
  static constexpr std::chrono::milliseconds kLook{50};  // between looks whether the writer lives
  // Neighbouring pages, and their new entries.
  struct Run {
    std::size_t first;
    std::vector<Entry> entries;
  };
  // Changes of the writer's table.
  struct Table {
    std::uint64_t version = 0;
    std::map<std::size_t, std::array<Entry, shared::kBlock>> blocks;  // changed blocks, by number
    // Runs that change here: mapped where nothing is, replaced, unmapped.
    std::vector<Run> fresh = {}, other = {}, gone = {};
  };

  // The facts in `file`. Throws InvalidArgument if it is no shared range with `words` words.
  static shared::Facts checked(const Descriptor& file, std::size_t words);
  // Throws Error if there are too many readers, DriverError.
  RangeReader(const Descriptor& file, const shared::Facts& facts, WriterMemory& memory);

  std::uint64_t table_version() const {
    return parts_.header().table_version.load(std::memory_order_seq_cst);
  }
  std::uint64_t words_version() const {
    return parts_.header().words_version.load(std::memory_order_acquire);
  }
  void take_place();
  void require_open(bool look);
  void copy_table(Table& table);
  void compare(Table& table) const;
  void enter(const Run& run) noexcept;
  std::vector<Handle> ours(const Run& run) const;
  // The steps of taking over a table. The last one tells the writer.
  void map_fresh(const Table& table);
  void replace_other(const Table& table);
  void unmap_gone(const Table& table);
  // Unmaps all pages, and frees the addresses.
  void end();
  Address at(std::size_t n) const { return base_ + n * memory_.driver().traits().page_size; }
  template <typename Read>
  void read_whole(Read read);

  WriterMemory& memory_;
  SharedFile file_;
  shared::Parts parts_{};
  std::size_t place_ = 0;
  Address base_ = 0;
  SparseArray<Entry> entries_;  // what is mapped
  std::size_t mapped_ = 0;      // pages
  std::vector<std::uint64_t> words_;
  std::uint64_t seen_words_ = 0, seen_table_ = 0;  // versions
  std::chrono::steady_clock::time_point looked_at_{};
  faults::Known known_;
};

class RangeReaders {
 public:
  // `files` come from SharedRange::open_for_reader in the writer's process, `memory` from
  // PagePool::open_for_readers. `words`: number of the owner's words, in the first range. Throws
  // InvalidArgument if the files are others or do not belong together, Error if there are too many
  // readers, DriverError. Checks everything before it maps.
  RangeReaders(std::span<const Descriptor> files, Descriptor memory, std::size_t words,
               const CudaOptions& cuda);

  // Waits for the caller's kernels first. If the wait fails, the pages are left over.
  ~RangeReaders();
  RangeReaders& operator=(RangeReaders&&) = delete;

  // Whether the writer has changed anything since the last sync.
  bool stale() const;
  // If `stale`, the answer of stale(), takes over the first range's words and all tables, each as
  // of one moment. If not, makes no system call, but for a look each kLook whether the writer
  // lives. Returns `stale`. On a device it waits for the work that the writer has launched, and
  // before it unmaps pages for the caller's work. One thread at a time. Throws Closed if the owner
  // has left or its process has ended, Asleep, TimedOut, DriverError, and Error if the writer sends
  // no pages: then the words are the old ones, or the new ones if only unmapping was refused. After
  // a refusal that cannot be undone, every sync throws it.
  bool sync(const Caller& caller, bool stale);

  // Whether the ranges belong to a process that this process was forked from: then they have
  // neither memory nor a place, and must not be used or destroyed.
  bool left_behind() const { return fork_depth.load(std::memory_order_relaxed) != fork_depth_; }

  std::size_t size() const { return ranges_.size(); }
  const RangeReader& at(std::size_t i) const { return *ranges_.at(i); }
  WriterMemory& memory() const { return *memory_; }

 private:
  const std::uint32_t fork_depth_ = fork_depth.load(std::memory_order_relaxed);  // when made
  std::vector<std::unique_ptr<RangeReader>> ranges_;
  // Destroyed first: its driver unmaps all pages before the places end and the writer reuses them.
  std::unique_ptr<WriterMemory> memory_;
};

}  // namespace vtensor
