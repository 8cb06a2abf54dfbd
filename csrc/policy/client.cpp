#include "policy/client.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/counted.h"
#include "base/errors.h"
#include "base/trace.h"
#include "vmm/copy_on_write.h"

namespace vtensor {

namespace {

constexpr std::chrono::nanoseconds kRetryRefused = std::chrono::milliseconds(250);

}  // namespace

void Generation::take_effect() noexcept {
  if (is_owner) {
    client->leave();
  } else {
    client->forget(this);
  }
  client->give_back_unused();
}

Client::Client(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages,
               const char* noun, const char* capture_advice)
    : pool_(pool),
      noun_(noun),
      capture_advice_(capture_advice),
      driver_(pool->driver()),
      shape_(shape),
      range_(driver_, pool->store(), shape, row_pages),
      work_(driver_) {}

void Client::open(const Caller& caller, std::unique_ptr<faults::Range> report, Backed backed,
                  std::optional<std::uint64_t> owner) {
  backed_ = backed;
  const std::size_t pages = range_.row_pages() * range_.rows();
  Address base = 0;
  try {
    base = driver_.reserve(pages, backed);
  } catch (const DeviceOutOfMemory&) {
    {
      // The driver lacked memory for its page of zeros, which the pool does not count: a spare
      // page's memory goes back for it.
      PoolLock lock(pool_);
      pool_->store().release(lock, 1);
    }
    base = driver_.reserve(pages, backed);
  }
  const PoolLock lock(pool_);
  std::uint64_t id = 0;
  try {
    work_.note(caller);
    id = pool_->add(this);
  } catch (...) {
    try {
      driver_.free_range(base, pages);
    } catch (const std::exception&) {
      // The driver's end frees the range.
    }
    throw;
  }
  known_ = faults::know(std::move(report), base, range_.bytes(), !pool_->traits().device.on_host());
  range_.begin(base, owner.value_or(id));
  if (owner) range_.stitch();
  is_tensor_ = !owner;
  reserved_ = true;
}

void Client::use(const Caller& caller) {
  if (!PendingWork::runs_behind(driver_, caller.stream)) return;
  const PoolLock lock(pool_);
  work_.note(caller);
}

void Client::share(const char* operation, std::size_t words) {
  const PoolLock lock(pool_);
  if (range_.shared()) return;
  raise_if_asleep(operation);
  range_.show_in(pool_->shared().add(operation, range_.base(), range_.bytes() / range_.page_size(),
                                     words, backed_));
}

void Client::abandon() noexcept {
  owner_end_->client = shared_from_this();
  owner_end_->is_owner = true;
  if (pool_->keeps_mapped()) return;  // owner_end_ and the client keep each other alive
  pool_->end(owner_end_.release());
}

Generation* Client::publish_locked(Interval indices, Interval bytes) {
  auto generation = std::make_unique<Generation>();
  generation->client = shared_from_this();
  generation->indices = indices;
  generation->bytes = bytes;
  generation->place = generations_.size();
  generations_.push_back(generation.get());
  try {
    covered_.add(indices);
  } catch (...) {
    generations_.pop_back();
    throw;
  }
  return generation.release();
}

bool Client::await_turn(PoolLock& lock, const Caller& caller) {
  if (!busy_ && range_.leaving() == 0) return false;
  const Counted waits(waiting_);
  const std::string what = text("the mapper's driver call for this ", noun_);
  pool_->await(lock, caller.operation, what.c_str(), [this, &lock]() VT_LOCKED {
    if (busy_ || range_.leaving() == 0) return !busy_;
    give_up_ahead();
    finish_unmapping(&lock);
    if (refusal()) std::rethrow_exception(refusal());
    return false;
  });
  return true;
}

Client::Busy::Busy(Client& client, PoolLock& lock, const Caller& caller) : client_(client) {
  if (client.busy_thread_ == std::this_thread::get_id()) {
    throw Error("[", caller.operation, "] the ", client.noun_,
                " is inside another operation of this thread (a signal handler or a finalizer ran "
                "in it): call it later");
  }
  client.await_turn(lock, caller);
  // A page whose undo was refused may be one of this client's.
  client.pool_->store().raise_if_broken();
  client.busy_ = true;
  client.busy_thread_ = std::this_thread::get_id();
}

Client::Busy::~Busy() {
  client_.busy_ = false;
  client_.busy_thread_ = {};
  client_.pool_->changed();
  client_.give_back_unused();
}

bool Client::is_quiet() {
  if (zeroing_) {
    ready_after_ = fences();
    zeroing_ = false;
  }
  return all_passed(driver_, ready_after_);
}

void Client::make_room_for_zeroing() {
  ready_after_.reserve(ready_after_.size() + 1);
  work_.note(driver_.side_stream());
}

std::vector<FencePtr> Client::fences() const {
  std::vector<FencePtr> fences = work_.fences();
  fences.insert(fences.end(), ready_after_.begin(), ready_after_.end());
  return fences;
}

bool Client::leased() const {
  return std::any_of(generations_.begin(), generations_.end(),
                     [](const Generation* generation) { return generation->is_lease; });
}

// -- why pages are mapped

void Client::uncover(Interval indices) {
  indices = intersection(indices, range_.hull_of(Why::viewed));
  covered_.gaps(indices, [this](Interval gap) VT_LOCKED {
    range_.change_why(gap, [](PageTable::Index index) {
      return index.why() == Why::viewed ? Why::unneeded : index.why();
    });
  });
}

void Client::release(Interval indices) {
  if (indices.empty()) return;
  range_.change_why(indices, [](PageTable::Index index) {
    const bool goes = index.why() == Why::unneeded || index.why() == Why::fenced;
    return goes ? index.why() : Why::viewed;
  });
  uncover(indices);
}

void Client::release(Why why, std::size_t begin) {
  const Interval indices = intersection({begin, SIZE_MAX}, range_.hull_of(why));
  range_.change_why(indices, [why](PageTable::Index index) {
    return index.why() == why ? Why::viewed : index.why();
  });
  uncover(indices);
}

void Client::forget(const Generation* generation) noexcept {
  generations_[generation->place] = generations_.back();
  generations_.back()->place = generation->place;
  generations_.pop_back();
  covered_.remove(generation->indices);
  uncover(generation->indices);
}

void Client::give_up_ahead() {
  pool_->want_no_more(*this);
  if (missing_ahead() != 0) {
    const Interval indices = range_.hull_of(Why::prefetched);
    range_.change_why(indices, [this](PageTable::Index index) {
      const bool missing = index.why() == Why::prefetched && index.mapped() < range_.rows();
      return missing ? Why::viewed : index.why();
    });
    uncover(indices);
  }
  ahead_changed();
  give_back_unused();
}

std::size_t Client::drop_ahead() {
  if (busy_) return 0;
  const std::size_t pages = range_.mapped(Why::prefetched);
  release(Why::prefetched);
  ahead_changed();
  if (pages != 0) give_back_unused();
  return pages;
}

void Client::failed(std::exception_ptr error) {
  Client& reporter = host_ == nullptr ? *this : *host_->client;
  reporter.error_ = std::move(error);
  reporter.failed_.store(true, std::memory_order_relaxed);
}

std::exception_ptr Client::take_error() {
  failed_.store(false, std::memory_order_relaxed);
  return std::exchange(error_, nullptr);
}

void Client::raise_if_asleep(const char* operation) const {
  if (asleep.load(std::memory_order_acquire) == 0) return;  // pairs with the release of waking
  throw Asleep("[", operation, "] its memory is asleep: call wake() of its pool first");
}

void Client::require_no_capture(const Caller& caller) const {
  if (!driver_.traits().asynchronous) return;
  if (!driver_.capturing(caller.operation, caller.stream)) return;
  throw Error("[", caller.operation,
              "] this needs driver calls, and the current stream is being captured into a CUDA "
              "graph: ",
              capture_advice_);
}

void Client::raise_error(const char* operation) {
  pool_->store().raise_if_broken();
  raise_if_asleep(operation);
  if (!failed_.load(std::memory_order_relaxed)) return;
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock) return;  // the next operation raises it
  if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
}

