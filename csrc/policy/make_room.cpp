#include "policy/make_room.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/align.h"
#include "base/trace.h"
#include "policy/client.h"
#include "policy/page_pool.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// The longest sleep of a wait before it looks again.
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);
// How long a request waits for leaving pages before it evicts others, which may wait for less work;
// and before it fails because the leaving pages do not suffice: other threads may give pages back.
constexpr std::chrono::nanoseconds kGrace = std::chrono::milliseconds(200);
// How long a request waits for the other pools of a shared budget. If a pool is stopped, only the
// first request waits kAnswer, until all pools answer again.
constexpr std::chrono::nanoseconds kAnswer = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kAnswerAfterNone = std::chrono::milliseconds(100);
constexpr std::chrono::nanoseconds kLookForAnswer = std::chrono::microseconds(100);
// Pages given to others in one step: fewer are not worth a request.
constexpr std::size_t kPagesAtOnce = 32;

// Whether unmapping the client's pages may free memory. A sleeping client has none, and the thread
// that puts a client to sleep or wakes it may be the one that asks.
bool may_bring_memory(const Client& client) { return client.asleep.load() == 0; }

}  // namespace

// A search for pages, with its request to the other pools of a shared budget.
class MakeRoom::Request {
 public:
  Request(PageStore& store, std::size_t pages) : store_(store), pages_(pages) {}
  ~Request() VT_LOCKED { withdraw(); }
  Request& operator=(Request&&) = delete;

  std::chrono::nanoseconds waited() const { return steady_clock::now() - since_; }

  // Nothing is missing: other pools give up no more.
  void withdraw() VT_LOCKED { want(0); }
  // Asks for what is missing: again if more is missing than was asked for, as when the mapper has
  // given back memory meanwhile. True while it may come.
  bool ask() VT_LOCKED {
    Ledger* const ledger = store_.ledger();
    if (ledger == nullptr || store_.in_use() + pages_ > store_.budget()) return false;
    const std::size_t asked = wanted_;
    want(store_.bytes_to_charge(pages_));
    if (wanted_ > asked) {
      const auto patience = ledger->missed_answers() ? kAnswerAfterNone : kAnswer;
      until_ = std::min(until_, steady_clock::now() + patience);  // from its first question on
      request_ = ledger->request();
      over_ = false;
      return true;
    }
    if (wanted_ == 0 || over_) return false;
    const bool answered = ledger->answered(request_);
    over_ = answered || steady_clock::now() >= until_;
    if (over_) ledger->note_answers(answered);
    return true;  // also once: the caller has yet to look for what was given up
  }

 private:
  void want(std::size_t bytes) VT_LOCKED {
    if (bytes == wanted_) return;
    store_.ledger()->want(static_cast<std::int64_t>(bytes - wanted_));
    wanted_ = bytes;
  }

  PageStore& store_;
  const std::size_t pages_;
  const steady_clock::time_point since_ = steady_clock::now();
  steady_clock::time_point until_ = steady_clock::time_point::max();
  std::size_t wanted_ = 0;  // bytes
  std::uint32_t request_ = 0;
  bool over_ = false;
};

std::size_t MakeRoom::free_pages(std::size_t pages, std::size_t private_copies) {
  PageStore& store = pool_.store();
  if (store.private_copies() != 0 && store.used() + store.private_copies() + pages > store.budget())
    pool_.count_private_copies();
  if (store.ledger() == nullptr) return store.unused(private_copies);
  if (store.left(private_copies) >= pages && store.charge(pages)) return pages;
  // By now other pools may have left more.
  return std::min(pages - 1, store.unused(private_copies));
}

std::size_t MakeRoom::pages_leaving() const {
  std::size_t leaving = 0;
  for (const std::shared_ptr<Client>& client : pool_.to_unmap())
    leaving += may_bring_memory(*client) ? client->pages_leaving() : 0;
  return leaving;
}

