// What holds of a pool while threads hammer it, and after they have ended.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "base/errors.h"
#include "policy/page_pool.h"

namespace vtensor::hammered {

inline constexpr std::chrono::seconds kPatience(20);

// At any moment.
inline PoolCounts check_counts(PagePool& pool) {
  const PoolCounts counts = pool.counts();
  CHECK(counts.mapped == counts.active + counts.prefetched + counts.cached + counts.pinned);  // I4
  CHECK_NOTHROW(pool.check_invariants());
  return counts;
}

// What was met while calls were refused is raised, an error at a time.
inline void come_to_rest(PagePool& pool) {
  for (int tries = 0; tries < 100; ++tries) {
    try {
      pool.wait_idle(kPatience);
      return;
    } catch (const DriverError&) {
    }
  }
}

// Once all that used it has left: nothing is.
inline PoolCounts check_end(PagePool& pool) {
  pool.retire();
  pool.wait_idle(kPatience);
  pool.check_invariants();
  const PoolCounts left = pool.counts();
  CHECK(left.mapped == 0);  // I14
  CHECK(left.used == 0);
  return left;
}

// The mapper may be the last to let the pool go, and the next one begins the simulation anew.
template <class T>
void check_let_go(const std::weak_ptr<PagePool>& last) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while ((!last.expired() || T::leaks() != "") && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(last.expired());
  CHECK(T::leaks() == "");
}

}  // namespace vtensor::hammered
