// One limit for the pools of several processes: a file in shared memory with a place for each pool,
// which says what it holds. It knows nothing of pages and pools; bytes are charged before they are
// made, and given back once they are gone.
//
// Whoever dies leaves nothing behind, whenever that is:
//
//   - A place's owner alone writes what it holds, in one store. The sum is stored nowhere.
//   - The file's lock and the sign of life of each place are locks of open file descriptions
//     (F_OFD_SETLK), which the kernel lets go with the process. They hang on no process id.
//   - What a process has half done under the file's lock is done anew by the next: a place counts
//     once its last store says so, and a file without a living place is begun afresh.
//
// The lock is needed to charge alone: a sum that must not grow meanwhile is looked at. What lowers
// a sum is a store, and never waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/calls.h"
#include "driver/driver.h"

namespace vtensor {

// What a pool says of itself, in bytes.
struct HeldBytes {
  std::uint64_t held = 0;    // pages that are made: all that counts against the limit
  std::uint64_t cached = 0;  // of these, mapped pages that the pool could do without
  std::uint64_t spare = 0;   // of these, free pages
};

class SharedBudget {
 public:
  static constexpr std::size_t kMostPools = 128;

  // A pool of this or another process.
  struct Holder {
    std::int64_t process = 0;
    Device device{};
    std::string command;
    HeldBytes bytes;
  };
  // A budget and its living pools, at one moment.
  struct Survey {
    std::string name;
    std::uint64_t limit = 0;
    std::vector<Holder> holders;
  };
  struct Surveys {
    std::vector<Survey> budgets;
    std::vector<std::string> skipped;  // why a file of such a name could not be read
  };

  // Takes a place in the budget of that name, of this user; makes it where nobody living has a
  // place. `meter` counts the system's calls until the last charge, and refuses some in tests.
  // Throws InvalidArgument for a name that cannot be one or another limit, Error where all places
  // are taken or the file is not ours to read, DriverError, TimedOut.
  static std::unique_ptr<SharedBudget> join(CallMeter& meter, const std::string& name,
                                            std::uint64_t limit, Device device);
  // The budgets of this user that have a living pool, by name. Pools are asked for their figures
  // first, and have `patience` to answer.
  static Surveys survey(std::chrono::nanoseconds patience);

  // Gives the place up, and the file with the last one.
  ~SharedBudget();
  SharedBudget(const SharedBudget&) = delete;
  SharedBudget& operator=(const SharedBudget&) = delete;

  const std::string& name() const { return name_; }
  std::uint64_t limit() const;
  // What this place holds, and what all others do.
  std::uint64_t held() const;
  std::uint64_t held_elsewhere() const;
  // What others hold and could do without, as they last said.
  std::uint64_t spared_elsewhere() const;
  // What the limit leaves; may be less by the next call.
  std::uint64_t room();
  // Frees places whose process has died: ten times a second at most, however often it is called.
  void free_dead_places();

  // Not two at a time, as all that follows.

  // Holds `bytes` more, or false if the limit has less left. Throws DriverError, TimedOut, and
  // Error if the file was removed: nothing is changed then.
  bool charge(std::uint64_t bytes);
  // The same without asking, for memory that the kernel has made already.
  void charge_anyway(std::uint64_t bytes) noexcept;
  // Holds `bytes` less.
  void give_back(std::uint64_t bytes) noexcept;
  void report(std::uint64_t cached, std::uint64_t spare) noexcept;

  // -- requests of one pool that the others give memory up; each has a number

  // Says that `bytes` more, or fewer, are wanted here.
  void want(std::int64_t bytes) noexcept;
  bool wants() const noexcept;
  // What others want beyond the room that is left.
  std::uint64_t missing_elsewhere() const;
  // What others want in all.
  std::uint64_t wanted_elsewhere() const;
  // Wakes the other pools. Returns the request's number.
  std::uint32_t request() noexcept;
  // Whether all others have answered it, or died.
  bool answered(std::uint32_t request) const;
  // The last request; whether this pool has yet to answer it; that it has given up what it can.
  std::uint32_t last_request() const noexcept;
  bool owes_answer() const noexcept;
  void answer(std::uint32_t request) noexcept;

  // From another thread: sleeps until the last request is no longer `request`.
  void await_request(std::uint32_t request) const noexcept;

 private:
  struct File;
  struct Place;
  class Opened;
  class Locked;

  SharedBudget(std::string name, std::unique_ptr<Opened> opened, std::size_t place);
  static std::size_t take_place(Opened& opened, std::uint64_t limit, Device device);
  template <typename Sum>
  std::uint64_t sum_elsewhere(Sum sum) const;
  Place& own() const;
  bool count_out_the_dead();

  const std::string name_;
  const std::unique_ptr<Opened> opened_;
  const std::size_t place_;
  std::chrono::steady_clock::time_point look_for_dead_at_{};
};

}  // namespace vtensor
