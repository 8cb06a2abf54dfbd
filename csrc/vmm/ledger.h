// One memory limit for the pools of several processes: a file in shared memory in which each pool
// has a place that only the pool writes. The ledger counts bytes, not pages. Bytes are charged
// before memory is made, and given back once the memory is gone: the living places never hold more
// than the limit in all, whenever a process dies (csrc/DESIGN.md).
//
// A file with a name cannot be sealed (F_SEAL_SHRINK is for memfds). So each use checks the length
// of the file first, and a pool whose file was cut continues with zeros of its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/calls.h"
#include "base/errors.h"
#include "base/wake_word.h"
#include "driver/driver.h"

namespace vtensor {

class Ledger {
 public:
  static constexpr std::size_t kMostPools = 128;

  // Takes a place in this user's ledger `name`; makes the ledger if no living pool has a place in
  // it. `meter` counts system calls, and fails some in tests. Throws InvalidArgument for an
  // impossible name or a different limit, Error if all places are taken or the file is another
  // user's, DriverError, TimedOut.
  static std::unique_ptr<Ledger> join(CallMeter& meter, const std::string& name,
                                      std::uint64_t limit, Device device);
  // Gives up the place; removes the file if it was the last one.
  ~Ledger();
  Ledger& operator=(Ledger&&) = delete;
  // Called as the process ends: removes the file if no other pool has a place in it.
  void leave_at_exit() noexcept;

  const std::string& name() const { return name_; }
  std::uint64_t limit() const { return limit_; }
  std::uint64_t held() const { return held_; }

  struct Balance {
    std::uint64_t held_elsewhere = 0;    // in all other living places
    std::uint64_t spared_elsewhere = 0;  // of `held_elsewhere`: to spare, by the last answers
    std::uint64_t wanted_elsewhere = 0;  // bytes that the other places ask for
    std::uint64_t room = 0;              // bytes that the limit leaves
  };
  Balance balance() const;

  // A pool of this or another process, by its last answer.
  struct Holder {
    std::int64_t process;
    Device device;
    std::string command;
    std::uint64_t held;    // bytes of memory that count against the limit
    std::uint64_t cached;  // of `held`: mapped pages that the pool could do without
    std::uint64_t spare;   // of `held`: free pages
  };
  struct Survey {
    std::string name;
    std::uint64_t limit;
    std::vector<Holder> holders;
  };
  // The ledgers of this user that have a living pool, by name, and why other ledger files could not
  // be read. Asks the pools for their figures first, and waits `patience` for the answers.
  static std::pair<std::vector<Survey>, std::vector<std::string>> survey(
      std::chrono::nanoseconds patience);

  // Calls of the functions below must not overlap.

  // Raises this place's holding to `bytes`, which is more than now; false if the limit has less
  // left. Throws DriverError, TimedOut, and Error if the file was removed or cut, with nothing
  // changed.
  bool charge(std::uint64_t bytes);
  // Sets this place's holding unasked: to less than now, or for memory that exists already.
  void hold(std::uint64_t bytes) noexcept;

  // -- requests: one pool asks the others to give memory up; each request has a number

  // Adds `bytes`, which may be negative, to the bytes wanted here.
  void want(std::int64_t bytes) noexcept;
  bool wants() const noexcept { return wanted_ != 0; }
  // Wakes the other pools. Returns the request's number.
  std::uint32_t request() noexcept;
  // Whether all other pools have answered `request`, or died.
  bool answered(std::uint32_t request) const;
  // Whether this pool's last request ended before all answers came.
  bool missed_answers() const noexcept { return missed_answers_; }
  void note_answers(bool all) noexcept { missed_answers_ = !all; }
  // The last request, if this pool has not answered it yet.
  std::optional<std::uint32_t> unanswered() const noexcept;
  // Says that this pool has given up what it can, and its figures in bytes.
  void answer(std::uint32_t request, std::uint64_t cached, std::uint64_t spare) noexcept;

  // Finds the word on which the pool's worker sleeps, and which other pools wake for a request. The
  // function may outlive the ledger. The word may move when the file is cut: a thread that sleeps
  // on it then is not woken.
  std::function<WakeWord&()> wake_word() const;

 private:
  struct Place;
  struct Content;
  class File;
  class Locked;

  // Opens the file of ledger `name`. Throws as `join`.
  Ledger(CallMeter& meter, const std::string& name, int flags);
  std::string path() const;
  // Whether the file still has its name.
  bool is_linked() const;
  // The layout number of the file; 0 if the file is no ledger, or was cut.
  std::uint32_t layout() const;
  bool has_other_layout() const;
  bool is_alive(std::size_t place) const;
  bool any_alive() const;
  // Whether a place is alive whose process is not about to end. Requires: the file is locked.
  bool any_stays() const;
  // Removes the file if no pool stays in it. Requires: the file is locked.
  void remove_if_unused() const;
  Place& own() const;
  Balance balance(const Content& content) const;

  // Requires: the file is locked.
  void begin(std::uint64_t limit);
  void map();
  Content& require_whole() const;
  void take_place(std::uint64_t limit, Device device);
  Survey read() const;

  CallMeter& meter_;
  const std::string name_;
  const std::shared_ptr<File> file_;
  std::size_t place_ = kMostPools;  // kMostPools: none
  std::uint64_t limit_ = 0;
  // Copies of the values in the place, which only this object writes.
  std::uint64_t held_ = 0, wanted_ = 0;
  std::uint32_t answered_ = 0;
  bool missed_answers_ = false;
};

}  // namespace vtensor
