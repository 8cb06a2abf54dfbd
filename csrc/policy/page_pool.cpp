#include "policy/page_pool.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/align.h"
#include "base/counted.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"
#include "policy/client.h"
#include "policy/make_room.h"
#include "vmm/copy_on_write.h"
#include "vmm/pending_work.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// The sleep of a wait before it looks again: the first, because most work on a device ends in
// microseconds, and the longest.
constexpr std::chrono::nanoseconds kFirstLook = std::chrono::microseconds(20);
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);
// How often the worker looks whether readers in other processes hold a newer version, or have died.
constexpr std::chrono::nanoseconds kLookAtReaders = std::chrono::milliseconds(20);
// How long spared_elsewhere() waits for the other pools of a shared budget.
constexpr std::chrono::nanoseconds kAnswer = std::chrono::milliseconds(50);
// Pages released at once: a thread that waits for driver calls to end waits for no more.
constexpr std::size_t kReleasedAtOnce = 32;
// A default budget is at least a sixteenth of the free memory, whatever other pools may take: a
// default pool is made at first use, and must not fail because another pool overcommits.
constexpr std::size_t kLeastPart = 16;

// The living objects of `all`.
template <typename T>
std::vector<std::shared_ptr<T>> alive(const std::vector<std::weak_ptr<T>>& all) {
  std::vector<std::shared_ptr<T>> found;
  for (const std::weak_ptr<T>& one : all) {
    if (std::shared_ptr<T> living = one.lock()) found.push_back(std::move(living));
  }
  return found;
}

// Guards pools(). Locked before any pool's lock, and while a pool is made: of two pools made at
// once, the later counts the budget of the earlier.
std::mutex pools_mutex;
// The pools of this process. Never destroyed: a pool may outlive static objects.
std::vector<std::weak_ptr<PagePool>>& pools() {
  static auto& all = *new std::vector<std::weak_ptr<PagePool>>;
  return all;
}

// The default budget in bytes: a part of the free memory, less the memory that other pools of this
// process may take and have not taken. Other processes are not counted.
std::size_t default_budget(Driver& driver) {
  const DriverTraits& traits = driver.traits();
  std::size_t unused = 0;
  for (const std::shared_ptr<PagePool>& pool : alive(pools())) {
    if (pool->retired()) continue;
    // By name too: a simulated device, whose memory is the host's, has a budget of its own.
    if (pool->traits().name != traits.name || pool->traits().device != traits.device) continue;
    const PoolLock lock(pool);
    unused += sub_sat(pool->store().unused(), pool->store().spare()) * pool->page_size();
  }
  const std::size_t free = driver.free_memory();
  const std::size_t left = std::max(sub_sat(free, unused), free / kLeastPart);
  return left / 10 * traits.budget_part / traits.page_size * traits.page_size;
}

}  // namespace

std::shared_ptr<PagePool> PagePool::create(std::unique_ptr<Driver> driver,
                                           const PoolOptions& options) {
  const DriverTraits& traits = driver->traits();
  PoolOptions budgeted = options;
  std::shared_ptr<PagePool> pool;
  {
    const std::lock_guard one_at_a_time(pools_mutex);
    if (budgeted.budget == 0) budgeted.budget = default_budget(*driver);
    if (budgeted.budget < traits.page_size) {
      throw InvalidArgument("[Pool] budget of ", budgeted.budget, " bytes holds no page of ",
                            traits.page_size, " bytes: raise the budget or lower the page size");
    }
    std::unique_ptr<Ledger> ledger;
    if (!options.shared_budget.empty()) {
      ledger = Ledger::join(driver->meter(), options.shared_budget, budgeted.budget, traits.device);
    }
    pool.reset(new PagePool(std::move(driver), budgeted, std::move(ledger)), DeleteUnlessForked{});
    std::erase_if(pools(), [](const auto& one) { return one.expired(); });
    pools().push_back(pool);
  }
  // Starts the mapper now, and not when memory or mappings are short: a thread without memory for
  // its thread-local data ends the process.
  if (pool->looks_ahead() || pool->ledger_) pool->ensure_mapper();
  return pool;
}

