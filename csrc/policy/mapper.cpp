#include "policy/mapper.h"

#include <algorithm>
#include <optional>
#include <system_error>
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

namespace {

// What one step maps, zeroes or unmaps: a caller that overtakes the mapper waits for no more than
// this. Populating memory takes time by the byte; a device does its work in its own time, so there
// calls take time. Unmapping ends with the first call that ends after so long, because calls may
// wait for what runs on the device.
constexpr std::size_t kStepBytes = std::size_t{1} << 20;
constexpr std::size_t kStepPages = 32;
constexpr std::chrono::nanoseconds kStepTime = std::chrono::milliseconds(1);
constexpr std::chrono::nanoseconds kShortestPause = std::chrono::microseconds(20);
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(1);
constexpr std::chrono::nanoseconds kRetryPause = std::chrono::milliseconds(250);
// The longest sleep on a shared word, which may move.
constexpr std::chrono::nanoseconds kSharedSleep = std::chrono::seconds(1);

}  // namespace

void Mapper::start(std::weak_ptr<PagePool> pool) {
  try {
    thread_ = start_thread("vtensor-mapper", ThreadRole::mapper,
                           [pool = std::move(pool), signal = signal_] { run(pool, signal); });
  } catch (const std::system_error& error) {
    throw DriverError(
        "pthread_create", error.code().value(), "EAGAIN",
        "[mapper] the system has no thread for a pool's mapper (EAGAIN): raise the "
        "process's limits (ulimit -u, ulimit -v), or make the pool without look-ahead");
  }
}

void Mapper::Signal::wake() noexcept {
  if (!shared_word_) {
    own_word_.wake();
  } else if (own_word_.set()) {
    shared_word_().wake();
  }
}

bool Mapper::Signal::begin() noexcept {
  if (stopping_.load(std::memory_order_acquire)) return false;
  own_word_.reset();
  if (shared_word_) shared_word_().reset();
  return !stopping_.load(std::memory_order_acquire);
}

void Mapper::Signal::sleep(Time until) noexcept {
  if (!shared_word_) {
    own_word_.sleep(until);
  } else if (own_word_.arm()) {
    shared_word_().sleep(std::min(until, std::chrono::steady_clock::now() + kSharedSleep));
  }
}

void Mapper::stop() noexcept {
  if (!thread_) return;
  signal_->stopping_.store(true, std::memory_order_release);
  signal_->wake();
  if (thread_->get_id() == std::this_thread::get_id()) {
    thread_->detach();
  } else {
    thread_->join();
  }
  thread_.reset();
}

void Mapper::run(const std::weak_ptr<PagePool>& weak, const std::shared_ptr<Signal>& signal) {
  bool entered = false;
  std::chrono::nanoseconds pause = kShortestPause;
  std::chrono::nanoseconds retry = kLongestPause;
  while (signal->begin()) {
    Time next;
    {
      const std::lock_guard at_work(signal->at_work_);
      const std::shared_ptr<PagePool> pool = weak.lock();
      if (!pool) return;
      try {
        if (!entered) enter(pool);
        entered = true;
        next = serve(pool, *signal, pause);
        retry = kLongestPause;
      } catch (const std::exception&) {  // refused, or no memory
        if (!entered) retry = kRetryPause;
        next = pool->retired() ? Time::max() : std::chrono::steady_clock::now() + retry;
        retry = std::min(2 * retry, kRetryPause);
      }
    }  // the pool may end here, in this thread
    signal->sleep(next);
  }
}

// Makes the first driver call of this thread, which has the device's context made current. A
// refusal is no client's: it is tried again, and wait_idle() raises it.
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

// One step: claimed with the lock, carried out without it, and entered with it again. It does one
// kind of work, for as many clients as it has room for; but on a device, where each call may wait,
// it maps pages for one.
class Mapper::Step {
 public:
  explicit Step(PagePool& pool)
      : pool_(pool),
        most_(
            std::max(pool.traits().asynchronous ? kStepPages : 1, kStepBytes / pool.page_size())) {}

  // A client waits for the device, or for a caller's operation.
  bool waits() const { return waits_; }
  // The driver refused what is tried again later.
  bool refused() const { return refused_; }

  bool claim_ahead(PoolLock& lock) VT_LOCKED {
    if (pool_.wanting().empty()) return false;
    std::size_t pages = 0;
    try {
      const std::size_t most = std::min(most_, pool_.store().available());
      make_ready(lock, most);
      pages = pool_.store().cover_available(most);  // callers may have taken some meanwhile
    } catch (const DriverError&) {
      throw;  // the mapper tries again
    } catch (const Error&) {
      // Of a shared budget. An operation that needs the pages raises it.
    }
    ahead_.reserve(pool_.wanting().size());
    for (auto at = pool_.wanting().begin(); at != pool_.wanting().end();) {
      const std::shared_ptr<Client> client = *at++;
      if (client->busy() || (pages == 0 && (!ahead_.empty() || is_leaving()))) {
        waits_ |= client->busy() || ahead_.empty();
        if (client->hooks.first) break;  // the pages are for it
        continue;
      }
      Ahead job{client, {}};
      if (!client->claim_ahead(job.arrival, pages)) {
        pool_.want_no_more(*client);
        continue;
      }
      pages -= job.arrival.taken.size();
      ahead_.push_back(std::move(job));
      if (pool_.traits().asynchronous) break;
    }
    return !ahead_.empty();
  }

