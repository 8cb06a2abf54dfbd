// The file by which a process shows a range of its addresses to others: which pages of its memory
// stand where, and the words (lengths) that its owner keeps. The writer alone changes it, but for
// each reader's own place.
//
//   places   one a reader, which only that reader writes: the version whose pages it may read
//   header   sizes and versions
//   words    numbers of the owner's, as the begin and end of a tensor's positions
//   table    of each page of the range, 1 + the handle of the page that stands there; 0 if none
//   blocks   of each block of neighbouring pages, the version with which one of them changed last:
//            a reader copies these alone
//
// Words and table have a version each, which is odd while they change (a seqlock). A reader that
// finds the version unchanged after it has copied them has seen one moment.
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

// Bytes of the file whose locks say that the writer, or the reader with a place, lives.
inline constexpr off_t kWriterLife = 0;
inline constexpr off_t kReaderLives = 2;  // and on

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free);

struct alignas(64) Place {
  Word held;  // 0: the reader may read any page
};

enum class State : std::uint64_t { open, asleep, closed };

// What a range is, for good.
struct Facts {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t words;      // their number
  std::uint64_t pages;      // of the range
  std::uint64_t page_size;  // bytes
  FileId memory;            // the file in which the pages lie, or the socket's writer
  ExportKind exports;       // how a reader gets pages
  DeviceUuid device;        // on which they are
  Backed backed;            // holes that kernels need the address of
};

struct Header : Facts {
  alignas(64) Word table_version;
  Word words_version;
  Word state;
  Word end;  // pages from here on never had an entry
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
