#include "policy/make_room.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/align.h"
#include "base/trace.h"
#include "policy/client.h"
#include "policy/page_pool.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// How long a wait sleeps before it looks again at what nothing may have said.
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);
// How long a request waits for what is on its way out before more goes, which may stand behind less
// work; and although that would not suffice: others may give back.
constexpr std::chrono::nanoseconds kHope = std::chrono::milliseconds(200);
// How long it waits for the other pools of a shared budget, one of which may be stopped.
constexpr std::chrono::nanoseconds kAnswer = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kLookForAnswer = std::chrono::microseconds(100);
// Pages given to them in one step: the least that is worth their asking.
constexpr std::size_t kLentAtOnce = 32;

std::string need(const char* operation, std::size_t pages, std::size_t page_size) {
  return "[" + std::string(operation) + "] need " + std::to_string(pages) + " pages of " +
         std::to_string(page_size) + " bytes, ";
}

// Whether memory may come of what it has to give back. What sleeps has none, and what falls asleep
// or wakes is held by a thread that may be the one that asks.
bool may_settle(const Client& client) { return client.asleep.load() == 0; }

}  // namespace

// A search for pages, and what it asks of the other pools of a shared budget until its end.
class MakeRoom::Request {
 public:
  Request(PageStore& store, std::size_t pages) : store_(store), pages_(pages) {}
  ~Request() VT_LOCKED { want(0); }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  std::chrono::nanoseconds waited() const { return steady_clock::now() - since_; }

  // Asks for what is missing, once. Whether it may come.
  bool ask() VT_LOCKED {
    if (store_.shared() == nullptr || over_ || store_.in_use() + pages_ > store_.budget())
      return false;
    want(store_.uncovered_bytes(pages_));
    if (wanted_ == 0) return false;
    if (!asked_) {
      asking_ = store_.shared()->ask();
      asked_at_ = steady_clock::now();
      asked_ = true;
      return true;
    }
    over_ = store_.shared()->answered(asking_) || steady_clock::now() - asked_at_ >= kAnswer;
    return true;  // if it is over, what was given up is still to be looked for
  }

 private:
  void want(std::size_t bytes) VT_LOCKED {
    if (bytes == wanted_) return;
    store_.shared()->want(static_cast<std::int64_t>(bytes - wanted_));
    wanted_ = bytes;
  }

  PageStore& store_;
  const std::size_t pages_;
  const steady_clock::time_point since_ = steady_clock::now();
  steady_clock::time_point asked_at_;
  std::size_t wanted_ = 0;  // bytes
  std::uint32_t asking_ = 0;
  bool asked_ = false, over_ = false;
};

std::size_t MakeRoom::free_pages(std::size_t pages, std::size_t private_copies) {
  PageStore& store = pool_.store_;
  if (store.private_copies() != 0 && store.used() + store.private_copies() + pages > store.budget())
    pool_.count_private_copies();
  if (store.shared() == nullptr) return store.unused_beside(private_copies);
  if (store.in_use() + pages <= store.budget() && store.cover(pages)) return pages;
  return std::min(pages - 1, store.unused());  // by now others may have left more
}

std::size_t MakeRoom::pages_leaving() const {
  std::size_t leaving = 0;
  for (const std::shared_ptr<Client>& client : pool_.unsettled_)
    leaving += may_settle(*client) ? client->pages_leaving() : 0;
  return leaving;
}

bool MakeRoom::free(PoolLock& lock, const char* operation, std::size_t pages,
                    std::size_t private_copies) {
  const std::size_t page_size = pool_.page_size();
  bool looked_away = false;
  std::size_t free = free_pages(pages, private_copies);
  if (pages > free) {
    Request request(pool_.store_, pages);
    while (pages > free && take_back(lock, request, pages - free)) {
      looked_away = true;
      free = free_pages(pages, private_copies);
    }
    if (pages > free) {
      trace::event(trace::What::out_of_memory, 0, pages * page_size);
      if (const SharedBudget* const shared = pool_.store_.shared()) {
        throw OutOfPages(need(operation, pages, page_size) + "the budget \"" + shared->name() +
                         "\" of " + std::to_string(shared->limit()) + " bytes has " +
                         std::to_string(free) + " left: this pool holds " +
                         std::to_string(shared->held()) + " bytes, the others " +
                         std::to_string(shared->held_elsewhere()) +
                         ", and gave up what they can do without: free tensors or views here or "
                         "there (python -m vtensor top shows where)");
      }
      throw OutOfPages(need(operation, pages, page_size) + "the pool has " + std::to_string(free) +
                       " of " + std::to_string(pool_.store_.budget()) +
                       " free: free tensors or views, or raise the pool's budget");
    }
  }
  for (PageStore::Shortage shortage; (shortage = pool_.store_.shortage(pages)).missing != 0;) {
    looked_away = true;
    if (give_up_spare(lock)) continue;
    trace::event(trace::What::out_of_memory, 0, shortage.missing);
    throw ReserveReached(need(operation, pages, page_size) + "the device has " +
                         std::to_string(shortage.free) + " bytes free, of which the pool leaves " +
                         std::to_string(pool_.options().device_reserve) +
                         " to others: free memory, or lower the pool's reserve");
  }
  return looked_away;
}