PagePool::PagePool(std::unique_ptr<Driver> driver, const PoolOptions& options,
                   std::unique_ptr<Ledger> ledger)
    : ledger_(std::move(ledger)),
      driver_(std::move(driver)),
      options_(options),
      store_(*driver_, options, ledger_.get(), [this]() VT_LOCKED { wake_mapper(); }),
      shared_(*driver_, store_),
      mapper_(std::make_shared<Mapper>(ledger_ ? ledger_->wake_word() : nullptr)) {}

// Buffers and generations keep the pool alive, so none is left.
PagePool::~PagePool() { mapper_->stop(); }

Descriptor PagePool::open_for_readers(const char* operation) {
  if (traits().exports == ExportKind::file) return driver_->export_page(0).descriptor;
  const PoolLock lock(shared_from_this());
  if (retired()) throw Closed("[", operation, "] the pool is closed");
  if (!sender_) sender_ = std::make_unique<PageSender>(operation, shared_from_this());
  return sender_->connect(operation, *this);
}

void PagePool::export_pages(const PageMessage& asked, PageMessage& answer) {
  answer.content.kind = traits().exports;
  const std::span handles = std::span(asked.content.handles).first(asked.content.count);
  if (handles.empty()) return await_work("reader");
  {
    const PoolLock lock(shared_from_this());
    if (!(asked.content.memory == shared_.memory()))
      throw InvalidArgument("[reader] pages of another pool were asked for");
  }
  answer.pages.reserve(handles.size());
  for (const Handle handle : handles) answer.pages.push_back(driver_->export_page(handle));
  answer.content.count = asked.content.count;
}

void PagePool::await_work(const char* operation) {
  PoolLock lock(shared_from_this());
  PendingWork work(*driver_);
  for (const Client* client : clients_) client->add_work_to(work);
  std::vector<FencePtr> fences = work.fences();
  await(lock, operation, "work that the writer launched", [&] {
    if (retired()) throw Closed("[", operation, "] the pool is closed");
    return all_passed(*driver_, fences);
  });
}

std::uint64_t PagePool::add(Client* client) {
  clients_.insert(client);
  return next_id();
}

void PagePool::unmap_later(const std::shared_ptr<Client>& client) {
  if (!client->hooks.to_unmap.linked()) to_unmap_.add(client->hooks.to_unmap, client);
  // A refusal is not worth starting a thread: the next finish_unmapping() tries again.
  if (!client->refusal() || looks_ahead()) wake_mapper();
}

void PagePool::want(const std::shared_ptr<Client>& client) {
  if (!client->hooks.wanting.linked()) wanting_.add(client->hooks.wanting, client);
  if (!mapper_->running()) wake_mapper();
}

void PagePool::want_first(const std::shared_ptr<Client>& client) {
  wanting_.remove(client->hooks.wanting);
  wanting_.add_first(client->hooks.wanting, client);
  client->hooks.first = true;
}

void PagePool::want_no_more(Client& client) noexcept {
  wanting_.remove(client.hooks.wanting);
  client.hooks.first = false;
}

void PagePool::wake_mapper() noexcept {
  wake_mapper_ = true;
  try {
    mapper_->start(weak_from_this());
  } catch (const std::exception&) {
    // Without a thread, growth makes its own calls, and trim() does the rest.
  }
}

void PagePool::ensure_mapper() {
  const PoolLock lock(shared_from_this());
  mapper_->start(weak_from_this());
}

void PagePool::set_mapper_error(std::exception_ptr error) {
  mapper_error_ = std::move(error);
  changed();
}

bool PagePool::may_cache(std::size_t pages) {
  const std::size_t most =
      options_.cache == kCacheByBudget ? store_.budget() / 4 : store_.in_pages(options_.cache);
  if (pages > most) return false;
  while (pages_alike_ + pages > most) {
    const std::shared_ptr<Client> oldest = *std::find_if(
        cached_.begin(), cached_.end(),
        [](const auto& client) VT_LOCKED { return client->hooks.cached_alike.linked(); });
    oldest->evict();
  }
  return true;
}

void PagePool::cache(const std::shared_ptr<Client>& client, bool by_shape) {
  if (by_shape) {
    cached_alike_[client->shape()].add_first(client->hooks.cached_alike, client);
    pages_alike_ += client->range().mapped(Why::cached);
  }
  cached_.add(client->hooks.cached, client);
}