  bool claim_back() VT_LOCKED {
    const std::size_t most = 8 * most_;  // memory is not touched for it
    std::size_t pages = 0;
    back_.reserve(pool_.unsettled().size());
    for (auto at = pool_.unsettled().begin(); at != pool_.unsettled().end() && pages < most;) {
      const std::shared_ptr<Client> client = *at++;
      Back job{client, {}};
      switch (client->claim_back(job.departure, most - pages)) {
        case Client::Claim::done:
          pool_.unsettled().remove(client->hooks.unsettled);
          break;
        case Client::Claim::claimed:
          pages += job.departure.pages;
          back_.push_back(std::move(job));
          break;
        case Client::Claim::waits:
          waits_ = true;
          break;
        case Client::Claim::refused:
          refused_ = true;
          break;
      }
    }
    return !back_.empty();
  }

  bool claim_cleaning() VT_LOCKED {
    for (auto at = pool_.cached().unclean.begin(); at != pool_.cached().unclean.end();) {
      const std::shared_ptr<Client> client = *at++;
      Cleaning job{client, {}, nullptr, nullptr};
      if (client->claim_cleaning(job.runs, most_)) {
        cleaning_ = std::move(job);
        return true;
      }
      if (client->to_clean()) {
        waits_ = true;
      } else {
        pool_.cached().unclean.remove(client->hooks.unclean);
      }
    }
    return false;
  }

  void carry_out() noexcept {
    const Stream side = pool_.driver().side_stream();
    for (Ahead& job : ahead_) {
      const Reservation::Arriving one{&job.client->range(), &job.arrival};
      Reservation::carry_out({&one, 1}, side, true);
    }
    const auto until = std::chrono::steady_clock::now() + kStepTime;
    for (Back& job : back_) {
      job.client->range().carry_out(job.departure, until);
      if (std::chrono::steady_clock::now() >= until) break;  // the rest is claimed again
    }
    if (!cleaning_) return;
    try {
      cleaning_->zeroed = cleaning_->client->clean(cleaning_->runs);
    } catch (...) {
      cleaning_->error = std::current_exception();
    }
  }

  void enter() VT_LOCKED {
    for (Ahead& job : ahead_) {
      if (!job.client->enter_ahead(job.arrival)) {
        pool_.want_no_more(*job.client);
      } else if (!job.client->hooks.first && job.client->hooks.wanting.linked()) {
        pool_.wanting().remove(job.client->hooks.wanting);  // the others first
        pool_.wanting().add(job.client->hooks.wanting, job.client);
      }
    }
    for (Back& job : back_) {
      job.client->enter_back(job.departure);
      if (!job.departure.error)
        job.client->give_back_unused();  // the owner may have left meanwhile
    }
    if (cleaning_)
      cleaning_->client->enter_cleaning(cleaning_->runs, std::move(cleaning_->zeroed),
                                        cleaning_->error);
  }

 private:
  struct Ahead {
    std::shared_ptr<Client> client;
    Reservation::Arrival arrival;
  };
  struct Back {
    std::shared_ptr<Client> client;
    Reservation::Departure departure;
  };
  struct Cleaning {
    std::shared_ptr<Client> client;
    std::vector<Reservation::Run> runs;
    FencePtr zeroed;
    std::exception_ptr error;
  };

  // Whether pages are on their way out, which a client that wants pages may wait for.
  bool is_leaving() const VT_LOCKED {
    return std::any_of(pool_.unsettled().begin(), pool_.unsettled().end(),
                       [](const auto& client) VT_LOCKED { return client->pages_leaving() != 0; });
  }

  // Has handles made at once, if the driver takes long for them.
  void make_ready(PoolLock& lock, std::size_t pages) VT_LOCKED {
    std::size_t wanted = 0;
    for (const std::shared_ptr<Client>& client : pool_.wanting()) {
      if (wanted >= pages) break;
      wanted += client->missing_ahead();
    }
    try {
      pool_.store().make_ready(lock, std::min(wanted, pages));
    } catch (...) {
      // Taking the pages is refused again, for the client that wants them.
    }
  }

  PagePool& pool_;
  const std::size_t most_;
  bool waits_ = false;
  bool refused_ = false;
  std::vector<Ahead> ahead_;
  std::vector<Back> back_;
  std::optional<Cleaning> cleaning_;
};

Mapper::Time Mapper::serve(const std::shared_ptr<PagePool>& pool, const Signal& signal,
                           std::chrono::nanoseconds& pause) {
  PoolLock lock(pool);
  Time next = Time::max();
  for (bool back_first = false; !signal.stopping_.load(std::memory_order_acquire);
       back_first = !back_first) {
    while (pool->quiescing() && !signal.stopping_.load(std::memory_order_acquire))
      pool->wait_changed(lock, std::chrono::steady_clock::now() + kLongestPause);
    pool->reap();
    const MakeRoom::Given given = MakeRoom(*pool).give_to_others(lock);
    if (given == MakeRoom::Given::some) {
      const Waiting others_first(lock);
      continue;
    }
    Step step(*pool);
    const bool claimed =
        !pool->store().broken() && ((back_first && step.claim_back()) || step.claim_ahead(lock) ||
                                    (!back_first && step.claim_back()) || step.claim_cleaning());
    if (!claimed) {
      next = pool->maintain(lock);
      if (next <= std::chrono::steady_clock::now()) {
        const Waiting others_first(lock);
        continue;
      }
      if (step.refused() && !pool->retired())
        next = std::min(next, std::chrono::steady_clock::now() + kRetryPause);
      if (!step.waits() && given != MakeRoom::Given::waits) {
        pause = kShortestPause;
      } else {
        next = std::min(next, std::chrono::steady_clock::now() + pause);
        pause = std::min(2 * pause, kLongestPause);
      }
      break;
    }
    pause = kShortestPause;
    {
      const Unlocked unlocked(lock);
      step.carry_out();
    }
    step.enter();
  }
  pool->changed();
  return next;
}

}  // namespace vtensor
