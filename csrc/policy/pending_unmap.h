// Pages that nothing needs any more, until they are unmapped: behind the work that may still use
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

  // Pages in which something may be mapped that nothing needs: looked at when it is next asked.
  // `aged`: it has been free for as long as the pool keeps memory.
  Interval touched() const { return touched_; }
  void touch(Interval indices, bool aged = false);
  void look_at_nothing() { touched_ = {}; }

  // What is on its way out, once `after` has passed. Requires: nothing was.
  void begin(std::vector<Interval> indices, std::vector<FencePtr> after);
  const std::vector<Interval>& indices() const { return indices_; }
  // Whether all of that is aged.
  bool aged() const { return aged_; }
  // Whether all work has passed that may use them. Throws what the driver does.
  bool may_go(Driver& driver) { return all_passed(driver, after_); }
  // The first of them, of `most` pages in all, or one.
  std::vector<Interval> first(std::size_t most) const;
  // These are unmapped by now, or come into use again.
  void remove(Interval indices);
  void clear() { indices_.clear(); }

  // What the driver refused, of a fence or an unmap; null unless it did when it was last asked.
  const std::exception_ptr& refusal() const { return refusal_; }
  void refused(std::exception_ptr error);
  void try_again() { refusal_ = nullptr; }
  // When that is worth another call to whatever does not wait for it.
  Time retry_at() const { return retry_at_; }

 private:
  Interval touched_;
  bool touched_aged_ = false, aged_ = false;
  std::vector<Interval> indices_;
  std::vector<FencePtr> after_;
  std::exception_ptr refusal_;
  Time retry_at_;
};

}  // namespace vtensor
