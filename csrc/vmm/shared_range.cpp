#include "vmm/shared_range.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/system_errors.h"

namespace vtensor {

using shared::State;

namespace {

constexpr char kRemedy[] = "close files or raise the limit on them (ulimit -n), and free memory";

}  // namespace

// -- one range

SharedRange::SharedRange(SharedRanges& all, const char* operation, Address base,
                         shared::Sizes sizes, Backed backed)
    : all_(all), base_(base) {
  CallMeter& meter = all_.driver_.meter();
  const std::size_t bytes = sizes.file();
  make_call(meter, operation, Call::memfd_create, EMFILE, "the memfd that readers see a range by",
            kRemedy, [&] { return file_.make("vtensor-shared", bytes); });
  make_call(meter, operation, Call::mmap, ENOMEM, "mapping that memfd", kRemedy,
            [&] { return file_.map(bytes, bytes); });
  if (const int error = file_.try_lock(&meter, shared::kWriterLife))
    throw refused(operation, Call::fcntl, error, "locking that memfd", kRemedy);
  parts_ = {file_.at(), sizes};
  shared::Header& header = parts_.header();
  header.layout = shared::kLayout;
  header.words = static_cast<std::uint32_t>(sizes.words);
  header.pages = sizes.pages;
  const DriverTraits& traits = all_.driver_.traits();
  header.page_size = traits.page_size;
  if (all_.memory_ == FileId{}) {
    all_.memory_ = traits.exports == ExportKind::file
                       ? id_of(all_.driver_.export_page(0).descriptor.get())
                       : id_of(file_.descriptor());
  }
  header.memory = all_.memory_;
  header.exports = traits.exports;
  header.device = traits.uuid;
  header.backed = backed;
  header.table_version = header.words_version = version_;
  header.magic = shared::kMagic;
}

void SharedRange::change(std::size_t n, std::uint64_t entry) noexcept {
  shared::Header& header = parts_.header();
  if (!changing_) {
    // SharedRanges::add has made room.
    all_.changing_.push_back(this);
    changing_ = true;
    header.table_version.store(version_ + 1, std::memory_order_seq_cst);
  }
  // Release: a reader that sees an entry sees the odd version too.
  parts_.entry(n).store(entry, std::memory_order_release);
  parts_.changed_with(n / shared::kBlock).store(version_ + 2, std::memory_order_release);
  if (header.end.load(std::memory_order_relaxed) <= n)
    header.end.store(n + 1, std::memory_order_release);
}

void SharedRange::expect(std::size_t pages) {
  const std::size_t most = kept_.size() + expected_ + pages;
  if (most > kept_.capacity()) kept_.reserve(std::max(most, 2 * kept_.capacity()));
  expected_ += pages;
}

void SharedRange::came(std::size_t n, const Page* page) noexcept { change(n, page->handle + 1); }

// Once the owner has left, entries stay in the table for good, and their pages while a reader
// lives: readers keep what they have.
void SharedRange::went(std::size_t n, Page* page) noexcept {
  --expected_;
  if (parts_.entry(n).load(std::memory_order_relaxed) == 0) return all_.store_.drop(page);
  const bool stays = closed();
  if (!stays) change(n, 0);
  kept_.push_back({page, stays ? std::numeric_limits<std::uint64_t>::max() : version_ + 2});
  all_.store_.count_in_page_sets(1);
  all_.keeps_ = true;
}

void SharedRange::publish() noexcept {
  version_ += 2;
  // Before `collect` looks for readers: a reader that it does not see yet sees this version.
  parts_.header().table_version.store(version_, std::memory_order_seq_cst);
  changing_ = false;
}

void SharedRange::set_words(std::size_t first, std::span<const std::int64_t> values) noexcept {
  void* const words = &parts_.word(first);
  if (closed() || std::memcmp(words, values.data(), values.size_bytes()) == 0) return;
  shared::Word& version = parts_.header().words_version;
  const std::uint64_t now = version.load(std::memory_order_relaxed);
  version.store(now + 1, std::memory_order_relaxed);
  // A reader that sees some of the new words sees the odd version too.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(words, values.data(), values.size_bytes());
  version.store(now + 2, std::memory_order_release);
}

void SharedRange::set_state(State state) noexcept {
  if (closed()) return;
  parts_.header().state.store(static_cast<std::uint64_t>(state), std::memory_order_seq_cst);
}

template <typename Visit>
void SharedRange::each_reader(Visit visit) const {
  if (!is_read()) return;  // the common case, in one system call
  for (std::size_t i = 0; i < shared::kMostReaders; ++i) {
    if (file_.is_locked(shared::kReaderLives + static_cast<off_t>(i), 1)) visit(parts_.place(i));
  }
}

std::size_t SharedRange::readers() const {
  std::size_t living = 0;
  each_reader([&living](const shared::Place&) { ++living; });
  return living;
}

Descriptor SharedRange::open_for_reader(const char* operation) const {
  return open_anew(all_.driver_.meter(), operation, file_.descriptor(), O_RDWR,
                   "the memfd of a shared range");
}

// -- all ranges

std::shared_ptr<SharedRange> SharedRanges::add(const char* operation, Address base,
                                               std::size_t pages, std::size_t words,
                                               Backed backed) {
  if (driver_.traits().exports == ExportKind::none) {
    throw InvalidArgument("[", operation,
                          "] only memory of a shareable pool can be read by other processes: make "
                          "the pool with Pool(shareable=True), or send copies, x.clone()");
  }
  collect();  // also erases ranges that are gone, for which nothing may call it later
  std::shared_ptr<SharedRange> range(
      new SharedRange(*this, operation, base, {.words = words, .pages = pages}, backed));
  all_.reserve(all_.size() + 1);
  changing_.reserve(all_.size() + 1);  // `change` cannot fail
  all_.push_back(range);
  return range;
}

bool SharedRanges::publish() noexcept {
  for (SharedRange* range : changing_) range->publish();
  changing_.clear();
  return std::exchange(keeps_, false) && collect();
}

bool SharedRanges::collect() noexcept {
  bool any = false;
  for (const std::shared_ptr<SharedRange>& range : all_) {
    std::vector<SharedRange::Kept>& kept = range->kept_;
    if (kept.empty()) continue;
    std::uint64_t held = std::numeric_limits<std::uint64_t>::max();  // the oldest version held
    range->each_reader([&held](const shared::Place& place) {
      held = std::min(held, place.held.load(std::memory_order_seq_cst));
    });
    const auto end = std::find_if(kept.begin(), kept.end(),
                                  [held](const auto& one) { return one.version > held; });
    for (auto one = kept.begin(); one != end; ++one) {
      store_.count_in_page_sets(-1);
      store_.drop(one->page);
    }
    kept.erase(kept.begin(), end);
    any |= !kept.empty();
  }
  // Erases ranges whose reservations are gone, if they keep no page.
  std::erase_if(all_, [](const auto& range) VT_LOCKED {
    return range.use_count() == 1 && range->kept_.empty() && !range->changing_;
  });
  return any;
}

std::size_t SharedRanges::kept() const {
  std::size_t pages = 0;
  for (const std::shared_ptr<SharedRange>& range : all_) pages += range->kept_.size();
  return pages;
}

std::unordered_set<const SharedRange*> SharedRanges::read() const {
  std::unordered_set<const SharedRange*> read;
  for (const std::shared_ptr<SharedRange>& range : all_) {
    if (range->is_read()) read.insert(range.get());
  }
  return read;
}

}  // namespace vtensor