bool Client::claim_ahead(Reservation::Arrival& arrival, std::size_t pages) {
  try {
    if (asleep.load() == 0 && range_.leaving() == 0) find_missing(arrival, pages);
    if (!arrival.runs.empty()) {
      make_room_for_zeroing();
      arrival.ahead = true;
      range_.claim(arrival);
      busy_ = true;
      return true;
    }
  } catch (const DeviceOutOfMemory&) {
    // A use that needs the pages raises it.
  } catch (...) {
    failed(std::current_exception());
  }
  give_up_ahead();
  return false;
}

void Client::find_missing(Reservation::Arrival& arrival, std::size_t pages) {
  for (Interval indices : range_.runs_of(Why::prefetched)) {
    indices.begin = range_.first_not_whole(indices, Why::prefetched);
    indices.end = indices.begin + std::min(indices.size(), pages);
    for (Reservation::Run run : range_.collect(indices, is_unmapped)) {
      run.indices.end = std::min(run.indices.end, run.indices.begin + pages);
      pages -= run.indices.size();
      if (run.indices.empty()) return;
      arrival.runs.push_back(run);
    }
  }
}

void Client::enter_ahead(Reservation::Arrival& arrival) {
  busy_ = false;
  range_.enter(arrival);
  if (arrival.zeroed) ready_after_.push_back(std::move(arrival.zeroed));
  try {
    if (arrival.error) std::rethrow_exception(arrival.error);
  } catch (const DeviceOutOfMemory&) {
    // A use that needs the pages raises it.
  } catch (...) {
    failed(arrival.error);
    trace::event(trace::What::error, range_.address(arrival.runs.front()), 0, range_.base());
  }
  arrived(arrival);
  pool_->changed();
  if (arrival.error) return give_up_ahead();
  ahead_changed();
  give_back_unused();
  if (!wants()) pool_->want_no_more(*this);
}

