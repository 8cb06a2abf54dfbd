// What holds of a pool while threads hammer it, and after they have ended.
#pragma once

#include <doctest/doctest.h>

#include "base/errors.h"
#include "policy/page_pool.h"
#include "support.h"

namespace vtensor::hammered {

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

}  // namespace vtensor::hammered
