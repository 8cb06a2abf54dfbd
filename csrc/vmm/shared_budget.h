// One limit for the pools of several processes: a place for one pool in the file that they share
// (budget_file.h). It knows nothing of pages and pools. Bytes are charged before they are made, and
// given back once they are gone.
//
// Only a charge needs the file's lock: it adds up what all places hold, which must not grow
// meanwhile. What lowers a sum is a store, and never waits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/calls.h"
#include "driver/driver.h"
#include "vmm/budget_file.h"

namespace vtensor {

// What a pool says of itself, in bytes.
struct HeldBytes {
  std::uint64_t held = 0;    // pages that are made: all that counts against the limit
  std::uint64_t cached = 0;  // of these, mapped pages that the pool could do without
  std::uint64_t spare = 0;   // of these, free pages
};

class SharedBudget {
 public:
  static constexpr std::size_t kMostPools = BudgetFile::kMostPools;

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

  // Takes a place in the budget of that name, of this user; makes the budget if no living pool has
  // a place in it. `meter` counts the system's calls until the last charge, and refuses some in
  // tests. Throws InvalidArgument for a name that cannot be one or another limit, Error if all
  // places are taken or the file is not ours to read, DriverError, TimedOut.
  static std::unique_ptr<SharedBudget> join(CallMeter& meter, const std::string& name,
                                            std::uint64_t limit, Device device);
  // The budgets of this user that have a living pool, by name. Pools are asked for their figures
  // first, and have `patience` to answer.
  static Surveys survey(std::chrono::nanoseconds patience);

  // Gives the place up, and the file with the last one.
  ~SharedBudget();
  SharedBudget(const SharedBudget&) = delete;
  SharedBudget& operator=(const SharedBudget&) = delete;

  const std::string& name() const { return file_->name(); }
  std::uint64_t limit() const { return limit_; }
  // What this place holds, and what all others do.
  std::uint64_t held() const { return held_; }
  std::uint64_t held_elsewhere() const;
  // What others hold and could do without, as they last said.
  std::uint64_t spared_elsewhere() const;
  // What the limit leaves; may be less by the next call.
  std::uint64_t room();
  // Frees places whose process has died: ten times a second at most, however often it is called.
  void free_dead_places();

  // Not two at a time, as all that follows.

  // Holds `bytes` more, or false if the limit has less left. Throws DriverError, TimedOut, and
  // Error if the file was removed or cut: nothing is changed then.
  bool charge(std::uint64_t bytes);
  // The same without asking, for memory that the kernel has made already.
  void charge_anyway(std::uint64_t bytes) noexcept { own().held = held_ += bytes; }
  // Holds `bytes` less.
  void give_back(std::uint64_t bytes) noexcept { own().held = held_ -= bytes; }
  void report(std::uint64_t cached, std::uint64_t spare) noexcept {
    BudgetFile::Place& place = own();
    place.cached = cached;
    place.spare = spare;
  }

  // -- requests of one pool that the others give memory up; each has a number

  // Says that `bytes` more, or fewer, are wanted here.
  void want(std::int64_t bytes) noexcept {
    own().wanted = wanted_ += static_cast<std::uint64_t>(bytes);
  }
  bool wants() const noexcept { return wanted_ != 0; }
  // What others want in all, and beyond the room that is left.
  std::uint64_t wanted_elsewhere() const;
  std::uint64_t missing_elsewhere() const;
  // Wakes the other pools. Returns the request's number.
  std::uint32_t request() noexcept { return file_->request(); }
  // Whether all others have answered it, or died.
  bool answered(std::uint32_t request) const { return file_->answered(request, place_); }
  // The last request; whether this pool has yet to answer it; that it has given up what it can.
  std::uint32_t last_request() const noexcept { return file_->content().last_request; }
  bool owes_answer() const noexcept {
    const BudgetFile::Content& content = file_->content();
    return content.places[place_].answered != content.last_request;
  }
  void answer(std::uint32_t request) noexcept { own().answered = request; }
  // From another thread: sleeps until the last request is no longer `request`.
  void await_request(std::uint32_t request) const noexcept { file_->await_request(request); }

 private:
  SharedBudget(std::unique_ptr<BudgetFile> file, std::size_t place, std::uint64_t limit)
      : file_(std::move(file)), place_(place), limit_(limit) {}
  static std::size_t take_place(BudgetFile& file, std::uint64_t limit, Device device);
  BudgetFile::Place& own() const { return file_->content().places[place_]; }
  template <typename Sum>
  std::uint64_t sum_elsewhere(const BudgetFile::Content& content, Sum sum) const;
  std::uint64_t held_elsewhere(const BudgetFile::Content& content) const;
  std::uint64_t left() const;
  bool free_dead();

  const std::unique_ptr<BudgetFile> file_;
  const std::size_t place_;
  const std::uint64_t limit_;
  // As in the place, which only this object writes.
  std::uint64_t held_ = 0, wanted_ = 0;
  std::chrono::steady_clock::time_point free_dead_at_{};
};

}  // namespace vtensor
