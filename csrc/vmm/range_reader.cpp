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
// The writer makes a change by a few stores, unless it is stopped.
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
  if (!known || facts.words != words || facts.page_size == 0 || facts.page_size % 4096 != 0 ||
      facts.pages == 0 || facts.pages > kMostBytes / facts.page_size || facts.backed.every == 0 ||
      facts.backed.first > facts.backed.every || facts.pages % facts.backed.every != 0 ||
      size_of(file) != shared::Sizes{.words = facts.words, .pages = facts.pages}.file())
    refuse_received("its sizes do not fit");
  return facts;
}

RangeReader::RangeReader(const Descriptor& file, const shared::Facts& facts, WriterMemory& memory)
    : memory_(memory) {
  const shared::Sizes sizes{.words = facts.words, .pages = facts.pages};
  CallMeter& meter = memory_.driver().meter();
  // Locks belong to an open file, and the received one may be another reader's too.
  make_call(meter, kOperation, Call::open, EMFILE, "opening the memfd of a shared range anew",
            kRemedy, [&] { return file_.open(text("/proc/self/fd/", file.get()), O_RDWR); });
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
    // Before the table is read: from here on the writer keeps every page.
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
                 "readable; for more receive the object again, while it is open");
  }
  if (state == State::asleep) {
    throw Asleep("[", kOperation,
                 "] the writer's memory is asleep: call wake() of its pool there first");
  }
  const auto now = steady_clock::now();
  if (!look && now - looked_at_ < kLook) return;
  if (!file_.is_locked(shared::kWriterLife, 1)) {
    throw Closed("[", kOperation,
                 "] the process that wrote has ended: what was read last stays readable, and "
                 "nothing more comes");
  }
  looked_at_ = now;
}