bool MakeRoom::ready(PoolLock& lock, const char* operation, std::size_t pages,
                     std::size_t private_copies) {
  if (pages == 0) return false;
  for (bool looked_away = false;;) {
    looked_away |= free(lock, operation, pages, private_copies);
    try {
      if (!pool_.store_.make_ready(lock, pages)) return looked_away;
    } catch (const DeviceOutOfMemory&) {
      if (!give_up_spare(lock)) throw;
    }
    looked_away = true;
  }
}

void MakeRoom::shrink(PoolLock& lock, const char* operation, std::size_t pages, std::size_t bytes) {
  PageStore& store = pool_.store_;
  Request request(store, 0);
  for (;;) {
    while (store.in_use() > pages && take_back(lock, request, store.in_use() - pages)) {
    }
    if (pages == 0 || store.in_use() > pages) {
      const std::size_t least = std::max<std::size_t>(store.in_use(), 1) * pool_.page_size();
      throw OutOfPages("[" + std::string(operation) + "] need a budget of at least " +
                       std::to_string(least) + " bytes for what is in use, " +
                       std::to_string(bytes) +
                       " bytes were asked for: free tensors or views first");
    }
    const std::size_t most = pages - store.in_use();
    const std::size_t kept = store.spare().size();
    if (kept <= most) return;
    store.release(lock, kept - most);  // others may take pages meanwhile
  }
}

bool MakeRoom::give_up_spare(PoolLock& lock) {
  bool any = pool_.evict_oldest();
  for (auto client = pool_.clients_.begin(); !any && client != pool_.clients_.end(); ++client)
    any = (*client)->drop_ahead() != 0;
  if (any) pool_.settle_all(lock);
  return any;
}