void Client::give_back_unused() noexcept {
  if (busy_) return;  // the end of the change under way calls this again
  if (!pool_->looks_ahead() || pool_->store().broken()) {
    if (!finish_unmapping(nullptr)) return pool_->unmap_later(shared_from_this());
    // The client may be listed since a refusal, and without a mapper nothing else removes it.
    pool_->to_unmap().remove(hooks.to_unmap);
    return;
  }
  refusal_ = nullptr;
  try {
    if (!begin_unmapping() && !ends() && ready_after_.empty()) return;
  } catch (...) {
    refused(std::current_exception());
  }
  pool_->unmap_later(shared_from_this());
}

void Client::refused(std::exception_ptr error) noexcept {
  refusal_ = std::move(error);
  retry_at_ = std::chrono::steady_clock::now() + kRetryRefused;
}

bool Client::begin_unmapping() {
  pool_->store().raise_if_broken();
  if (range_.mapped(Why::fenced) != 0) return true;
  if (range_.mapped(Why::unneeded) == 0) return false;
  unmap_after_ = fences();
  for (const Interval indices : range_.runs_of(Why::unneeded)) {
    range_.event(trace::What::retire, indices);
    range_.set_why(indices, Why::fenced);
  }
  return true;
}

bool Client::release_range() {
  if (!ends()) return true;
  if (range_.mapped() != 0 && !pool_->store().broken()) return false;
  known_.reset();
  if (placed()) {
    pool_->end_locked(std::exchange(host_, nullptr));
  } else if (!pool_->store().broken()) {
    driver_.free_range(range_.base(), range_.row_pages() * range_.rows());
  }
  range_.end();
  reserved_ = false;
  pool_->remove(this);
  return true;
}

bool Client::finish_unmapping(PoolLock* lock) noexcept {
  if (busy_) {
    refusal_ = nullptr;  // of an earlier try; the end of the change under way tries again
    return false;
  }
  Unmapped unmapped = Unmapped::some;
  while (unmapped == Unmapped::some)
    unmapped = unmap_some(lock, SIZE_MAX, std::chrono::steady_clock::time_point::max());
  return unmapped == Unmapped::done;
}

