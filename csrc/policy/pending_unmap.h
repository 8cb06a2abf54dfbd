// Pages of one client that wait to be unmapped: until the work that may use them has passed, and
// again after a refusal of the driver.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "base/interval.h"
#include "driver/driver.h"
#include "vmm/pending_work.h"

namespace vtensor {

class PendingUnmap {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Page indices that may hold pages that nothing needs; the client looks at them later.
  Interval touched() const { return touched_; }
  void touch(Interval indices);
  void look_at_nothing() { touched_ = {}; }

  // `indices` are to be unmapped once `after` has passed. Requires: no page waits.
  void begin(std::vector<Interval> indices, std::vector<FencePtr> after);
  const std::vector<Interval>& indices() const { return indices_; }
  // Whether `after` has passed. Throws what the driver does.
  bool may_go(Driver& driver) { return all_passed(driver, after_); }
  // The first `most` of the waiting page indices, at least one.
  std::vector<Interval> first(std::size_t most) const;
  // `indices` wait no longer: they are unmapped, or in use again.
  void remove(Interval indices);
  void clear() { indices_.clear(); }

  // The last refusal of a fence or an unmapping; null after a success.
  const std::exception_ptr& refusal() const { return refusal_; }
  void refused(std::exception_ptr error);
  void try_again() { refusal_ = nullptr; }
  // When the mapper tries again. A caller that waits for the pages tries at once.
  Time retry_at() const { return retry_at_; }

 private:
  Interval touched_;
  std::vector<Interval> indices_;
  std::vector<FencePtr> after_;
  std::exception_ptr refusal_;
  Time retry_at_;
};

}  // namespace vtensor
