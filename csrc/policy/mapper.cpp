#include "policy/mapper.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/errors.h"
#include "base/thread.h"
#include "base/trace.h"
#include "policy/client.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// The most that one step maps, zeroes or unmaps, because a caller that overtakes the mapper waits
// for the step. On the host time goes by bytes populated, on a device by calls. Unmapping stops
// after the first call that ends after kStepTime, because a call may wait for the device.
constexpr std::size_t kStepBytes = std::size_t{1} << 20;
constexpr std::size_t kStepPages = 32;
constexpr std::chrono::nanoseconds kStepTime = std::chrono::milliseconds(1);
constexpr std::chrono::nanoseconds kShortestPause = std::chrono::microseconds(20);
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(1);
constexpr std::chrono::nanoseconds kRetryPause = std::chrono::milliseconds(250);
// The longest sleep on a shared word, because the word may move.
constexpr std::chrono::nanoseconds kSharedSleep = std::chrono::seconds(1);

}  // namespace

void Mapper::start(std::weak_ptr<PagePool> pool) {
  if (running()) return;
  thread_ = start_thread(
      "vtensor-mapper", ThreadRole::mapper,
      "[mapper] the system has no thread for a pool's mapper (EAGAIN): raise the process's limits "
      "(ulimit -u, ulimit -v), or make the pool without look-ahead",
      [pool = std::move(pool), self = shared_from_this()] { self->run(pool); });
}

void Mapper::wake() noexcept {
  if (!shared_word_) {
    own_word_.wake();
  } else if (own_word_.set()) {
    shared_word_().wake();
  }
}

void Mapper::sleep(Time until) noexcept {
  if (!shared_word_) {
    own_word_.sleep(until);
  } else if (own_word_.arm()) {
    shared_word_().sleep(std::min(until, steady_clock::now() + kSharedSleep));
  }
}

void Mapper::stop() noexcept {
  if (!thread_) return;
  wake();
  if (thread_->get_id() == std::this_thread::get_id()) {
    thread_->detach();
  } else {
    thread_->join();
  }
  thread_.reset();
}

void Mapper::run(const std::weak_ptr<PagePool>& weak) {
  bool entered = false;
  std::chrono::nanoseconds pause = kShortestPause;
  std::chrono::nanoseconds retry = kLongestPause;
  for (;;) {
    Time next;
    {
      const std::lock_guard at_work(at_work_);
      const std::shared_ptr<PagePool> pool = weak.lock();
      if (!pool) return;  // the shared word may be another pool's by now
      own_word_.reset();
      if (shared_word_) shared_word_().reset();
      try {
        if (!entered) enter(pool);
        entered = true;
        next = serve(pool, pause);
        retry = kLongestPause;
      } catch (const std::exception&) {  // a refusal, or no memory
        if (!entered) retry = kRetryPause;
        // Asks the device of a closed pool no more, if it never answered.
        next = !entered && pool->retired() ? Time::max() : steady_clock::now() + retry;
        retry = std::min(2 * retry, kRetryPause);
      }
    }  // the last reference to the pool may go here
    sleep(next);
  }
}

// Makes the thread's first driver call, which makes the device's context current. A refusal belongs
// to no client: the mapper tries again, and wait_idle() raises it.
void Mapper::enter(const std::shared_ptr<PagePool>& pool) {
  if (!pool->traits().asynchronous) return;
  std::exception_ptr error;
  try {
    static_cast<void>(pool->driver().free_memory());
  } catch (...) {
    error = std::current_exception();
  }
  const PoolLock lock(pool);
  pool->set_mapper_error(error);
  if (error) std::rethrow_exception(error);
}

// Finds one client that has work, and does some of it: claims with the lock, carries out without
// the lock, and enters with the lock again. Each function returns whether it did something.
class Mapper::Step {
 public:
  Step(PagePool& pool, PoolLock& lock)
      : pool_(pool),
        lock_(lock),
        most_(
            std::max(pool.traits().asynchronous ? kStepPages : 1, kStepBytes / pool.page_size())) {}