void PagePool::uncache(Client& client) {
  const std::shared_ptr<Client> kept = cached_.remove(client.hooks.cached);
  unclean_.remove(client.hooks.unclean);
  if (!client.hooks.cached_alike.linked()) return;
  const auto alike = cached_alike_.find(client.shape());
  alike->second.remove(client.hooks.cached_alike);
  if (alike->second.empty()) cached_alike_.erase(alike);
  pages_alike_ -= client.range().mapped(Why::cached);
}

std::shared_ptr<Client> PagePool::find_cached(const RowShape& shape) const {
  const auto alike = cached_alike_.find(shape);
  if (alike == cached_alike_.end()) return nullptr;
  std::shared_ptr<Client> busy;
  for (const std::shared_ptr<Client>& client : alike->second) {
    if (!client->reusable()) continue;
    if (!client->busy()) return client;
    if (!busy) busy = client;
  }
  return busy;
}

bool PagePool::evict_oldest() {
  if (cached_.empty()) return false;
  const std::shared_ptr<Client> oldest = cached_.front();  // kept, because it leaves the list
  oldest->evict();
  return true;
}

void PagePool::clean_later(const std::shared_ptr<Client>& client) noexcept {
  if (client->hooks.unclean.linked()) return;
  unclean_.add(client->hooks.unclean, client);
  wake_mapper();
}

void PagePool::await(PoolLock& lock, const char* operation, const char* what,
                     const std::function<bool()>& done) {
  if (done()) return;
  const trace::Span span(trace::What::wait, 0, 0);
  auto look = kFirstLook;
  for (const auto until = steady_clock::now() + options_.patience; !done();) {
    store_.raise_if_broken();
    if (steady_clock::now() >= until)
      throw TimedOut(operation, options_.patience, std::string(what) + " has not ended");
    wait_changed(lock, steady_clock::now() + look);
    look = std::min(2 * look, kLook);
  }
}

// Before it releases the lock, tidies and wakes the mapper if needed. An end that comes just before
// the wait is carried out when the wait ends, soon.
void PagePool::wait(PoolLock& lock, std::condition_variable& change,
                    steady_clock::time_point until) {
  if (tidy()) after_unlock();
  lock.wait(change, until);
}

void PagePool::quiesce(PoolLock& lock, const char* operation) {
  const Counted quiescing(quiescing_);
  await(lock, operation, "driver calls of other threads",
        [this]() VT_LOCKED { return in_flight() == 0; });
}

void PagePool::keep_until(FencePtr after, std::shared_ptr<void> memory) {
  const PoolLock lock(shared_from_this());
  copied_.emplace_back(std::move(after), std::move(memory));
  wake_mapper();
}

bool PagePool::drop_copied(PoolLock& lock) {
  decltype(copied_) over;
  for (auto it = copied_.begin(); it != copied_.end();) {
    const auto next = std::next(it);
    if (it->first == nullptr || driver_->passed(*it->first)) over.splice(over.end(), copied_, it);
    it = next;
  }
  if (over.empty()) return !copied_.empty();
  const Unlocked unlocked(lock);  // freeing memory may take long; idle() counts this as under way
  over.clear();
  return true;
}

steady_clock::time_point PagePool::maintain(PoolLock& lock) {
  const bool copying = drop_copied(lock);
  const bool held = shared_.collect();
  const auto due = store_.broken() ? steady_clock::time_point::max() : store_.release_excess(lock);
  if (copying) return std::min(due, steady_clock::now() + kLook);
  return held ? std::min(due, steady_clock::now() + kLookAtReaders) : due;
}

PoolCounts PagePool::counts() {
  PoolLock lock(shared_from_this());
  if (!looks_ahead()) finish_unmapping(lock);
  count_private_copies();
  PoolCounts counts;
  for (Client* client : clients_) client->count(counts);
  counts.private_copies = store_.private_copies();
  counts.budget_pages = store_.budget();
  counts.used = store_.used() + store_.private_copies();
  counts.spare = store_.spare();
  shared_.collect();
  counts.held_by_readers = shared_.kept();
  counts.in_page_sets = store_.in_page_sets() - counts.held_by_readers;
  counts.asleep = store_.without_memory();
  if (ledger_) counts.held_elsewhere = ledger_->balance().held_elsewhere;
  return counts;
}

