#include "policy/client.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/counted.h"
#include "base/errors.h"
#include "base/trace.h"
#include "vmm/copy_on_write.h"

namespace vtensor {

void Generation::reap() noexcept {
  if (is_owner) {
    client->leave();
  } else {
    client->forget(this);
  }
  client->give_back_unused();
}

Client::Client(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages)
    : pool_(pool),
      driver_(pool->driver()),
      shape_(shape),
      range_(driver_, pool->store(), shape, row_pages, pool->options().patience),
      work_(driver_) {}

std::uint64_t Client::join(Address base, std::unique_ptr<faults::Range> report,
                           const Caller& caller) {
  reserved_ = true;
  known_ = faults::know(std::move(report), base, range_.bytes(), !pool_->traits().device.on_host());
  const std::uint64_t id = pool_->add(this);
  range_.begin(base, id);
  work_.note(caller);
  return id;
}

void Client::use(const Caller& caller) {
  if (!PendingWork::runs_behind(driver_, caller.stream)) return;
  const PoolLock lock(pool_);
  work_.note(caller);
}

void Client::share(const char* operation, std::size_t words) {
  const PoolLock lock(pool_);
  if (range_.shared()) return;
  raise_if_asleep();
  range_.show_in(
      pool_->shared().add(operation, range_.base(), range_.bytes() / range_.page_size(), words));
}

void Client::abandon() noexcept {
  owner_end_->client = shared_from_this();
  owner_end_->is_owner = true;
  pool_->end(owner_end_.release());
}

Generation* Client::publish_locked(Interval indices, Interval bytes) {
  auto generation = std::make_unique<Generation>();
  generation->client = shared_from_this();
  generation->indices = indices;
  generation->bytes = bytes;
  generations_.add(generation.get());
  return generation.release();
}

bool Client::await_turn(PoolLock& lock, const Caller& caller) {
  if (!busy_ && range_.leaving() == 0) return false;
  const Counted waits(waiting_);
  const std::string what = text("the mapper's driver call for this ", noun());
  pool_->await(lock, caller.operation, what.c_str(), [this, &lock]() VT_LOCKED {
    if (busy_ || range_.leaving() == 0) return !busy_;
    give_up_ahead();
    settle(&lock);
    if (refusal()) std::rethrow_exception(refusal());
    return false;
  });
  return true;
}

void Client::hold(PoolLock& lock, const Caller& caller) {
  await_turn(lock, caller);
  busy_ = true;
}

void Client::end_hold() noexcept {
  busy_ = false;
  pool_->changed();
  give_back_unused();
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

void Client::failed(std::exception_ptr error) {
  error_ = std::move(error);
  failed_.store(true, std::memory_order_relaxed);
}

std::exception_ptr Client::take_error() {
  failed_.store(false, std::memory_order_relaxed);
  return std::exchange(error_, nullptr);
}

void Client::raise_if_asleep() const {
  if (asleep.load(std::memory_order_acquire) == 0) return;  // pairs with the release of waking
  throw Asleep("[vtensor] the ", noun(),
               " is asleep, without memory: call wake() of its pool first");
}

void Client::require_no_capture(const Caller& caller) const {
  if (!driver_.traits().asynchronous) return;
  if (!driver_.capturing(caller.operation, caller.stream)) return;
  throw Error("[", caller.operation,
              "] this needs driver calls, and the current stream is being captured into a CUDA "
              "graph: ",
              capture_advice());
}

void Client::raise_error() {
  pool_->store().raise_if_broken();
  raise_if_asleep();
  if (!failed_.load(std::memory_order_relaxed)) return;
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock) return;  // the next operation raises it
  if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
}

bool Client::claim_ahead(Reservation::Arrival& arrival, std::size_t pages) {
  try {
    if (asleep.load() == 0 && range_.leaving() == 0) find_missing(arrival, pages);
    if (!arrival.runs.empty()) {
      arrival.ahead = true;
      busy_ = true;
      range_.claim(arrival);
      return true;
    }
  } catch (const DeviceOutOfMemory&) {
    busy_ = false;  // a use that needs the pages raises it
  } catch (...) {
    busy_ = false;
    failed(std::current_exception());
  }
  give_up_ahead();
  return false;
}

void Client::add_missing(Reservation::Arrival& arrival, Interval indices, std::size_t& pages) {
  for (Reservation::Run run : range_.collect(indices, is_unmapped)) {
    run.indices.end = std::min(run.indices.end, run.indices.begin + pages);
    pages -= run.indices.size();
    if (run.indices.empty()) break;
    arrival.runs.push_back(run);
  }
}

void Client::enter_ahead(Reservation::Arrival& arrival) {
  busy_ = false;
  range_.enter(arrival);
  if (arrival.zeroing) work_.note(driver_.side_stream());
  if (arrival.zeroed) ready_after_.push_back(std::move(arrival.zeroed));
  // A use that needs the pages raises that there is no memory.
  if (arrival.error && !is_out_of_memory(arrival.error)) {
    failed(arrival.error);
    trace::event(trace::What::error, range_.address(arrival.runs.front()), 0, range_.base());
  }
  arrived_ahead(arrival);
  pool_->changed();
  give_back_unused();
}

void Client::give_back_unused() noexcept {
  if (busy_) return;  // end_hold calls it again
  if (!pool_->looks_ahead() || pool_->store().broken()) {
    if (!settle(nullptr)) pool_->settle_later(shared_from_this());
    return;
  }
  unmap_.try_again();
  try {
    if (begin_unmapping() || ends() || !ready_after_.empty())
      pool_->settle_later(shared_from_this());
  } catch (...) {
    unmap_.refused(std::current_exception());
    pool_->settle_later(shared_from_this());
  }
}

bool Client::begin_unmapping() {
  pool_->store().raise_if_broken();
  if (!unmap_.indices().empty()) return true;
  if (range_.leaving() != 0) unmap_.touch({0, range_.reserved()});
  std::vector<Interval> indices = uncovered();
  std::vector<FencePtr> after;
  if (!indices.empty()) after = fences();
  for (const Interval some : indices) range_.event(trace::What::retire, some);
  unmap_.begin(std::move(indices), std::move(after));
  return !unmap_.indices().empty();
}

bool Client::release_range() {
  if (!ends()) return true;
  if (range_.mapped() != 0 && !pool_->store().broken()) return false;
  known_.reset();
  free_range();
  reserved_ = false;
  pool_->remove(this);
  return true;
}

void Client::free_range() {
  if (!pool_->store().broken())
    driver_.free_range(range_.base(), range_.row_pages() * range_.rows());
  range_.end();
}

bool Client::settle(PoolLock* lock) noexcept {
  if (busy_) return false;
  unmap_.try_again();
  try {
    // The end of a broken pool's driver unmaps what its clients leave.
    if (pool_->store().broken() && pool_->retired()) return release_range();
    const bool quiet = is_quiet();
    while (begin_unmapping()) {
      Departure departure;
      if (!claim_departure(departure, std::numeric_limits<std::size_t>::max())) return false;
      {
        std::optional<Unlocked> unlocked;
        if (lock != nullptr) unlocked.emplace(*lock);
        range_.carry_out(departure);
      }
      enter_back(departure);
      if (unmap_.refusal()) return false;
    }
    return release_range() && quiet;
  } catch (...) {
    unmap_.refused(std::current_exception());
    return false;
  }
}

Client::Claim Client::claim_back(Departure& departure, std::size_t pages) noexcept {
  if (busy()) return Claim::waits;
  // Of a closed pool only a caller tries again: the process may be about to end, and a device in
  // error refuses for good.
  if (unmap_.refusal() &&
      (pool_->retired() || std::chrono::steady_clock::now() < unmap_.retry_at()))
    return Claim::refused;
  unmap_.try_again();
  try {
    const bool quiet = is_quiet();
    if (begin_unmapping()) return claim_departure(departure, pages) ? Claim::claimed : Claim::waits;
    return release_range() && quiet ? Claim::done : Claim::waits;
  } catch (...) {
    unmap_.refused(std::current_exception());
    return Claim::refused;
  }
}

bool Client::claim_departure(Departure& departure, std::size_t pages) {
  if (!unmap_.may_go(driver_)) return false;
  std::vector<Interval> indices = unmap_.first(pages / range_.rows());
  std::vector<Reservation::Run> within;
  for (const Interval some : indices) {
    for (std::size_t row = 0; row < range_.rows(); ++row) within.push_back({row, some});
  }
  departure = {range_.departing(within), std::move(indices)};
  busy_ = true;
  return true;
}

void Client::enter_back(Departure& departure) {
  busy_ = false;
  range_.enter(departure);
  if (departure.error) {
    unmap_.refused(departure.error);
  } else if (departure.done == departure.runs.size()) {
    for (const Interval indices : departure.indices) unmap_.remove(indices);
  }
  pool_->changed();
}

std::vector<PageRecord> Client::pages() {
  PoolLock lock(pool_);
  pool_->reap();
  std::vector<PageRecord> records;
  const auto has_page = [](Entry entry) {
    return entry.page() != nullptr && entry.state() != EntryState::arriving;
  };
  for (const Reservation::Run& run : range_.collect({0, range_.row_pages()}, has_page)) {
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
                        why_mapped(index)};
      if (state == EntryState::leaving) {
        record.state = "pinned";
      } else if (private_copies[index - run.indices.begin]) {
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

void Client::count(PoolCounts& counts) const {
  add_to(counts);
  if (asleep.load() == 0) return;
  range_.for_each([&](Entry entry, std::size_t, std::size_t index) VT_LOCKED {
    if (!is_mapped(entry) || !entry.page()->asleep) return;
    --counts.mapped;
    const char* const text = why_mapped(index);
    const std::string_view why = text != nullptr ? text : owned_ ? "active" : "pinned";
    if (why == "active") --counts.active;
    if (why == "prefetched") --counts.prefetched;
    if (why == "cached") --counts.cached;
    if (why != "pinned") return;
    --counts.pinned;
    if (!owned_) --counts.orphaned;
  });
}

}  // namespace vtensor
