#include "policy/reclaim.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "base/align.h"
#include "policy/client.h"
#include "policy/make_room.h"
#include "policy/page_pool.h"

namespace vtensor {

namespace {

// Pages given up in one step: the least that is worth a request.
constexpr std::size_t kPagesAtOnce = 32;

}  // namespace

Reclaim::Result Reclaim::step(PoolLock& lock) {
  SharedBudget* const shared = pool_.store().shared();
  if (shared == nullptr) return Result::done;
  const std::uint32_t request = shared->last_request();
  Result result = Result::done;
  try {
    result = give_up(lock);
  } catch (const std::exception&) {
    // Refused: this pool gives up no more, which is an answer too.
  }
  if (result == Result::done && shared->owes_answer()) answer(lock, request);
  return result;
}

Reclaim::Result Reclaim::give_up(PoolLock& lock) {
  PageStore& store = pool_.store();
  const std::size_t missing = store.shared()->missing_elsewhere();
  if (missing == 0) return Result::done;
  if (store.releasable() == 0) {
    MakeRoom room(pool_);
    pool_.settle_all(lock);
    const std::size_t leaving = room.pages_leaving() * pool_.page_size();
    if (store.releasable() == 0 && leaving >= missing) return Result::waits;
    if (store.releasable() == 0 && !room.give_up_spare(lock)) {
      const Result result = shrink(lock, ceil_div(missing - leaving, pool_.page_size()));
      return result == Result::done && leaving != 0 ? Result::waits : result;
    }
  }
  store.release(lock, kPagesAtOnce);
  return Result::progress;
}

Reclaim::Result Reclaim::shrink(PoolLock& lock, std::size_t pages) {
  // An operation that asks for memory itself may last as long as this pool owes the answer.
  const SharedBudget* const shared = pool_.store().shared();
  const bool asks = shared != nullptr && shared->wants();
  const std::vector<std::shared_ptr<Shrinker>> all = pool_.shrinkers();
  if (all.empty()) return Result::done;
  const Unlocked shrinkers_take_the_lock(lock);  // fork(2) waits for them
  bool waits = false;
  std::size_t given = 0;
  for (const std::shared_ptr<Shrinker>& shrinker : all) {
    const std::optional<std::size_t> some = shrinker->shrink(std::max(pages, kPagesAtOnce));
    given += some.value_or(0);
    waits |= !some && !asks;
    if (given >= pages) break;
  }
  if (given != 0) return Result::progress;
  return waits ? Result::waits : Result::done;
}

bool Reclaim::shrink() {
  PoolLock lock(pool_.shared_from_this());
  return shrink(lock, kPagesAtOnce) == Result::progress;
}

void Reclaim::answer(PoolLock& lock, std::uint32_t request) {
  std::size_t shrinkable = 0;
  if (const std::vector<std::shared_ptr<Shrinker>> all = pool_.shrinkers(); !all.empty()) {
    const Unlocked shrinkers_take_the_lock(lock);
    for (const std::shared_ptr<Shrinker>& shrinker : all) shrinkable += shrinker->shrinkable();
  }
  PoolCounts counts;
  for (Client* client : pool_.clients()) client->count(counts);
  SharedBudget& shared = *pool_.store().shared();
  shared.report((counts.cached + counts.prefetched + shrinkable) * pool_.page_size(),
                pool_.store().spare().size() * pool_.page_size());
  shared.answer(request);
}

}  // namespace vtensor
