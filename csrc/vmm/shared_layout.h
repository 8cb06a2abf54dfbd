// The file by which a process shows a range of its addresses to other processes: which page of its
// memory stands where, and the words (lengths) of the owner. Only the writer changes it, but for
// the readers' places.
//
//   places   one a reader, which only the reader writes: the version whose pages it may read
//   header   sizes and versions
//   words    the owner's numbers, such as the begin and end of a tensor's positions
//   table    for each page of the range: 1 + the handle of the page mapped there; 0 if none
//   blocks   for each block of neighbouring pages: the version of its last change. A reader copies
//            only the blocks that changed
//
// Words and table have a version each, odd during a change (a seqlock). If a reader finds the
// version unchanged after its copy, the copy is of one moment.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/align.h"
#include "driver/driver.h"
#include "vmm/shared_file.h"

namespace vtensor::shared {

inline constexpr std::uint64_t kMagic = 0x6572616873747476;  // "vtshare"
inline constexpr std::uint32_t kLayout = 3;
inline constexpr std::size_t kMostReaders = 128;
inline constexpr std::size_t kBlock = 64;  // pages

// Bytes of the file whose locks say that the writer, or the reader of a place, lives.
inline constexpr off_t kWriterLife = 0;
inline constexpr off_t kReaderLives = 2;  // the first of one byte a place

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free);

struct alignas(64) Place {
  Word held;  // 0: the reader may read any page
};

enum class State : std::uint64_t { open, asleep, closed };

// The facts of a range, which never change.
struct Facts {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t words;      // number of words
  std::uint64_t pages;      // of the range
  std::uint64_t page_size;  // bytes
  FileId memory;            // the file with the pages; on a device, an id of the pool
  ExportKind exports;       // how a reader gets pages
  DeviceUuid device;        // that has the pages
  Backed backed;            // as the writer's range was reserved
};

struct Header : Facts {
  alignas(64) Word table_version;
  Word words_version;
  Word state;
  Word end;  // no page from here on ever had an entry
};

struct Sizes {
  std::uint64_t words, pages;

  static constexpr std::size_t kHeader = kMostReaders * sizeof(Place);
  static constexpr std::size_t kWords = kHeader + ceil_div(sizeof(Header), 4096) * 4096;
  std::size_t table() const { return kWords + ceil_div(words * sizeof(Word), 4096) * 4096; }
  std::size_t blocks() const { return table() + pages * sizeof(Word); }
  std::size_t file() const { return blocks() + ceil_div(pages, kBlock) * sizeof(Word); }
};
static_assert(Sizes::kHeader % 4096 == 0);

// The parts of a mapped file.
struct Parts {
  std::byte* at;
  Sizes sizes;

  Place& place(std::size_t reader) const { return reinterpret_cast<Place*>(at)[reader]; }
  Header& header() const { return *reinterpret_cast<Header*>(at + Sizes::kHeader); }
  Word& word(std::size_t i) const { return reinterpret_cast<Word*>(at + Sizes::kWords)[i]; }
  Word& entry(std::size_t page) const { return reinterpret_cast<Word*>(at + sizes.table())[page]; }
  Word& changed_with(std::size_t block) const {
    return reinterpret_cast<Word*>(at + sizes.blocks())[block];
  }
};

}  // namespace vtensor::shared
