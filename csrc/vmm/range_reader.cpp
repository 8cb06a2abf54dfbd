#include "vmm/range_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "base/descriptor.h"
#include "base/errors.h"
#include "base/system_errors.h"

namespace vtensor {

using shared::State;
using std::chrono::steady_clock;

namespace {

constexpr char kOperation[] = "reader";
constexpr char kRemedy[] =
    "mount /proc, and raise the limits on descriptors (ulimit -n) and mappings";
// A change is a few stores, unless its writer is stopped.
constexpr std::chrono::seconds kPatience{1};
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 47;

// Whether it is a memfd that never gets shorter, so that no access to a mapping of it is SIGBUS.
bool keeps_size(const Descriptor& file) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

std::uint64_t size_of(const Descriptor& file) {
  struct stat found{};
  return fstat(file.get(), &found) == 0 ? static_cast<std::uint64_t>(found.st_size) : 0;
}

class ReaderFaults final : public faults::Range {
 public:
  void name(faults::Text& text, std::uintptr_t at) const noexcept override {
    text << "byte " << at - base() << " of memory of another process, read at ";
    text.address(base());
  }
  void explain(faults::Text& text, std::uintptr_t) const noexcept override {
    text << "only the process that made the tensor writes there: write to a copy, x.clone()";
  }
};

[[noreturn]] void refuse_files(const char* why) {
  throw InvalidArgument("[", kOperation, "] what was received cannot be read: ", why,
                        ": send the object of a shareable pool again, with the same release of "
                        "vtensor in both processes");
}

}  // namespace

RangeReader::RangeReader(int range, int memory, std::size_t words) {
  const Descriptor own_range(range);
  Descriptor own_memory(memory);
  shared::Header header{};
  if (!keeps_size(own_range) ||
      pread(own_range.get(), static_cast<void*>(&header), sizeof header, shared::Sizes::kHeader) !=
          sizeof header ||
      header.magic != shared::kMagic)
    refuse_files("it is not the memfd of a shared range");
  if (header.layout != shared::kLayout) refuse_files("it has the layout of another release");
  const shared::Sizes sizes{.words = header.words, .pages = header.pages};
  if (header.words != words || header.page_size < 4096 || !is_power_of_two(header.page_size) ||
      header.pages == 0 || header.pages > kMostBytes / header.page_size ||
      size_of(own_range) != sizes.file())
    refuse_files("its sizes do not fit");
  if (!keeps_size(own_memory) || header.memory != id_of(own_memory.get()))
    refuse_files("the second file is not the memory that the first one tells of");
  page_size_ = header.page_size;
  memory_pages_ = size_of(own_memory) / page_size_;

  driver_ = make_host_driver({.page_size = page_size_, .memory = own_memory.take()});
  CallMeter& meter = driver_->meter();
  // Locks are of an open file, and the one that was received may be another reader's too.
  make_call(meter, kOperation, Call::open, EMFILE, "opening the memfd of a shared range anew",
            kRemedy, [&] { return file_.reopen(own_range.get(), O_RDWR); });
  make_call(meter, kOperation, Call::mmap, ENOMEM, "mapping that memfd", kRemedy,
            [&] { return file_.map(sizes.file(), shared::kMostReaders * sizeof(shared::Place)); });
  parts_ = {file_.at(), sizes};
  take_place();
  base_ = driver_->reserve(sizes.pages);
  known_ = faults::know(std::make_unique<ReaderFaults>(), base_, bytes(), false);
  words_.resize(words);
}

RangeReader::~RangeReader() = default;

void RangeReader::take_place() {
  for (; place_ < shared::kMostReaders; ++place_) {
    const int error =
        file_.try_lock(&driver_->meter(), shared::kReaderLives + static_cast<off_t>(place_));
    if (error == EAGAIN || error == EACCES) continue;
    if (error != 0)
      throw refused(kOperation, Call::fcntl, error, "locking a reader's place",
                    "use a system with locks of open file descriptions");
    // Before the table is read: the writer keeps every page from here on.
    parts_.place(place_).held.store(0, std::memory_order_seq_cst);
    return;
  }
  throw Error("[", kOperation, "] the ", shared::kMostReaders,
              " places for readers of this object are taken: close a reader");
}

void RangeReader::require_open(bool look) {
  const auto state = static_cast<State>(parts_.header().state.load(std::memory_order_seq_cst));
  if (state == State::closed) {
    throw Closed("[", kOperation,
                 "] the writer has closed the object, or moved it: what was read last stays "
                 "readable; receive the object again for more");
  }
  if (state == State::asleep) {
    throw Asleep("[", kOperation,
                 "] the writer's memory is asleep: call wake() of its pool there first");
  }
  const auto now = steady_clock::now();
  if (!look && now - looked_at_ < kLook) return;
  if (!writer_lives()) {
    throw Closed("[", kOperation,
                 "] the process that wrote has ended: what was read last stays readable, and "
                 "nothing more comes");
  }
  looked_at_ = now;
}

// Calls `read` until it has seen one moment, which it says.
template <typename Read>
void RangeReader::read_whole(Read read) {
  const auto until = steady_clock::now() + kPatience;
  for (int tries = 0; !read(); ++tries) {
    if (tries < 64) continue;
    require_open(true);
    if (steady_clock::now() >= until)
      throw TimedOut(kOperation, kPatience,
                     "the writer is stopped in the middle of a change: let it go on, or end it");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

bool RangeReader::read_words(std::uint64_t& version, std::vector<std::uint64_t>& words) const {
  version = words_version();
  if (version % 2 != 0) return false;
  for (std::size_t i = 0; i < words.size(); ++i)
    words[i] = parts_.word(i).load(std::memory_order_acquire);
  return words_version() == version;
}

// Pages whose entries may differ from those of the version that was synced last.
std::vector<Interval> RangeReader::changed_since_sync(std::uint64_t version) const {
  const shared::Header& header = parts_.header();
  const std::uint64_t changes = (version - seen_table_) / 2;
  if (seen_table_ == 0 || changes > shared::kChanges)
    return {
        {0, std::min<std::size_t>(header.end.load(std::memory_order_acquire), parts_.sizes.pages)}};
  std::vector<Interval> changed;
  for (std::uint64_t at = seen_table_ + 2; at <= version; at += 2) {
    const shared::Change& change = header.changes[at / 2 % shared::kChanges];
    const Interval pages{
        change.first.load(std::memory_order_acquire),
        std::min<std::size_t>(change.end.load(std::memory_order_acquire), parts_.sizes.pages)};
    if (!pages.empty()) changed.push_back(pages);
  }
  return changed;
}

void RangeReader::read_table() {
  if (table_version() == seen_table_) return;
  std::uint64_t version = 0;
  std::vector<Interval> changed;
  std::vector<Entry> entries;
  read_whole([&] {
    version = table_version();
    if (version % 2 != 0) return false;
    changed = changed_since_sync(version);
    entries.clear();
    for (const Interval pages : changed) {
      for (std::size_t n = pages.begin; n < pages.end; ++n)
        entries.push_back(parts_.entry(n).load(std::memory_order_acquire));
    }
    return table_version() == version;
  });
  show(changed, entries);
  seen_table_ = version;
  // The pages of older versions are mapped here no longer.
  parts_.place(place_).held.store(version, std::memory_order_seq_cst);
}

void RangeReader::show(std::span<const Interval> changed, std::span<const Entry> entries) {
  if (std::any_of(entries.begin(), entries.end(),
                  [this](Entry entry) { return entry > memory_pages_; }))
    refuse_files("an entry of its table lies past the memory");
  for (const Interval pages : changed) entries_.reserve(pages.begin, pages.end);
  enum class Kind { same, gone, other, fresh };
  const auto kind_of = [](Entry was, Entry is) {
    return was == is ? Kind::same : is == 0 ? Kind::gone : was == 0 ? Kind::fresh : Kind::other;
  };
  std::vector<Handle> was, is;  // of one run; those of fresh pages are kept
  std::vector<Interval> fresh;
  std::vector<Handle> fresh_handles;
  fresh_handles.reserve(entries.size());
  for (const Interval pages : changed) {
    for (std::size_t n = pages.begin; n < pages.end;) {
      const Interval run{n, n};
      const Kind kind = kind_of(entries_[n], entries.front());
      was.clear();
      is.clear();
      for (; n < pages.end && kind_of(entries_[n], entries.front()) == kind; ++n) {
        was.push_back(entries_[n] - 1);
        is.push_back(entries.front() - 1);
        entries = entries.subspan(1);
      }
      const Address at = base_ + run.begin * page_size_;
      switch (kind) {
        case Kind::same:
          continue;
        case Kind::gone:
          driver_->unmap(at, is.size());
          mapped_ -= is.size();
          break;
        case Kind::other:
          driver_->remap(at, was, Access::writable, is, Access::writable);
          break;
        case Kind::fresh:
          fresh.push_back({run.begin, n});
          fresh_handles.insert(fresh_handles.end(), is.begin(), is.end());
          continue;
      }
      for (std::size_t i = run.begin; i < n; ++i) entries_.reserved(i) = is[i - run.begin] + 1;
    }
  }
  map_fresh(fresh, fresh_handles);
}

void RangeReader::map_fresh(std::span<const Interval> fresh, std::span<const Handle> handles) {
  if (fresh.empty()) return;
  std::vector<PageRun> runs;
  std::span<const Handle> rest = handles;
  for (const Interval pages : fresh) {
    runs.push_back({base_ + pages.begin * page_size_, rest.first(pages.size())});
    rest = rest.subspan(pages.size());
  }
  std::size_t done = 0;
  const auto note = [&] {
    mapped_ += done;
    for (const Interval pages : fresh) {
      for (std::size_t n = pages.begin; n < pages.end && done != 0; ++n, --done) {
        entries_.reserved(n) = handles.front() + 1;
        handles = handles.subspan(1);
      }
    }
  };
  try {
    driver_->map(runs, Access::writable, done);
  } catch (...) {
    note();
    throw;
  }
  note();
}

bool RangeReader::stale(std::span<RangeReader* const> ranges) {
  bool stale = ranges.front()->words_version() != ranges.front()->seen_words_;
  for (const RangeReader* range : ranges) stale |= range->table_version() != range->seen_table_;
  return stale;
}

bool RangeReader::sync(std::span<RangeReader* const> ranges) {
  RangeReader& first = *ranges.front();
  const bool changed = stale(ranges);
  first.require_open(changed);
  if (!changed) return false;
  std::vector<std::uint64_t> words(first.words_.size());
  std::uint64_t version = 0;
  first.read_whole([&] {
    first.read_whole([&] { return first.read_words(version, words); });
    for (RangeReader* range : ranges) range->read_table();
    return first.words_version() == version;
  });
  first.words_ = std::move(words);
  first.seen_words_ = version;
  return true;
}

std::int64_t RangeReader::handle_at(std::size_t n) const {
  return static_cast<std::int64_t>(entries_[n]) - 1;
}

}  // namespace vtensor
