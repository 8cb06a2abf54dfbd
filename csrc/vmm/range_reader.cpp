#include "vmm/range_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
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

}  // namespace

shared::Facts RangeReader::checked(const Descriptor& file, std::size_t words) {
  shared::Facts facts{};
  if (!keeps_size(file) ||
      pread(file.get(), static_cast<void*>(&facts), sizeof facts, shared::Sizes::kHeader) !=
          sizeof facts ||
      facts.magic != shared::kMagic)
    refuse_received("it is not the memfd of a shared range");
  if (facts.layout != shared::kLayout) refuse_received("it has the layout of another release");
  const bool known = facts.exports == ExportKind::file ||
                     facts.exports == ExportKind::descriptors ||
                     facts.exports == ExportKind::fabric;
  if (!known || facts.words != words || facts.page_size < 4096 ||
      !is_power_of_two(facts.page_size) || facts.pages == 0 ||
      facts.pages > kMostBytes / facts.page_size || facts.backed.every == 0 ||
      facts.backed.first > facts.backed.every ||
      size_of(file) != shared::Sizes{.words = facts.words, .pages = facts.pages}.file())
    refuse_received("its sizes do not fit");
  return facts;
}

RangeReader::RangeReader(const Descriptor& file, const shared::Facts& facts, WriterMemory& memory)
    : memory_(memory) {
  const shared::Sizes sizes{.words = facts.words, .pages = facts.pages};
  CallMeter& meter = memory_.driver().meter();
  // Locks are of an open file, and the one that was received may be another reader's too.
  make_call(meter, kOperation, Call::open, EMFILE, "opening the memfd of a shared range anew",
            kRemedy, [&] { return file_.reopen(file.get(), O_RDWR); });
  make_call(meter, kOperation, Call::mmap, ENOMEM, "mapping that memfd", kRemedy,
            [&] { return file_.map(sizes.file(), shared::kMostReaders * sizeof(shared::Place)); });
  parts_ = {file_.at(), sizes};
  take_place();
  base_ = memory_.driver().reserve(sizes.pages, facts.backed);
  known_ = faults::know(std::make_unique<ReaderFaults>(), base_, sizes.pages * facts.page_size,
                        !memory_.driver().traits().device.on_host());
  words_.resize(facts.words);
}

