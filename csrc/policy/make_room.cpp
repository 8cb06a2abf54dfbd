#include "policy/make_room.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/trace.h"
#include "policy/client.h"
#include "policy/page_pool.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// How long a wait sleeps before it looks again at what nothing may have said.
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);
// How long a request waits although what is on its way out would not suffice: others may give back.
constexpr std::chrono::nanoseconds kHope = std::chrono::milliseconds(200);

std::string need(const char* operation, std::size_t pages, std::size_t page_size) {
  return "[" + std::string(operation) + "] need " + std::to_string(pages) + " pages of " +
         std::to_string(page_size) + " bytes, ";
}

}  // namespace

std::size_t MakeRoom::free_pages(std::size_t pages, std::size_t private_copies) {
  const PageStore& store = pool_.store_;
  if (store.private_copies() != 0 && store.used() + store.private_copies() + pages > store.budget())
    pool_.count_private_copies();
  return store.unused_beside(private_copies);
}

bool MakeRoom::free(PoolLock& lock, const char* operation, std::size_t pages,
                    std::size_t private_copies) {
  const std::size_t page_size = pool_.page_size();
  bool looked_away = false;
  std::size_t free = free_pages(pages, private_copies);
  if (pages > free) {
    const auto since = steady_clock::now();
    while (pages > free && take_back(lock, since, pages - free)) {
      looked_away = true;
      free = free_pages(pages, private_copies);
    }
    if (pages > free) {
      trace::event(trace::What::out_of_memory, 0, pages * page_size);
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
  const auto since = steady_clock::now();
  for (;;) {
    while (store.in_use() > pages && take_back(lock, since, store.in_use() - pages)) {
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

bool MakeRoom::take_back(PoolLock& lock, Time since, std::size_t missing) {
  const std::size_t before = pool_.store_.used();
  pool_.reap();
  pool_.settle_all(lock);
  if (pool_.store_.used() < before) return true;
  if (give_up_spare(lock)) return true;
  // What is left to hope for are pages that wait for the mapper, or for work on the device, and
  // those of a client for which calls are made just now.
  const Roster& unsettled = pool_.unsettled_;
  const auto waited = steady_clock::now() - since;
  const bool waits = std::any_of(unsettled.begin(), unsettled.end(),
                                 [](const auto& client) VT_LOCKED { return !client->refusal(); });
  if ((pool_.in_flight() == 0 && !waits) || waited >= pool_.options().patience) return false;
  std::size_t leaving = 0;
  for (const std::shared_ptr<Client>& client : unsettled) leaving += client->pages_leaving();
  if (pool_.in_flight() == 0 && leaving < missing && waited >= kHope) return false;
  const trace::Span span(trace::What::wait, 0, 0);
  pool_.wait_changed(lock, steady_clock::now() + kLook);
  return true;
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

// Rung 5. False if that gave nothing back; else the operation was tried once more.
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
