#include "vmm/pending_work.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace vtensor {

bool all_passed(Driver& driver, std::vector<FencePtr>& fences) {
  // Not erase_if: if the driver refuses to answer, it would lose fences.
  const auto passed = std::partition(fences.begin(), fences.end(), [&driver](const FencePtr& one) {
    return !driver.passed(*one);
  });
  fences.erase(passed, fences.end());
  return fences.empty();
}

void PendingWork::note(Stream stream) {
  if (!runs_behind(driver_, stream)) return;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(stream);
}

void PendingWork::forget_passed() {
  try {
    all_passed(driver_, after_);
  } catch (const Error&) {
    // A later call asks the driver again.
  }
}

void PendingWork::note(const Caller& caller) {
  if (caller.named && driver_.traits().asynchronous) {
    forget_passed();
    try {
      if (FencePtr fence = driver_.fence(caller.stream)) after_.push_back(std::move(fence));
      return;
    } catch (const Error&) {
      // The stream is captured, or the driver refuses: the fence is made when it is needed.
    }
  }
  note(caller.stream);
}

void PendingWork::begin_lease(const Caller& caller) {
  if (caller.named) {
    leased_.push_back(caller.stream);
  } else {
    note(caller.stream);
  }
}

void PendingWork::end_lease(const Caller& caller, FencePtr after) {
  if (!caller.named) return note(caller.stream);
  if (after) {
    forget_passed();
    after_.push_back(std::move(after));
  }
  const auto leased = std::find(leased_.begin(), leased_.end(), caller.stream);
  if (leased != leased_.end()) leased_.erase(leased);
}

void PendingWork::add(const PendingWork& other, const std::vector<FencePtr>& after) {
  for (const std::vector<Stream>* streams : {&other.streams_, &other.leased_}) {
    for (const Stream stream : *streams) note(stream);
  }
  for (const std::vector<FencePtr>* fences : {&other.after_, &after})
    after_.insert(after_.end(), fences->begin(), fences->end());
}

std::vector<FencePtr> PendingWork::fences() const {
  std::vector<FencePtr> fences = after_;
  for (const std::vector<Stream>* streams : {&streams_, &leased_}) {
    for (const Stream stream : *streams) {
      if (FencePtr fence = driver_.fence(stream)) fences.push_back(std::move(fence));
    }
  }
  return fences;
}

void PendingWork::clear() {
  streams_.clear();
  after_.clear();
}

}  // namespace vtensor