bool MakeRoom::ready(PoolLock& lock, const char* operation, std::size_t pages,
                     std::size_t private_copies) {
  if (pages == 0) return false;
  PageStore& store = pool_.store();
  Request request(store, pages);
  for (bool unlocked = false;; unlocked = true) {
    const std::size_t free = free_pages(pages, private_copies);
    const bool in_budget = free >= pages;
    if (in_budget) request.withdraw();
    const std::size_t missing = in_budget ? sub_sat(pages, store.releasable()) : pages - free;
    if (in_budget && pages <= store.beside_reserve()) {
      try {
        if (!store.make_ready(lock, pages)) return unlocked;
      } catch (const DeviceOutOfMemory&) {
        // While make_ready() was without the lock, other threads may have given back pages.
        const std::size_t still = sub_sat(pages, store.releasable());
        if (still != 0 && !take_back(lock, request, still)) throw;
      }
    } else if (!take_back(lock, request, missing)) {
      trace::event(trace::What::out_of_memory, 0, missing * pool_.page_size());
      refuse(operation, pages, free);
    }
  }
}

void MakeRoom::refuse(const char* operation, std::size_t pages, std::size_t free) const {
  const std::string needed =
      text("[", operation, "] need ", pages, " pages of ", pool_.page_size(), " bytes, ");
  if (free >= pages) {
    throw ReserveReached(needed, "the device has ", pool_.driver().free_memory(),
                         " bytes free, of which the pool leaves ", pool_.options().device_reserve,
                         " to others: free memory, or lower the pool's reserve");
  }
  if (const Ledger* const ledger = pool_.store().ledger()) {
    throw OutOfPages(needed, "the budget \"", ledger->name(), "\" of ", ledger->limit(),
                     " bytes has ", free, " left: this pool holds ", ledger->held(),
                     " bytes, the others ", ledger->balance().held_elsewhere,
                     ", and gave up what they can do without: free tensors or views here or there "
                     "(python -m vtensor top shows where)");
  }
  throw OutOfPages(needed, "the pool has ", free, " of ", pool_.store().budget(),
                   " free: free tensors or views, or raise the pool's budget");
}

void MakeRoom::shrink(PoolLock& lock, const char* operation, std::size_t pages, std::size_t bytes) {
  PageStore& store = pool_.store();
  Request request(store, 0);
  for (;;) {
    while (store.in_use() > pages && take_back(lock, request, store.in_use() - pages)) {
    }
    if (pages == 0 || store.in_use() > pages) {
      const std::size_t least = std::max<std::size_t>(store.in_use(), 1) * pool_.page_size();
      throw OutOfPages("[", operation, "] need a budget of at least ", least,
                       " bytes for what is in use, ", bytes,
                       " bytes were asked for: free tensors or views first");
    }
    const std::size_t most = pages - store.in_use();
    const std::size_t kept = store.releasable() + store.under_way();
    if (kept <= most) return;
    if (store.releasable() != 0) {
      store.release(lock, kept - most);  // other threads may take pages meanwhile
    } else {
      pool_.await(lock, operation, "a driver call that makes memory or gives it back",
                  [&store, most]()
                      VT_LOCKED { return store.releasable() != 0 || store.under_way() <= most; });
    }
  }
}

bool MakeRoom::give_up_spare(PoolLock& lock) {
  if (pool_.store().broken()) return false;
  bool any = pool_.evict_oldest();
  for (auto client = pool_.clients().begin(); !any && client != pool_.clients().end(); ++client)
    any = (*client)->drop_ahead() != 0;
  if (any) pool_.finish_unmapping(lock);
  return any;
}