Client::Unmapped Client::unmap_some(PoolLock* lock, std::size_t pages,
                                    std::chrono::steady_clock::time_point until) noexcept {
  Reservation::Departure departure;
  const Unmapped claim = claim_back(departure, pages);
  if (claim != Unmapped::some) return claim;
  {
    std::optional<Unlocked> unlocked;
    if (lock != nullptr) unlocked.emplace(*lock);
    range_.carry_out(departure, until);
  }
  enter_back(departure);
  return refusal_ ? Unmapped::refused : Unmapped::some;
}

Client::Unmapped Client::give_back_some(PoolLock& lock, std::size_t pages,
                                        std::chrono::steady_clock::time_point until) noexcept {
  if (busy()) return Unmapped::waits;
  // In a closed pool only callers try again: the process may be about to end, and a device in error
  // always refuses.
  if (refusal_ && (pool_->retired() || std::chrono::steady_clock::now() < retry_at_))
    return Unmapped::refused;
  const Unmapped unmapped = unmap_some(&lock, pages, until);
  if (unmapped == Unmapped::some) give_back_unused();  // the owner may have left meanwhile
  return unmapped;
}

Client::Unmapped Client::claim_back(Reservation::Departure& departure, std::size_t pages) noexcept {
  refusal_ = nullptr;
  try {
    // The end of a broken pool's driver unmaps the pages that its clients leave.
    const bool leaves_all = pool_->store().broken() && pool_->retired();
    const bool quiet = leaves_all || is_quiet();
    if (leaves_all || !begin_unmapping())
      return release_range() && quiet ? Unmapped::done : Unmapped::waits;
    if (!all_passed(driver_, unmap_after_)) return Unmapped::waits;
    const std::size_t most = std::max<std::size_t>(1, pages / range_.rows());
    departure = range_.departing(range_.runs_of(Why::fenced, most));
    busy_ = true;
    return Unmapped::some;
  } catch (...) {
    refused(std::current_exception());
    return Unmapped::refused;
  }
}

void Client::enter_back(const Reservation::Departure& departure) {
  busy_ = false;
  range_.enter(departure);
  if (departure.error) refused(departure.error);
  pool_->changed();
}

// -- zeroing

std::vector<Reservation::Run> Client::unclean(std::size_t most) const {
  for (const Why why : {Why::prefetched, Why::cached}) {
    // Readers still show the bytes of a freed slot, until it is used again.
    if (why == Why::cached && range_.is_read()) continue;
    for (const Interval indices : range_.runs_of(why)) {
      std::vector<Reservation::Run> runs = range_.unclean_in(indices, most);
      if (!runs.empty()) return runs;
    }
  }
  return {};
}

bool Client::clean_some(PoolLock& lock, std::size_t pages) {
  if (busy() || asleep.load() != 0) return false;
  try {
    if (!is_quiet()) return false;  // the last owner's work may still run
  } catch (const Error&) {
    return false;  // a capture forbids the question
  }
  make_room_for_zeroing();
  const std::vector<Reservation::Run> runs = unclean(pages);
  if (runs.empty()) return false;
  const Stream stream = driver_.side_stream();
  FencePtr zeroed;
  std::exception_ptr error;
  busy_ = true;
  {
    const Unlocked unlocked(lock);
    try {
      range_.zero(runs, stream);
      zeroed = driver_.fence(stream);
    } catch (...) {
      error = std::current_exception();
    }
  }
  busy_ = false;
  zeroing_ |= error != nullptr;
  if (!error) {
    for (const Reservation::Run& run : runs)
      range_.each_page(run, [](Page* page) { page->dirty = false; });
    if (zeroed) ready_after_.push_back(std::move(zeroed));
    ahead_changed();
  } else if (owned_) {
    pool_->unclean().remove(hooks.unclean);
    failed(std::move(error));  // growth zeroes the pages itself
  } else if (range_.mapped(Why::cached) != 0) {
    evict();  // the next owner must not get pages that cannot be zeroed
  }
  pool_->changed();
  give_back_unused();
  return true;
}

// -- reports

