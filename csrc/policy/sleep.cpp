#include "policy/sleep.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/errors.h"
#include "policy/make_room.h"
#include "vmm/copy_on_write.h"
#include "vmm/pending_work.h"

namespace vtensor {

namespace {

// Calls visit(entry, row, index) for every mapped entry of a client.
template <typename Visit>
void each_entry(Client& client, Visit visit) VT_LOCKED {
  client.range().for_each([&](Entry entry, std::size_t row, std::size_t index) VT_LOCKED {
    if (is_mapped(entry)) visit(entry, row, index);
  });
}

// Adds a page to the last run, if the page continues it with the same access, or else as a new run.
void add_page(std::vector<SleepRun>& runs, Client& client, std::size_t row, std::size_t index,
              Entry entry, bool writable) {
  const Access access = access_of(entry.state());
  const auto continues = [&](const SleepRun& last) {
    return last.client == &client && last.pages.row == row && last.pages.indices.end == index &&
           last.access == access && last.writable == writable;
  };
  if (runs.empty() || !continues(runs.back()))
    runs.push_back({&client, {row, {index, index}}, access, writable, {}});
  ++runs.back().pages.indices.end;
  runs.back().handles.push_back(entry.page()->handle);
}

// Maps runs, the writable ones first; adds the mapped pages to `done`.
void map(Driver& driver, std::span<const SleepRun> runs, std::size_t& done) {
  std::vector<PageRun> writable, shared;
  for (const SleepRun& run : runs) {
    (run.writable ? writable : shared)
        .push_back({run.client->range().address(run.pages), run.handles});
  }
  if (!writable.empty()) driver.map(writable, Access::writable, done);
  if (!shared.empty()) driver.map(shared, Access::copy_on_write, done);
}
// Unmaps the first `pages` pages of the runs; counts the unmapped runs in `gone`.
void unmap_first(Driver& driver, std::span<const SleepRun> runs, std::size_t pages,
                 std::size_t& gone) {
  for (; pages != 0 && gone < runs.size(); ++gone) {
    const std::size_t n = std::min(pages, runs[gone].handles.size());
    driver.unmap(runs[gone].client->range().address(runs[gone].pages), n);
    pages -= n;
  }
}

// Adds a part, merged with the last one if both are adjacent in memory and in the image.
void add_part(std::vector<SleepPart>& parts, const SleepPart& part) {
  if (!parts.empty()) {
    SleepPart& last = parts.back();
    if (last.sleep == part.sleep && last.at + last.bytes == part.at &&
        last.offset + last.bytes == part.offset) {
      last.bytes += part.bytes;
      return;
    }
  }
  parts.push_back(part);
}

}  // namespace

void await_copies(PagePool& pool, const char* operation, const char* what) {
  Driver& driver = pool.driver();
  const std::chrono::nanoseconds patience = pool.options().patience;
  if (wait_for(driver, driver.fence(driver.copy_stream()), patience)) return;
  throw TimedOut(operation, patience, std::string(what) + " has not ended");
}

// -- falling asleep

std::uint64_t FallAsleep::next_number() {
  const PoolLock lock(pool_);
  return number_ = pool_->next_id();
}

void FallAsleep::add(const std::shared_ptr<Client>& client) {
  clients_.reserve(clients_.size() + 1);
  std::uint64_t awake = 0;
  if (client->asleep.compare_exchange_strong(awake, number_)) clients_.push_back(client);
}

std::set<std::uint64_t> FallAsleep::numbers() const {
  std::set<std::uint64_t> numbers;
  for (const std::shared_ptr<Client>& client : clients_) numbers.insert(client->asleep);
  return numbers;
}

std::size_t FallAsleep::bytes() const {
  std::size_t bytes = 0;
  for (const SleepPart& part : parts_) bytes += part.bytes;
  return bytes;
}

void FallAsleep::begin(const Caller& caller) {
  caller_ = caller;
  MakeRoom(*pool_).give_all_back(true);
  PoolLock lock(pool_);
  try {
    for (const std::shared_ptr<Client>& client : clients_)
      busy_.push_back(std::make_unique<Client::Busy>(*client, lock, caller));
    require_no_readers();
    await_work(lock);
    unshare_private_copies(lock);
    std::size_t pages = 0;
    std::unordered_set<const Page*> seen;
    const std::size_t size = pool_->page_size();
    for (const std::shared_ptr<Client>& client : clients_) {
      const Reservation& range = client->range();
      each_entry(*client, [&](Entry entry, std::size_t row, std::size_t index) VT_LOCKED {
        if (entry.page()->asleep || !seen.insert(entry.page()).second) return;
        entry.page()->sleep = client->asleep;
        entry.page()->sleep_slot = pages++;
        add_part(parts_, {range.address(row, index), entry.page()->sleep,
                          entry.page()->sleep_slot * size, size});
      });
    }
  } catch (...) {
    busy_.clear();
    parts_.clear();
    throw;
  }
}

void FallAsleep::give_up() noexcept {
  if (clients_.empty()) return;
  const PoolLock lock(pool_);
  busy_.clear();
  for (const std::shared_ptr<Client>& client : clients_) client->asleep = 0;
  clients_.clear();
}

// Throws if readers live: they would see zeros.
void FallAsleep::require_no_readers() {
  std::size_t readers = 0;
  for (const std::shared_ptr<Client>& client : clients_) {
    if (client->range().shared()) readers = std::max(readers, client->range().shared()->readers());
  }
  if (readers == 0) return;
  explain(false);
  throw Error("[", caller_.operation, "] ", readers,
              " readers in other processes read memory that is to sleep: have them close it first");
}

void FallAsleep::explain(bool asleep) noexcept {
  for (const std::shared_ptr<Client>& client : clients_) client->explain_asleep(asleep);
}

void FallAsleep::await_work(PoolLock& lock) {
  Driver& driver = pool_->driver();
  pool_->await(lock, caller_.operation, "the lease of a tensor or a cache", [this]() VT_LOCKED {
    return std::none_of(clients_.begin(), clients_.end(),
                        [](const auto& client) VT_LOCKED { return client->leased(); });
  });
  PendingWork work(driver);
  for (const std::shared_ptr<Client>& client : clients_) client->add_work_to(work);
  std::vector<FencePtr> fences = work.fences();
  pool_->await(lock, caller_.operation, "work on the device that may use the pages",
               [&] { return all_passed(driver, fences); });
}

void FallAsleep::unshare_private_copies(PoolLock& lock) {
  if (!pool_->traits().kernel_copies_on_write) return;
  for (const std::shared_ptr<Client>& client : clients_) {
    Reservation& range = client->range();
    const Interval all{0, range.reserved()};
    std::vector<Reservation::Run> copies = private_copies_in(range, all);
    if (copies.empty()) continue;
    while (MakeRoom(*pool_).ready(lock, caller_.operation, count_fresh_pages(range, copies),
                                  count_private_copies(range, copies))) {
      copies = private_copies_in(range, all);
    }
    unshare_pages(range, lock, copies, {}, caller_.stream);
  }
}

std::size_t FallAsleep::finish() {
  const std::size_t given = unmap_all();
  clients_.clear();
  finished_ = true;
  try {
    pool_->trim();  // cached pages became spare ones
  } catch (const std::exception&) {
    // The memory stays with the pool.
  }
  return given;
}

// Unmaps pages whose references all sleep or are page sets. Returns how many lost their memory.
std::size_t FallAsleep::unmap_all() {
  PoolLock lock(pool_);
  pool_->store().raise_if_broken();
  // Counted now: since `begin` references may have gone, and writes may have copied pages.
  std::unordered_map<Page*, std::size_t> uses;
  for (const std::shared_ptr<Client>& client : clients_) {
    each_entry(*client, [&](Entry entry, std::size_t, std::size_t) {
      if (!entry.page()->asleep && entry.page()->sleep == client->asleep) ++uses[entry.page()];
    });
  }
  for (const std::shared_ptr<Client>& client : clients_) {
    const Reservation& range = client->range();
    for (const Reservation::Run& run : private_copies_in(range, {0, range.reserved()}))
      range.each_page(run, [&uses](Page* page) { uses.erase(page); });
  }
  std::vector<Page*> pages;
  for (const auto& [page, count] : uses) {
    if (page->references == count + page->in_sets) pages.push_back(page);
  }
  std::sort(pages.begin(), pages.end());
  std::vector<SleepRun> runs;
  for (const std::shared_ptr<Client>& client : clients_) {
    each_entry(*client, [&](Entry entry, std::size_t row, std::size_t index) {
      if (std::binary_search(pages.begin(), pages.end(), entry.page()))
        add_page(runs, *client, row, index, entry, is_writable(entry));
    });
  }
  explain(true);  // readers that come from now on find the memory asleep
  require_no_readers();
  unmap(lock, runs);
  const std::size_t given = pool_->store().sleep(lock, pages);
  busy_.clear();
  return given;
}

// If a run is refused, maps the unmapped runs again. If that is refused too, the pool is broken.
void FallAsleep::unmap(PoolLock& lock, std::span<const SleepRun> runs) {
  Driver& driver = pool_->driver();
  std::exception_ptr refused, broken;
  {
    const Unlocked unlocked(lock);
    std::size_t gone = 0, back = 0;
    try {
      return unmap_first(driver, runs, SIZE_MAX, gone);
    } catch (...) {
      refused = std::current_exception();
    }
    try {
      map(driver, runs.first(gone), back);
    } catch (...) {
      broken = std::current_exception();
    }
  }
  if (broken) pool_->store().break_down(broken);
  explain(false);
  std::rethrow_exception(refused);
}

// -- waking

WakeUp::WakeUp(const std::shared_ptr<PagePool>& pool, const Caller& caller,
               std::span<const std::uint64_t> numbers)
    : pool_(pool), caller_(caller) {
  PoolLock lock(pool_);
  pool_->finish_unmapping(lock);  // clients that died asleep need no memory
  try {
    for (Client* client : pool_->clients()) {
      if (std::find(numbers.begin(), numbers.end(), client->asleep.load()) != numbers.end())
        clients_.push_back(client->shared_from_this());
    }
    for (const std::shared_ptr<Client>& client : clients_)
      busy_.push_back(std::make_unique<Client::Busy>(*client, lock, caller_));
    std::unordered_set<const Page*> seen;
    for (const std::shared_ptr<Client>& client : clients_) {
      each_entry(*client, [&](Entry entry, std::size_t, std::size_t) {
        Page* const page = entry.page();
        if (page->asleep && seen.insert(page).second) pages_.push_back(page);
      });
    }
    std::size_t missing = 0;
    for (const Page* page : pages_) missing += !page->resident;
    while (MakeRoom(*pool_).ready(lock, caller_.operation, missing)) {
    }
    pool_->store().wake(pages_);
  } catch (...) {
    busy_.clear();
    throw;
  }
  try {
    const std::vector<SleepPart> unclean = collect();
    const Unlocked unlocked(lock);
    Driver& driver = pool_->driver();
    map(driver, runs_, mapped_);
    // New memory may hold bytes of another owner (I7).
    for (const SleepPart& part : unclean) driver.zero(part.at, part.bytes, driver.copy_stream());
    if (!unclean.empty()) await_copies(*pool_, caller_.operation, "zeroing pages");
  } catch (...) {
    undo(lock);
    busy_.clear();
    throw;
  }
}

std::vector<SleepPart> WakeUp::collect() {
  const std::size_t size = pool_->page_size();
  std::vector<SleepPart> unclean;
  std::unordered_set<const Page*> seen;
  for (const std::shared_ptr<Client>& client : clients_) {
    const Reservation& range = client->range();
    each_entry(*client, [&](Entry entry, std::size_t row, std::size_t index) {
      if (!entry.page()->asleep) return;
      const bool first = seen.insert(entry.page()).second;
      add_page(runs_, *client, row, index, entry, first);
      if (!first) return;
      const SleepPart part{range.address(row, index), entry.page()->sleep,
                           entry.page()->sleep_slot * size, size};
      add_part(parts_, part);
      if (entry.page()->stale) add_part(unclean, part);
    });
  }
  // In the order of mapping, because `mapped_` counts from the first.
  std::partition(runs_.begin(), runs_.end(), [](const SleepRun& run) { return run.writable; });
  return unclean;
}

void WakeUp::finish(std::span<const std::uint64_t> restored) {
  await_copies(*pool_, caller_.operation, "copying to the device");
  PoolLock lock(pool_);
  try {
    Driver& driver = pool_->driver();
    const Unlocked unlocked(lock);
    for (const SleepRun& run : runs_) {
      if (!run.writable || run.access == Access::writable) continue;
      driver.remap(run.client->range().address(run.pages), run.handles, Access::writable,
                   run.handles, Access::copy_on_write);
    }
  } catch (const UndoFailed&) {
    pool_->store().break_down(std::current_exception());
    throw;
  }
  pool_->store().woken(pages_);
  for (const SleepRun& run : runs_) run.client->range().show(run.pages);  // with their new handles
  for (const std::shared_ptr<Client>& client : clients_) {
    if (std::find(restored.begin(), restored.end(), client->asleep.load()) == restored.end())
      client->lose_contents();
    client->asleep = 0;
    client->explain_asleep(false);
  }
  busy_.clear();
}

void WakeUp::undo(PoolLock& lock) noexcept {
  if (pool_->store().broken()) return;
  try {
    Driver& driver = pool_->driver();
    const Unlocked unlocked(lock);
    await_copies(*pool_, caller_.operation, "copying to the device");
    std::size_t gone = 0;
    unmap_first(driver, runs_, mapped_, gone);
  } catch (...) {
    return pool_->store().break_down(std::current_exception());
  }
  pool_->store().sleep(lock, pages_);
}

void WakeUp::give_up() noexcept {
  if (busy_.empty()) return;
  PoolLock lock(pool_);
  undo(lock);
  busy_.clear();
}

}  // namespace vtensor