PoolEvents PagePool::events() {
  const PoolLock lock(shared_from_this());
  PoolEvents events = counted;
  events.pages_recycled = store_.pages_recycled;
  events.pages_fresh = store_.pages_fresh;
  return events;
}

void PagePool::set_budget(std::size_t bytes) {
  if (ledger_) {
    throw InvalidArgument("[Pool.budget] the budget is that of all pools that share \"",
                          ledger_->name(), "\", ", ledger_->limit(),
                          " bytes: close them all and make them with another");
  }
  const std::size_t pages = store_.in_pages(bytes);
  PoolLock lock(shared_from_this());
  store_.raise_if_broken();
  count_private_copies();
  MakeRoom(*this).shrink(lock, "Pool.budget", pages, bytes);
  store_.set_budget(pages);
}

std::vector<std::shared_ptr<Shrinker>> PagePool::shrinkers() { return alive(shrinkers_); }

void PagePool::add(const std::shared_ptr<Shrinker>& shrinker) {
  const PoolLock lock(shared_from_this());
  std::erase_if(shrinkers_, [](const auto& one) { return one.expired(); });
  shrinkers_.push_back(shrinker);
}

std::size_t PagePool::shrinkable() {
  std::vector<std::shared_ptr<Shrinker>> all;
  {
    const PoolLock lock(shared_from_this());
    all = shrinkers();
  }
  std::size_t pages = 0;
  for (const std::shared_ptr<Shrinker>& shrinker : all) pages += shrinker->shrinkable();
  return pages;
}

std::size_t PagePool::spared_elsewhere() {
  if (!ledger_) return 0;
  PoolLock lock(shared_from_this());
  const std::uint32_t request = ledger_->request();
  const auto until = steady_clock::now() + kAnswer;
  while (!ledger_->answered(request) && steady_clock::now() < until)
    wait_changed(lock, steady_clock::now() + kLook);
  return store_.in_pages(ledger_->balance().spared_elsewhere);
}

std::size_t PagePool::trim() {
  PoolLock lock(shared_from_this());
  store_.raise_if_broken();
  while (evict_oldest()) {
  }
  const Counted quiescing(quiescing_);
  quiesce(lock, "Pool.trim");
  finish_unmapping(lock);
  const std::size_t pages = store_.spare();
  const std::size_t at_once = traits().adjacent_handles ? pages : kReleasedAtOnce;
  for (std::size_t left = pages; left != 0 && store_.releasable() != 0;) {
    const std::size_t some = std::min(left, at_once);
    store_.release(lock, some);
    left -= some;
  }
  return pages;
}

bool PagePool::idle() const {
  // An end that has not taken effect may be that of a range's last generation.
  return in_flight() == 0 && ended_.load(std::memory_order_acquire) == nullptr &&
         ((wanting_.empty() && copied_.empty() && !store_.excess_due()) || !mapper_->running()) &&
         std::all_of(to_unmap_.begin(), to_unmap_.end(),
                     [](const auto& client) VT_LOCKED { return client->refusal() != nullptr; }) &&
         (options_.zero == ZeroPolicy::never || !mapper_->running() ||
          std::none_of(unclean_.begin(), unclean_.end(),
                       [](const auto& client) VT_LOCKED { return client->to_clean(); }));
}

void PagePool::wait_idle(std::chrono::nanoseconds timeout) {
  const auto until = steady_clock::now() + timeout;
  PoolLock lock(shared_from_this());
  std::exception_ptr refused = finish_unmapping(lock);  // tries refused unmappings again
  wake_mapper_ |= std::exchange(mapper_error_, nullptr) != nullptr;  // and of the mapper's thread
  store_.raise_if_broken();
  while (!refused && !idle()) {
    wake_mapper_ |= !wanting_.empty();
    if (steady_clock::now() >= until) {
      throw TimedOut("Pool.wait_idle", timeout,
                     text(to_unmap_.size(),
                          " tensors have pages that work on the device may still use, which ",
                          "stay mapped and go once it has ended; ", wanting_.size(),
                          " want pages ahead, ", unclean_.size(), " have pages to zero, and ",
                          in_flight(), " driver calls are under way"));
    }
    wait(lock, mapper_rests_, steady_clock::now() + kLook);
    refused = finish_unmapping(lock);
    if (!refused) refused = mapper_error_;
  }
  for (Client* client : clients_) {
    if (!refused) refused = client->take_error();
  }
  if (refused) std::rethrow_exception(refused);
}