void RangeReader::take_place() {
  for (; place_ < shared::kMostReaders; ++place_) {
    const int error = file_.try_lock(&memory_.driver().meter(),
                                     shared::kReaderLives + static_cast<off_t>(place_));
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

// Pages whose entries may differ from those of the version that was synced last: intervals apart.
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
  // A page may have changed several times, and is looked at once.
  std::ranges::sort(changed, {}, &Interval::begin);
  std::vector<Interval> apart;
  for (const Interval pages : changed) {
    if (apart.empty() || apart.back().end < pages.begin) {
      apart.push_back(pages);
    } else {
      apart.back() = hull(apart.back(), pages);
    }
  }
  return apart;
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

// The entry of a page whose mapping has just changed.
void RangeReader::enter(std::size_t n, Entry entry) noexcept {
  Entry& entered = entries_.reserved(n);
  if (entry != 0) memory_.add(entry - 1);
  if (entered != 0) memory_.drop(entered - 1);
  mapped_ += static_cast<std::size_t>(entry != 0) - static_cast<std::size_t>(entered != 0);
  entered = entry;
}

void RangeReader::show(std::span<const Interval> changed, std::span<const Entry> entries) {
  std::vector<Handle> wanted;
  for (const Entry entry : entries) {
    if (entry != 0) wanted.push_back(entry - 1);
  }
  WriterMemory::Fetched fetched(memory_);
  memory_.fetch(std::move(wanted), fetched);
  for (const Interval pages : changed) entries_.reserve(pages.begin, pages.end);
  enum class Kind { same, gone, other, fresh };
  const auto kind_of = [](Entry was, Entry is) {
    return was == is ? Kind::same : is == 0 ? Kind::gone : was == 0 ? Kind::fresh : Kind::other;
  };
  Driver& driver = memory_.driver();
  std::vector<Handle> was, is;  // of one run
  std::vector<Interval> fresh;
  std::vector<Entry> fresh_entries;
  bool awaited = false;
  for (const Interval pages : changed) {
    for (std::size_t n = pages.begin; n < pages.end;) {
      const Interval run{n, n};
      const Kind kind = kind_of(entries_[n], entries.front());
      std::size_t length = 0;
      while (n < pages.end && kind_of(entries_[n], entries[length]) == kind) ++n, ++length;
      const std::span<const Entry> now = entries.first(length);
      entries = entries.subspan(length);
      if (kind == Kind::same) continue;
      if (kind == Kind::fresh) {
        fresh.push_back({run.begin, n});
        fresh_entries.insert(fresh_entries.end(), now.begin(), now.end());
        continue;
      }
      if (!std::exchange(awaited, true)) memory_.await_own_work();
      const Address at = base_ + run.begin * driver.traits().page_size;
      if (kind == Kind::gone) {
        driver.unmap(at, length);
      } else {
        was.clear();
        is.clear();
        for (std::size_t i = 0; i < length; ++i) {
          was.push_back(memory_.at(entries_[run.begin + i] - 1));
          is.push_back(memory_.at(now[i] - 1));
        }
        try {
          driver.remap(at, was, memory_.access(), is, memory_.access());
        } catch (const UndoFailed&) {
          memory_.break_down(std::current_exception());
          throw;
        }
      }
      for (std::size_t i = 0; i < length; ++i) enter(run.begin + i, now[i]);
    }
  }
  map_fresh(fresh, fresh_entries);
}

void RangeReader::map_fresh(std::span<const Interval> fresh, std::span<const Entry> entries) {
  if (fresh.empty()) return;
  Driver& driver = memory_.driver();
  std::vector<Handle> handles;
  handles.reserve(entries.size());
  for (const Entry entry : entries) handles.push_back(memory_.at(entry - 1));
  std::vector<PageRun> runs;
  std::span<const Handle> rest = handles;
  for (const Interval pages : fresh) {
    runs.push_back({base_ + pages.begin * driver.traits().page_size, rest.first(pages.size())});
    rest = rest.subspan(pages.size());
  }
  std::size_t mapped = 0;
  try {
    driver.map(runs, memory_.access(), mapped);
  } catch (const Error&) {
    unmap_first(runs, mapped);  // perhaps they are without access
    throw;
  }
  for (const Interval pages : fresh) {
    for (std::size_t n = pages.begin; n < pages.end; ++n) {
      enter(n, entries.front());
      entries = entries.subspan(1);
    }
  }
}

void RangeReader::unmap_first(std::span<const PageRun> runs, std::size_t pages) {
  try {
    for (const PageRun& run : runs) {
      const std::size_t n = std::min(pages, run.handles.size());
      if (n != 0) memory_.driver().unmap(run.at, n);
      pages -= n;
    }
  } catch (const Error&) {
    memory_.break_down(std::current_exception());
  }
}

// -- all ranges of an object

RangeReaders::RangeReaders(std::span<const Descriptor> files, Descriptor memory, std::size_t words,
                           const CudaOptions& cuda) {
  std::vector<shared::Facts> facts;
  for (const Descriptor& file : files) {
    facts.push_back(RangeReader::checked(file, std::exchange(words, 0)));
  }
  if (facts.empty()) return;
  memory_ = std::make_unique<WriterMemory>(std::move(memory), facts.front(), cuda);
  for (const shared::Facts& one : facts) {
    if (!memory_->has(one)) refuse_received("its ranges are not of one pool");
  }
  for (std::size_t i = 0; i < files.size(); ++i)
    ranges_.emplace_back(new RangeReader(files[i], facts[i], *memory_));
}

bool RangeReaders::stale() const {
  bool stale = ranges_.front()->words_version() != ranges_.front()->seen_words_;
  for (const auto& range : ranges_) stale |= range->table_version() != range->seen_table_;
  return stale;
}

bool RangeReaders::sync(const Caller& caller) {
  RangeReader& first = *ranges_.front();
  memory_->raise_if_broken();
  const bool changed = stale();
  first.require_open(changed);
  memory_->note(caller);
  if (!changed) return false;
  std::vector<std::uint64_t> words(first.words_.size());
  std::uint64_t version = 0;
  first.read_whole([&] {
    first.read_whole([&] { return first.read_words(version, words); });
    for (const auto& range : ranges_) range->read_table();
    return first.words_version() == version;
  });
  // What these words count is written by work that was launched before they were.
  if (version != first.seen_words_) {
    WriterMemory::Fetched nothing(*memory_);
    memory_->fetch({}, nothing);
  }
  first.words_ = std::move(words);
  first.seen_words_ = version;
  return true;
}

}  // namespace vtensor
