// Falling asleep and waking, as Python drives them: in between it keeps what the pages hold.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "policy/sleep.h"

namespace vtensor::bind {

// What is to fall asleep. Each core of a tensor, a cache, an arena or a heap adds itself, during an
// operation of its own: then none is under way, and the next is refused.
class SleepCore {
 public:
  explicit SleepCore(const std::shared_ptr<PagePool>& pool);
  ~SleepCore();
  SleepCore(const SleepCore&) = delete;
  SleepCore& operator=(const SleepCore&) = delete;

  // Of what is added from now on, which wakes together.
  std::uint64_t next_number();
  std::uint64_t number() const { return number_; }
  // False if it is asleep already. `awake` is called if the sleep is given up.
  bool add(const std::shared_ptr<Client>& client);
  void if_given_up(std::function<void()> awake) { undo_.push_back(std::move(awake)); }

  void begin();
  const std::vector<SleepPart>& parts() const { return asleep_->parts(); }
  std::size_t finish();
  bool finished() const { return finished_; }
  // Everything is awake, as it was.
  void give_up() noexcept;

 private:
  const std::shared_ptr<PagePool> pool_;
  std::uint64_t number_ = 0;
  HeldClients::Clients clients_;
  std::vector<std::function<void()>> undo_;
  std::optional<FallAsleep> asleep_;
  bool finished_ = false;
};

}  // namespace vtensor::bind