// Calls `read` until it returns true: it has seen one moment.
template <typename Read>
void RangeReader::read_whole(Read read) {
  const auto until = steady_clock::now() + kPatience;
  for (int tries = 0; !read(); ++tries) {
    if (tries < 64) continue;
    require_open(true);
    if (steady_clock::now() >= until)
      throw TimedOut(
          kOperation, kPatience,
          "the writer is stopped in the middle of a change, or changes it faster than it can be "
          "read: let it go on or end it, or try again");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Copies the table as of one published version. Each try copies only blocks changed since the last
// try, because the writer may be faster than a copy of the whole table.
void RangeReader::copy_table(Table& table) {
  if (table_version() == table.version) return;
  read_whole([&] {
    const std::uint64_t version = table_version();
    if (version % 2 != 0) return false;
    const std::size_t end = std::min<std::size_t>(
        parts_.header().end.load(std::memory_order_acquire), parts_.sizes.pages);
    for (std::size_t first = 0; first < end; first += shared::kBlock) {
      const std::size_t block = first / shared::kBlock;
      if (parts_.changed_with(block).load(std::memory_order_acquire) <= table.version) continue;
      auto& entries = table.blocks[block];
      for (std::size_t i = 0; i < entries.size() && first + i < end; ++i)
        entries[i] = parts_.entry(first + i).load(std::memory_order_acquire);
    }
    table.version = version;
    return table_version() == version;
  });
}

void RangeReader::compare(Table& table) const {
  for (const auto& [block, entries] : table.blocks) {
    for (std::size_t i = 0, n = block * shared::kBlock; i < entries.size(); ++i, ++n) {
      const Entry now = entries_[n], then = entries[i];
      if (then == now) continue;
      std::vector<Run>& runs = now == 0 ? table.fresh : then == 0 ? table.gone : table.other;
      if (runs.empty() || n != runs.back().first + runs.back().entries.size())
        runs.push_back({n, {}});
      runs.back().entries.push_back(then);
    }
  }
}

// The driver has changed the mappings of a run.
void RangeReader::enter(const Run& run) noexcept {
  std::size_t n = run.first;
  for (const Entry entry : run.entries) {
    Entry& entered = entries_.reserved(n++);
    if (entry != 0) memory_.add(entry - 1);
    if (entered != 0) memory_.drop(entered - 1);
    mapped_ += static_cast<std::size_t>(entry != 0) - static_cast<std::size_t>(entered != 0);
    entered = entry;
  }
}

std::vector<Handle> RangeReader::ours(const Run& run) const {
  std::vector<Handle> handles;
  for (const Entry entry : run.entries) handles.push_back(memory_.at(entry - 1));
  return handles;
}

void RangeReader::map_fresh(const Table& table) {
  std::vector<std::vector<Handle>> handles;  // `runs` refers to them
  std::vector<PageRun> runs;
  for (const Run& run : table.fresh) {
    entries_.reserve(run.first, run.first + run.entries.size());
    runs.push_back({at(run.first), handles.emplace_back(ours(run))});
  }
  if (runs.empty()) return;
  std::size_t mapped = 0;
  try {
    memory_.driver().map(runs, memory_.access(), mapped);
  } catch (...) {
    try {
      for (const PageRun& run : runs) {  // mapped, perhaps without access
        const std::size_t n = std::min(mapped, run.handles.size());
        if (n != 0) memory_.driver().unmap(run.at, n);
        mapped -= n;
      }
    } catch (...) {
      memory_.break_down(std::current_exception());
    }
    throw;
  }
  for (const Run& run : table.fresh) enter(run);
}

void RangeReader::replace_other(const Table& table) {
  for (const Run& run : table.other) {
    std::vector<Handle> was;
    for (std::size_t i = 0; i < run.entries.size(); ++i)
      was.push_back(memory_.at(entries_[run.first + i] - 1));
    try {
      memory_.driver().remap(at(run.first), was, memory_.access(), ours(run), memory_.access());
    } catch (const UndoFailed&) {
      memory_.break_down(std::current_exception());
      throw;
    }
    enter(run);
  }
}

void RangeReader::unmap_gone(const Table& table) {
  for (const Run& run : table.gone) {
    memory_.driver().unmap(at(run.first), run.entries.size());
    enter(run);
  }
  seen_table_ = table.version;
  // From here on no page of an older version is mapped here.
  parts_.place(place_).held.store(table.version, std::memory_order_seq_cst);
}

void RangeReader::end() {
  for (std::size_t n = entries_.next(0), end; n < pages(); n = entries_.next(end + 1)) {
    for (end = n; end < pages() && entries_[end] != 0;) ++end;
    if (end != n) memory_.driver().unmap(at(n), end - n);
  }
  memory_.driver().free_range(base_, pages());
}

// -- all ranges of an object

RangeReaders::RangeReaders(std::span<const Descriptor> files, Descriptor memory, std::size_t words,
                           const CudaOptions& cuda) {
  std::vector<shared::Facts> facts;
  for (const Descriptor& file : files) {
    facts.push_back(RangeReader::checked(file, std::exchange(words, 0)));
    const shared::Facts &first = facts.front(), &one = facts.back();
    if (one.memory != first.memory || one.exports != first.exports ||
        one.page_size != first.page_size)
      refuse_received("its ranges are not of one pool");
  }
  if (facts.empty()) refuse_received("it has no range");
  memory_ = std::make_unique<WriterMemory>(std::move(memory), facts.front(), cuda);
  ranges_.reserve(files.size());
  for (std::size_t i = 0; i < files.size(); ++i)
    ranges_.emplace_back(new RangeReader(files[i], facts[i], *memory_));
}

bool RangeReaders::stale() const {
  bool stale = ranges_.front()->words_version() != ranges_.front()->seen_words_;
  for (const auto& range : ranges_) stale |= range->table_version() != range->seen_table_;
  return stale;
}

bool RangeReaders::sync(const Caller& caller, bool stale) {
  RangeReader& first = *ranges_.front();
  memory_->raise_if_broken();
  first.require_open(stale);
  memory_->note(caller);
  if (!stale) return false;
  std::vector<std::uint64_t> words(first.words_.size());
  std::uint64_t version = 0;
  std::vector<RangeReader::Table> tables(ranges_.size());
  for (std::size_t i = 0; i < tables.size(); ++i) tables[i].version = ranges_[i]->seen_table_;
  first.read_whole([&] {
    version = first.words_version();
    if (version % 2 != 0) return false;
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = first.parts_.word(i).load(std::memory_order_acquire);
    for (std::size_t i = 0; i < tables.size(); ++i) ranges_[i]->copy_table(tables[i]);
    return first.words_version() == version;
  });
  // The places still hold older versions, so the writer keeps every page of these tables.
  memory_->await_writer();
  WriterMemory::Fetched fetched(*memory_);
  std::vector<Handle> handles;
  bool replaces = false;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    ranges_[i]->compare(tables[i]);
    for (const auto* const runs : {&tables[i].fresh, &tables[i].other}) {
      for (const RangeReader::Run& run : *runs)
        for (const RangeReader::Entry entry : run.entries) handles.push_back(entry - 1);
    }
    replaces |= !tables[i].other.empty() || !tables[i].gone.empty();
  }
  memory_->fetch(std::move(handles), fetched);
  for (std::size_t i = 0; i < tables.size(); ++i) ranges_[i]->map_fresh(tables[i]);
  if (replaces) memory_->await_own_work();
  for (std::size_t i = 0; i < tables.size(); ++i) ranges_[i]->replace_other(tables[i]);
  // From here on a refusal leaves too many pages mapped, and none too few.
  first.words_ = std::move(words);
  first.seen_words_ = version;
  for (std::size_t i = 0; i < tables.size(); ++i) ranges_[i]->unmap_gone(tables[i]);
  return true;
}

RangeReaders::~RangeReaders() {
  // On the host the end of the driver unmaps all pages, and cannot be refused.
  if (!memory_->driver().traits().asynchronous) return;
  try {
    memory_->await_own_work();
    for (const auto& range : ranges_) range->end();
  } catch (...) {
    // The ranges and their places stay, so that the writer keeps pages that kernels may still read.
    for (auto& range : ranges_) {
      [[maybe_unused]] const RangeReader* const left = range.release();
    }
    [[maybe_unused]] const WriterMemory* const left = memory_.release();
  }
}

}  // namespace vtensor