  // Maps pages ahead of need.
  bool map_ahead() VT_LOCKED {
    ClientList& wanting = pool_.wanting();
    if (wanting.empty()) return false;
    const std::size_t pages = find_pages();
    for (auto at = wanting.begin(); at != wanting.end();) {
      const std::shared_ptr<Client> client = *at++;
      if (client->busy() || (pages == 0 && MakeRoom(pool_).pages_leaving() != 0)) {
        waits = true;
        if (client->hooks.first) return false;  // the next pages are for this client
        continue;
      }
      Reservation::Arrival arrival;
      if (!client->claim_ahead(arrival, pages)) continue;
      {
        const Unlocked unlocked(lock_);
        Reservation::Arrival* const one = &arrival;
        Reservation::carry_out({&one, 1}, pool_.driver().side_stream(), true);
      }
      client->enter_ahead(arrival);
      if (!client->hooks.first) wanting.move_last(client->hooks.wanting);
      return true;
    }
    return false;
  }

  // Unmaps pages that nothing needs. Asks each client once at most, in turn.
  bool give_back() VT_LOCKED {
    ClientList& to_unmap = pool_.to_unmap();
    for (std::size_t left = to_unmap.size(); left != 0 && !to_unmap.empty(); --left) {
      const std::shared_ptr<Client> client = to_unmap.front();
      to_unmap.move_last(client->hooks.to_unmap);
      // Unmapping touches no memory, so a step takes more pages.
      switch (client->give_back_some(lock_, 8 * most_, steady_clock::now() + kStepTime)) {
        case Client::Unmapped::some:
          return true;
        case Client::Unmapped::waits:
          waits = true;
          break;
        case Client::Unmapped::refused:
          refused = true;
          break;
        case Client::Unmapped::done:
          to_unmap.remove(client->hooks.to_unmap);
          break;
      }
    }
    return false;
  }

  // Zeroes pages for their next owner.
  bool clean() VT_LOCKED {
    ClientList& unclean = pool_.unclean();
    for (auto at = unclean.begin(); at != unclean.end();) {
      const std::shared_ptr<Client> client = *at++;
      if (client->clean_some(lock_, most_)) return true;
      if (client->to_clean()) {
        waits = true;
      } else {
        unclean.remove(client->hooks.unclean);
      }
    }
    return false;
  }

  bool waits = false;    // a client waits for the device, or for a caller's operation
  bool refused = false;  // the driver refused a call, which is tried again later

 private:
  // Finds free pages for one client, with memory if making it takes the driver long.
  std::size_t find_pages() VT_LOCKED {
    std::size_t wanted = 0;
    for (const std::shared_ptr<Client>& client : pool_.wanting()) {
      if (wanted >= most_) break;
      wanted += client->missing_ahead();
    }
    PageStore& store = pool_.store();
    try {
      const std::size_t most = std::min(most_, store.available());
      try {
        store.make_ready(lock_, std::min(wanted, most));
      } catch (...) {
        // Claiming the pages is refused again, in the name of the client that wants them.
      }
      return store.charge_available(most);  // callers may have taken pages meanwhile
    } catch (const DriverError&) {
      throw;  // the mapper tries again
    } catch (const Error&) {
      return 0;  // a shared budget's error: an operation that needs the pages raises it
    }
  }

  PagePool& pool_;
  PoolLock& lock_;
  const std::size_t most_;
};

Mapper::Time Mapper::serve(const std::shared_ptr<PagePool>& pool, std::chrono::nanoseconds& pause) {
  PoolLock lock(pool);
  Time next = Time::max();
  for (bool back_first = false;; back_first = !back_first) {
    while (pool->quiescing()) pool->wait_changed(lock, steady_clock::now() + kLongestPause);
    const MakeRoom::Given given = MakeRoom(*pool).give_to_others(lock);
    if (given == MakeRoom::Given::some) {
      const Unlocked others_first(lock);
      continue;
    }
    Step step(*pool, lock);
    if (!pool->store().broken() && ((back_first && step.give_back()) || step.map_ahead() ||
                                    (!back_first && step.give_back()) || step.clean())) {
      pause = kShortestPause;
      continue;
    }
    next = pool->maintain(lock);
    if (next <= steady_clock::now()) {
      const Unlocked others_first(lock);
      continue;
    }
    if (step.refused && !pool->retired()) next = std::min(next, steady_clock::now() + kRetryPause);
    if (!step.waits && given != MakeRoom::Given::waits) {
      pause = kShortestPause;
    } else {
      next = std::min(next, steady_clock::now() + pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    break;
  }
  pool->mapper_rests();
  return next;
}

}  // namespace vtensor