void PagePool::retire() noexcept {
  std::unique_ptr<PageSender> sender;  // ends after the lock, for which its thread may wait
  PoolLock lock(shared_from_this());
  options_.cache = 0;
  retired_ = true;
  sender = std::move(sender_);
  while (evict_oldest()) {
  }
  if (store_.broken()) finish_unmapping(lock);
}

void PagePool::leave_budgets() {
  std::vector<std::shared_ptr<PagePool>> all;
  {
    const std::lock_guard listed(pools_mutex);
    all = alive(pools());
  }
  for (const std::shared_ptr<PagePool>& pool : all) {
    const PoolLock lock(pool);
    if (pool->ledger_) pool->ledger_->leave_at_exit();
  }
}

void PagePool::check_invariants() {
  PoolLock lock(shared_from_this());
  try {
    quiesce(lock, "check_invariants");
  } catch (const DriverError&) {
    // The pool is broken: no further call begins, and the last calls end.
    while (in_flight() != 0) wait_changed(lock, steady_clock::now() + kLook);
  }
  std::unordered_map<const Page*, PageUse> uses;
  for (Client* client : clients_) client->check(uses);
  store_.check(uses);
}

void PagePool::count_private_copies() {
  std::size_t private_copies = 0;
  std::unordered_set<const Page*> seen;
  for (Client* client : clients_)
    private_copies += vtensor::count_private_copies(client->range(), seen);
  store_.set_private_copies(private_copies);
}

bool PagePool::tidy() noexcept {
  drain_ended();
  if (shared_.publish()) wake_mapper();
  store_.give_back_charge();
  return std::exchange(wake_mapper_, false);
}

void PagePool::push(Ended* ended) noexcept {
  ended->next = ended_.load(std::memory_order_relaxed);
  while (!ended_.compare_exchange_weak(ended->next, ended, std::memory_order_acq_rel,
                                       std::memory_order_relaxed)) {
  }
}

// Called when the lock was released. Exchanges none for none: so either this sees a pushed end, or
// the thread that pushed it sees the lock free. With a plain load both could look too early.
bool PagePool::left_over() noexcept {
  Ended* none = nullptr;
  return !ended_.compare_exchange_strong(none, nullptr, std::memory_order_acq_rel,
                                         std::memory_order_acquire);
}

void PagePool::end(Ended* ended) noexcept {
  if (in_forked_child()) return;
  std::shared_ptr<PagePool> self = shared_from_this();
  push(ended);
  // The thread that has the lock looks again after releasing it. If this thread has the lock,
  // trying fails, which a POSIX mutex allows.
  const PoolLock tried(std::move(self), std::try_to_lock);
}

void PagePool::end_later(Ended* ended) noexcept {
  if (in_forked_child()) return;
  // From the push on the mapper may end the pool, which must not end in this thread.
  const std::shared_ptr<Mapper> mapper = mapper_;
  push(ended);
  mapper->wake();
}

void PagePool::drain_ended() noexcept {
  if (ended_.load(std::memory_order_relaxed) == nullptr) return;
  for (std::unique_ptr<Ended> ended(ended_.exchange(nullptr, std::memory_order_acquire));
       ended != nullptr;) {
    const std::unique_ptr<Ended> one(std::exchange(ended, nullptr));
    ended.reset(one->next);
    one->take_effect();
  }
}

std::exception_ptr PagePool::finish_unmapping(PoolLock& lock) noexcept {
  std::exception_ptr first;
  std::vector<std::shared_ptr<Client>> all;
  try {
    all.assign(to_unmap_.begin(), to_unmap_.end());
  } catch (const std::bad_alloc&) {
    return std::current_exception();
  }
  for (const std::shared_ptr<Client>& client : all) {
    if (client->finish_unmapping(&lock)) {
      to_unmap_.remove(client->hooks.to_unmap);
    } else if (!first) {
      first = client->refusal();
    }
  }
  shared_.collect();  // what was unmapped just now, where no reader has it
  return first;
}

}  // namespace vtensor
