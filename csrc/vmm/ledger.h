// One limit for the pools of several processes: a file in shared memory in which each pool has a
// place, which it alone writes. It knows nothing of pages and pools. Bytes are charged before they
// are made, and given back once they are gone, so that what all living places hold is never more
// than the limit, whichever process dies at whatever moment (csrc/DESIGN.md).
//
// A file with a name cannot be sealed (F_SEAL_SHRINK is a memfd's). So its length is looked at
// before each use, and a pool whose file was cut goes on over zeros of its own.
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

  // Takes a place in the ledger of that name, of this user; makes the ledger if no living pool has
  // a place in it. `meter` counts the system's calls, and refuses some in tests. Throws
  // InvalidArgument for a name that cannot be one or another limit, Error if all places are taken
  // or the file is not this user's, DriverError, TimedOut.
  static std::unique_ptr<Ledger> join(CallMeter& meter, const std::string& name,
                                      std::uint64_t limit, Device device);
  // Gives the place up, and the file with the last one.
  ~Ledger();
  Ledger& operator=(Ledger&&) = delete;
  // The process ends, and with it the place: removes the file if no pool stays that has one.
  void leave_at_exit() noexcept;

  const std::string& name() const { return name_; }
  std::uint64_t limit() const { return limit_; }
  std::uint64_t held() const { return held_; }

  struct Balance {
    std::uint64_t held_elsewhere = 0;    // in all other living places
    std::uint64_t spared_elsewhere = 0;  // of it, what they could do without, as they last said
    std::uint64_t wanted_elsewhere = 0;  // what they ask for
    std::uint64_t room = 0;              // what the limit leaves
  };
  Balance balance() const;

  // A pool of this or another process, as it last answered.
  struct Holder {
    std::int64_t process;
    Device device;
    std::string command;
    std::uint64_t held;    // bytes of pages that are made: all that counts against the limit
    std::uint64_t cached;  // of `held`: mapped pages that the pool could do without
    std::uint64_t spare;   // of `held`: free pages
  };
  struct Survey {
    std::string name;
    std::uint64_t limit;
    std::vector<Holder> holders;
  };
  // The ledgers of this user that have a living pool, by name, and why other files of such a name
  // could not be read. Pools are asked for their figures first, and have `patience` to answer.
  static std::pair<std::vector<Survey>, std::vector<std::string>> survey(
      std::chrono::nanoseconds patience);

  // Calls of these, and of all functions below, must not overlap.

  // Charges up to `bytes` in all, which is more than is held; or false if the limit has less left.
  // Throws DriverError, TimedOut, and Error if the file was removed or cut: nothing is changed
  // then.
  bool charge(std::uint64_t bytes);
  // Holds `bytes` without asking: less than now, or memory that the kernel has made already.
  void hold(std::uint64_t bytes) noexcept;

  // -- requests of one pool that the others give memory up; each has a number

  // Says that `bytes` more, or fewer, are wanted here.
  void want(std::int64_t bytes) noexcept;
  bool wants() const noexcept { return wanted_ != 0; }
  // Wakes the other pools. Returns the request's number.
  std::uint32_t request() noexcept;
  // Whether all others have answered it, or died.
  bool answered(std::uint32_t request) const;
  // Whether the wait for this pool's last request ended without all answers.
  bool missed_answers() const noexcept { return missed_answers_; }
  void note_answers(bool all) noexcept { missed_answers_ = !all; }
  // The last request, if this pool has yet to answer it.
  std::optional<std::uint32_t> unanswered() const noexcept;
  // That this pool has given up what it can; with its figures.
  void answer(std::uint32_t request, std::uint64_t cached, std::uint64_t spare) noexcept;

  // Finds the word on which the pool's worker sleeps: others wake it for a request. May outlive the
  // ledger. The word may move when the file is cut, and then a thread that sleeps on it cannot be
  // woken.
  std::function<WakeWord&()> wake_word() const;

 private:
  struct Place;
  struct Content;
  class File;
  class Locked;

  // Opens the file of that name. Throws as `join`.
  Ledger(CallMeter& meter, const std::string& name, int flags);
  std::string path() const;
  // Whether the file still has its name.
  bool is_linked() const;
  // 0 if the file is not ours, or was cut.
  std::uint32_t layout() const;
  bool has_other_layout() const;
  bool is_alive(std::size_t place) const;
  bool any_alive() const;
  // Whether any of them is of a process that does not end just now. Requires: the file is locked.
  bool any_stays() const;
  // Removes the file if no pool stays that has a place. Requires: it is locked.
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
  std::size_t place_ = kMostPools;  // that many: none
  std::uint64_t limit_ = 0;
  // As in the place, which only this object writes.
  std::uint64_t held_ = 0, wanted_ = 0;
  std::uint32_t answered_ = 0;
  bool missed_answers_ = false;
};

}  // namespace vtensor