bool MakeRoom::take_back(PoolLock& lock, Request& request, std::size_t missing) {
  pool_.store().raise_if_broken();
  const std::size_t before = pool_.store().used();
  pool_.drain_ended();
  pool_.finish_unmapping(lock);
  if (pool_.store().used() < before) return true;
  const std::chrono::nanoseconds patience = pool_.options().patience;
  const auto waited = request.waited();
  const bool in_grace = waited < std::min(kGrace, patience);
  const bool suffices = pages_leaving() + pool_.store().under_way() >= missing;
  if (!(suffices && in_grace) && give_up_spare(lock)) return true;
  // More pages may come from other pools, from clients that wait for the mapper or the device, and
  // from driver calls under way.
  const ClientList& to_unmap = pool_.to_unmap();
  const bool others = !(suffices && in_grace) && request.ask();
  const bool waits = std::any_of(
      to_unmap.begin(), to_unmap.end(),
      [](const auto& client) VT_LOCKED { return may_bring_memory(*client) && !client->refusal(); });
  if (waited >= patience) return false;
  if (!others && pool_.in_flight() == 0) {
    if (!waits || (!in_grace && !suffices)) return false;
  }
  const trace::Span span(trace::What::wait, 0, 0);
  pool_.wait_changed(lock, steady_clock::now() + (others ? kLookForAnswer : kLook));
  return true;
}

bool MakeRoom::await_leaving(PoolLock& lock) {
  if (pages_leaving() == 0 && pool_.in_flight() == 0) return false;
  const trace::Span span(trace::What::wait, 0, 0);
  pool_.wait_changed(lock, steady_clock::now() + kLook);
  return true;
}

std::size_t MakeRoom::pages_to_come() const {
  const PageStore& store = pool_.store();
  std::size_t pages = std::min(store.unused(), store.beside_reserve());
  for (Client* const client : pool_.clients()) {
    if (client->range().copy_on_write() == 0) pages += client->pages_leaving();
  }
  return pages;
}

std::size_t MakeRoom::missing(std::size_t pages) const {
  PoolCounts counts;
  for (const std::shared_ptr<Client>& client : pool_.cached()) client->count(counts);
  return sub_sat(pages, pages_to_come() + counts.cached);
}

MakeRoom::Spare MakeRoom::spare() const {
  const std::unordered_set<const SharedRange*> read = pool_.shared().read();
  PoolCounts all, kept;
  for (const Client* const client : pool_.clients()) {
    client->count(all);
    if (read.contains(client->range().shared().get())) client->count(kept);
  }
  const std::size_t pages = all.cached + all.prefetched;
  return {pages, pages - kept.cached - kept.prefetched};
}

std::size_t MakeRoom::begin(std::size_t pages) {
  std::size_t found = pages_to_come();
  while (found < pages && !pool_.cached().empty()) {
    const std::shared_ptr<Client> oldest = pool_.cached().front();
    const std::size_t before = oldest->pages_leaving();
    oldest->evict();
    found += oldest->pages_leaving() - before;
  }
  return sub_sat(pages, found);
}

MakeRoom::Given MakeRoom::give_to_others(PoolLock& lock) {
  Ledger* const ledger = pool_.store().ledger();
  if (ledger == nullptr) return Given::nothing;
  const std::optional<std::uint32_t> request = ledger->unanswered();
  const Ledger::Balance balance = ledger->balance();
  Given given = Given::nothing;
  try {
    if (balance.wanted_elsewhere > balance.room)
      given = give(lock, balance.wanted_elsewhere - balance.room);
  } catch (const std::exception&) {
    // A refusal: this pool gives up no more, and may answer.
  }
  if (given == Given::nothing && request) answer(lock, *request);
  return given;
}

MakeRoom::Given MakeRoom::give(PoolLock& lock, std::size_t missing) {
  PageStore& store = pool_.store();
  store.raise_if_broken();
  if (store.releasable() == 0) {
    pool_.finish_unmapping(lock);
    const std::size_t leaving = pages_leaving() * pool_.page_size();
    if (store.releasable() == 0 && leaving >= missing) return Given::waits;
    if (store.releasable() == 0 && !give_up_spare(lock)) {
      const Given given = run_shrinkers(lock, ceil_div(missing - leaving, pool_.page_size()));
      if (given != Given::nothing) return given;
      // An operation that ended meanwhile may have given pages back.
      if (store.releasable() != 0) return Given::some;
      return pages_leaving() != 0 ? Given::waits : Given::nothing;
    }
  }
  store.release(lock, kPagesAtOnce);
  return Given::some;
}

