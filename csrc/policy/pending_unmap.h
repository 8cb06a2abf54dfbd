// Pages that nothing needs any more, until they are unmapped: after the work that may still use
// them, and again if the driver refuses.
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

  // Page indices with pages that nothing may need: looked at later.
  Interval touched() const { return touched_; }
  void touch(Interval indices);
  void look_at_nothing() { touched_ = {}; }

  // These leave once `after` has passed. Requires: none leave.
  void begin(std::vector<Interval> indices, std::vector<FencePtr> after);
  const std::vector<Interval>& indices() const { return indices_; }
  // Whether `after` has passed. Throws what the driver does.
  bool may_go(Driver& driver) { return all_passed(driver, after_); }
  // The first of them: `most` page indices in all, but at least one.
  std::vector<Interval> first(std::size_t most) const;
  // These are unmapped, or in use again.
  void remove(Interval indices);
  void clear() { indices_.clear(); }

  // What the driver refused the last time, of a fence or an unmapping; null if it did not.
  const std::exception_ptr& refusal() const { return refusal_; }
  void refused(std::exception_ptr error);
  void try_again() { refusal_ = nullptr; }
  // When the mapper tries again; a caller that waits for the pages does at once.
  Time retry_at() const { return retry_at_; }

 private:
  Interval touched_;
  std::vector<Interval> indices_;
  std::vector<FencePtr> after_;
  std::exception_ptr refusal_;
  Time retry_at_;
};

}  // namespace vtensor