bool MakeRoom::take_back(PoolLock& lock, Request& request, std::size_t missing) {
  const std::size_t before = pool_.store_.used();
  pool_.reap();
  pool_.settle_all(lock);
  if (pool_.store_.used() < before) return true;
  const std::chrono::nanoseconds patience = pool_.options().patience;
  const auto waited = request.waited();
  const bool hopes = waited < std::min(kHope, patience);
  const bool suffices = pages_leaving() >= missing;
  if (!(suffices && hopes) && give_up_spare(lock)) return true;
  // What is left to hope for are pages of other pools, those that wait for the mapper, or for work
  // on the device, and those of a client for which calls are made just now.
  const ClientList& unsettled = pool_.unsettled_;
  const bool others = !(suffices && hopes) && request.ask();
  const bool waits = std::any_of(
      unsettled.begin(), unsettled.end(),
      [](const auto& client) VT_LOCKED { return may_settle(*client) && !client->refusal(); });
  if (waited >= patience) return false;
  if (!others && pool_.in_flight() == 0) {
    if (!waits || (!hopes && !suffices)) return false;
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
  std::size_t pages = pool_.store_.unused();
  for (Client* const client : pool_.clients_) {
    if (client->range().copy_on_write() == 0) pages += client->pages_leaving();
  }
  return pages;
}

std::size_t MakeRoom::missing(std::size_t pages) const {
  PoolCounts counts;
  for (const std::shared_ptr<Client>& client : pool_.cached_) client->add_to(counts);
  return pages - std::min(pages, pages_to_come() + counts.cached);
}

std::size_t MakeRoom::begin(std::size_t pages) {
  std::size_t found = pages_to_come();
  while (found < pages && !pool_.cached_.empty()) {
    const std::shared_ptr<Client> oldest = pool_.cached_.oldest();
    const std::size_t before = oldest->pages_leaving();
    oldest->evict();
    found += oldest->pages_leaving() - before;
  }
  return pages - std::min(pages, found);
}

MakeRoom::Lent MakeRoom::lend(PoolLock& lock) {
  PageStore& store = pool_.store_;
  const std::size_t missing = store.shared()->missing_elsewhere();
  if (missing == 0) return Lent::nothing;
  if (store.spare().size() == 0) {
    pool_.settle_all(lock);
    const std::size_t leaving = pages_leaving() * pool_.page_size();
    if (store.spare().size() == 0 && leaving >= missing) return Lent::waits;
    if (store.spare().size() == 0 && !give_up_spare(lock)) {
      const Lent lent = lend_kept(lock, ceil_div(missing - leaving, pool_.page_size()));
      return lent == Lent::nothing && leaving != 0 ? Lent::waits : lent;
    }
  }
  store.release(lock, kLentAtOnce);
  return Lent::some;
}

MakeRoom::Lent MakeRoom::lend_kept(PoolLock& lock, std::size_t pages) {
  const std::vector<std::shared_ptr<Keeper>> keepers = pool_.keepers();
  // An operation that itself asks for memory may last as long as we owe the answer.
  bool waits = false;
  const SharedBudget* const shared = pool_.store_.shared();
  const bool asks = shared != nullptr && shared->wants();
  std::size_t given = 0;
  if (!keepers.empty()) {
    const Unlocked keepers_take_the_lock(lock);  // fork(2) waits for them
    for (const std::shared_ptr<Keeper>& keeper : keepers) {
      const std::optional<std::size_t> some = keeper->give_up(std::max(pages, kLentAtOnce));
      given += some.value_or(0);
      waits |= !some && !asks;
      if (given >= pages) break;
    }
  }
  if (given != 0) return Lent::some;
  return waits ? Lent::waits : Lent::nothing;
}

bool MakeRoom::give_up_kept() {
  PoolLock lock(pool_.shared_from_this());
  return lend_kept(lock, kLentAtOnce) == Lent::some;
}

bool MakeRoom::give_all_back(bool spare) noexcept {
  PoolLock lock(pool_.shared_from_this());
  pool_.reap();
  bool any = !pool_.unsettled_.empty();
  while (spare ? give_up_spare(lock) : pool_.evict_oldest()) any = true;
  pool_.settle_all(lock);
  return any;
}

namespace {

// Rung 6. False if that gave nothing back; else the operation was tried once more.
bool try_again(PagePool& pool, const Caller& caller, const Outside& outside, bool no_memory,
               const std::function<void()>& body) {
  bool gave = false;
  outside.run([&] { gave = MakeRoom(pool).give_all_back(no_memory); });
  if (!no_memory && !gave) return false;
  const bool device = pool.traits().asynchronous;
  const bool emptied = !no_memory || !device || outside.empty_cache();
  try {
    outside.run(body);
  } catch (const DeviceOutOfMemory& refusal) {
    if (!device) throw;
    throw OutOfPages("[" + std::string(caller.operation) + "] need a page of " +
                     std::to_string(pool.page_size()) + " bytes, the device has no memory left: " +
                     std::to_string(pool.driver().free_memory()) + " bytes free " +
                     (emptied ? "after torch gave back its cache"
                              : "while torch cannot give back its cache, as during a capture") +
                     " (" + refusal.name +
                     "): free tensors, here or in other processes, or lower the pool's budget");
  }
  return true;
}

}  // namespace

void with_memory(PagePool& pool, const Caller& caller, const Outside& outside,
                 const std::function<void()>& body) {
  const auto attempt = [&] {
    try {
      outside.run(body);
    } catch (const UndoFailed&) {
      throw;
    } catch (const DeviceOutOfMemory&) {
      try_again(pool, caller, outside, true, body);
    } catch (const ReserveReached&) {
      try_again(pool, caller, outside, true, body);
    } catch (const DriverError&) {
      if (!try_again(pool, caller, outside, false, body)) throw;
    }
  };
  const auto gives_up = [&outside](unsigned tries) {
    return outside.give_up && outside.give_up(tries);
  };
  for (unsigned tries = 0;; ++tries) {
    try {
      return attempt();
    } catch (const OutOfPages&) {
      if (!gives_up(tries)) throw;
    } catch (const DeviceOutOfMemory&) {
      if (!gives_up(tries)) throw;
    }
  }
}

}  // namespace vtensor