MakeRoom::Given MakeRoom::run_shrinkers(PoolLock& lock, std::size_t pages) {
  // If this pool asks for memory too, the operation of a shrinker may wait for a pool that waits
  // for this answer.
  const Ledger* const ledger = pool_.store().ledger();
  const bool asks = ledger != nullptr && ledger->wants();
  const std::vector<std::shared_ptr<Shrinker>> all = pool_.shrinkers();
  if (all.empty()) return Given::nothing;
  const Unlocked shrinkers_take_the_lock(lock);
  bool waits = false;
  std::size_t given = 0;
  for (const std::shared_ptr<Shrinker>& shrinker : all) {
    const std::optional<std::size_t> some = shrinker->shrink(std::max(pages, kPagesAtOnce));
    given += some.value_or(0);
    waits |= !some && !asks;
    if (given >= pages) break;
  }
  if (given != 0) return Given::some;
  return waits ? Given::waits : Given::nothing;
}

bool MakeRoom::run_shrinkers(unsigned tries) {
  PoolLock lock(pool_.shared_from_this());
  return run_shrinkers(lock, kPagesAtOnce << std::min(tries, 10U)) == Given::some;
}

void MakeRoom::answer(PoolLock& lock, std::uint32_t request) {
  std::size_t shrinkable = 0;
  if (!pool_.shrinkers().empty()) {
    const Unlocked shrinkers_take_the_lock(lock);
    shrinkable = pool_.shrinkable();
  }
  pool_.store().ledger()->answer(request, (spare().taken_back + shrinkable) * pool_.page_size(),
                                 pool_.store().spare() * pool_.page_size());
}

bool MakeRoom::give_all_back(bool spare) noexcept {
  PoolLock lock(pool_.shared_from_this());
  if (pool_.store().broken()) return false;
  bool any = !pool_.to_unmap().empty();
  while (spare ? give_up_spare(lock) : pool_.evict_oldest()) any = true;
  pool_.finish_unmapping(lock);
  return any;
}

namespace {

// Rung 6. False if it found nothing to give back; else `body` ran once more.
bool try_again(PagePool& pool, const Caller& caller, const std::function<void()>& body,
               const std::function<bool()>& empty_cache, bool no_memory) {
  const bool gave = MakeRoom(pool).give_all_back(no_memory);
  if (!no_memory && !gave) return false;
  const bool device = pool.traits().asynchronous;
  const bool emptied = !no_memory || !device || empty_cache();
  try {
    body();
  } catch (const DeviceOutOfMemory& refusal) {
    if (!device) throw OutOfPages(refusal.what());
    throw OutOfPages("[", caller.operation, "] need a page of ", pool.page_size(),
                     " bytes, the device has no memory left: ", pool.driver().free_memory(),
                     " bytes free ",
                     (emptied ? "after torch gave back its cache"
                              : "while torch cannot give back its cache, as during a capture"),
                     " (", refusal.name,
                     "): free tensors, here or in other processes, or lower the pool's budget");
  }
  return true;
}

}  // namespace

void with_memory(PagePool& pool, const Caller& caller, const std::function<void()>& body,
                 const std::function<bool()>& empty_cache, const GiveUp& give_up) {
  pool.store().raise_if_broken();
  const auto attempt = [&] {
    try {
      body();
    } catch (const DeviceOutOfMemory&) {
      try_again(pool, caller, body, empty_cache, true);
    } catch (const ReserveReached&) {
      try_again(pool, caller, body, empty_cache, true);
    } catch (const DriverError&) {
      if (!try_again(pool, caller, body, empty_cache, false)) throw;
    }
  };
  for (unsigned tries = 0;; ++tries) {
    try {
      return attempt();
    } catch (const OutOfPages&) {
      if (give_up && give_up(tries)) continue;
      if (!MakeRoom(pool).run_shrinkers(tries)) throw;
    }
  }
}

}  // namespace vtensor
