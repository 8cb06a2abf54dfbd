#include "policy/budget_listener.h"

#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/thread.h"

namespace vtensor {

void BudgetListener::start(SharedBudget& budget, Mapper::Waker mapper) {
  budget_ = &budget;
  try {
    thread_ =
        start_thread("vtensor-budget", ThreadRole::mapper, [this, mapper = std::move(mapper)] {
          std::uint32_t seen = budget_->last_request();
          mapper.wake();  // for earlier requests
          while (!stopping_.load(std::memory_order_acquire)) {
            budget_->await_request(seen);
            const std::uint32_t last = budget_->last_request();
            if (std::exchange(seen, last) != last) mapper.wake();
          }
        });
  } catch (const std::system_error& error) {
    throw DriverError("pthread_create", error.code().value(), "EAGAIN",
                      "[Pool] the system has no thread for a pool of a shared budget (EAGAIN): "
                      "raise the process's limits (ulimit -u, ulimit -v)");
  }
}

void BudgetListener::stop() noexcept {
  if (!thread_) return;
  stopping_.store(true, std::memory_order_release);
  budget_->request();  // wakes all listeners: the others find that nothing is wanted
  thread_->join();
  thread_.reset();
}

}  // namespace vtensor
