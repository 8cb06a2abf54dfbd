// The steps of Pool.sleep and Pool.wake. In between, the contents of the pages are copied.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>

#include "policy/sleep.h"
#include "policy/sleep_copy.h"

namespace vtensor::bind {

// The clients that are to fall asleep. The core of each tensor, cache, arena or heap adds its own
// clients during an operation of its own: then none is under way, and the next is refused.
class SleepCore {
 public:
  explicit SleepCore(const std::shared_ptr<PagePool>& pool);
  ~SleepCore();
  SleepCore(const SleepCore&) = delete;
  SleepCore& operator=(const SleepCore&) = delete;

  // A number for the clients that are added from now on, which wake together.
  std::uint64_t next_number();
  // Without effect on a client that is asleep already.
  void add(const std::shared_ptr<Client>& client);
  // Those that clients were added with.
  std::set<std::uint64_t> numbers() const;

  void begin();
  // The bytes that are to be kept, and their copies to an image.
  std::size_t bytes() const;
  std::unique_ptr<SleepCopy> copy(const std::shared_ptr<SleepImage>& image) const;
  std::size_t finish();
  bool finished() const { return finished_; }
  // Unless it is finished, wakes the clients, which are as they were.
  void give_up() noexcept;

 private:
  const std::shared_ptr<PagePool> pool_;
  std::uint64_t number_ = 0;
  HeldClients::Clients clients_;
  std::optional<FallAsleep> asleep_;
  bool finished_ = false;
};

}  // namespace vtensor::bind