std::vector<PageRecord> Client::pages() {
  PoolLock lock(pool_);
  std::vector<PageRecord> records;
  const auto has_page = [](Entry entry) {
    return entry.page() != nullptr && entry.state() != EntryState::arriving;
  };
  for (const Reservation::Run& run : range_.collect({0, range_.row_pages()}, has_page)) {
    static constexpr const char* kNames[kWhys] = {nullptr,  nullptr,  "pinned", "prefetched",
                                                  "cached", "pinned", "pinned"};
    const EntryState state = range_.at(run.row, run.indices.begin).state();
    const std::vector<std::uint8_t> private_copies =
        state == EntryState::copy_on_write ? find_private_copies(range_, run)
                                           : std::vector<std::uint8_t>(run.indices.size());
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      const Page& page = *range_.at(run.row, index).page();
      PageRecord record{run.row,
                        index,
                        range_.address(run.row, index),
                        static_cast<std::int64_t>(page.handle),
                        page.references,
                        kNames[static_cast<std::size_t>(range_.why(index))]};
      if (private_copies[index - run.indices.begin]) {
        record.page_id = -1;
        record.shared = 1;
        record.state = "private";
      } else if (page.asleep) {
        record.page_id = -1;
        record.state = "asleep";
      } else if (record.state == nullptr) {
        record.state = page.references > 1 ? "shared" : "mapped";
      }
      records.push_back(record);
    }
  }
  return records;
}

PoolCounts Client::counts() {
  const PoolLock lock(pool_);
  PoolCounts counts;
  count(counts);
  return counts;
}

void Client::count(PoolCounts& counts) const {
  std::array<std::size_t, kWhys> mapped{};
  const auto of = [&mapped](Why why) -> std::size_t& {
    return mapped[static_cast<std::size_t>(why)];
  };
  for (std::size_t why = 0; why < kWhys; ++why) mapped[why] = range_.mapped(static_cast<Why>(why));
  if (asleep.load() != 0) {
    range_.for_each([&](Entry entry, std::size_t, std::size_t index) VT_LOCKED {
      if (is_mapped(entry) && entry.page()->asleep) --of(range_.why(index));
    });
  }
  const std::size_t pinned = of(Why::viewed) + of(Why::unneeded) + of(Why::fenced);
  counts.mapped += std::accumulate(mapped.begin(), mapped.end(), std::size_t{0});
  counts.active += of(Why::needed);
  counts.prefetched += of(Why::prefetched);
  counts.cached += of(Why::cached);
  counts.pinned += pinned;
  counts.evicted += evicted_;
  if (!owned_) counts.orphaned += pinned;
  if (placed()) return;
  counts.buffers += owned_ && is_tensor_;
  if (reserved_) counts.reserved_pages += range_.row_pages() * range_.rows();
}

void Client::check(std::unordered_map<const Page*, PageUse>& uses) const {
  std::vector<bool> covered(range_.reserved(), true);
  covered_.gaps({0, covered.size()}, [&covered](Interval gap) {
    for (std::size_t index = gap.begin; index < gap.end; ++index) covered[index] = false;
  });
  for (std::size_t index = 0; index < covered.size(); ++index) {
    const Why why = range_.why(index);
    if (covered[index] && (why == Why::nothing || why == Why::unneeded || why == Why::fenced))
      throw Error("I3: index ", index, " is covered by a generation and may go");
    for (std::size_t row = 0; row < range_.rows(); ++row) {
      const EntryState state = range_.at(row, index).state();
      if (covered[index] && (state == EntryState::empty || state == EntryState::leaving)) {
        throw Error("I3: index ", index, " of row ", row,
                    " is covered by a generation and is not mapped");
      }
      // After a move the old range has the pages too, until they are unmapped there.
      const bool copied = is_copy_on_write(range_.at(row, index));
      const Page* const page = range_.at(row, index).page();
      if ((why == Why::prefetched && copied) ||
          (why == Why::cached && page != nullptr && page->references != 1))
        throw Error("I4: index ", index, " of row ", row,
                    " is ahead or cached, and its page shared");
      if (state == EntryState::arriving && !busy_) {
        throw Error("I8: index ", index, " of row ", row, " waits for a page that no thread maps");
      }
    }
  }
  range_.check(uses, owned_ || !generations_.empty());
}

}  // namespace vtensor
