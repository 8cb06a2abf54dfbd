// The file in shared memory with the budget of the pools of several processes: what it holds, its
// locks and its mapping. A process that dies leaves nothing behind in it, at any moment:
//
//   - Only a place's owner writes what it holds, in one store. The sum is stored nowhere.
//   - The file's lock and each place's sign of life are locks of open file descriptions
//     (F_OFD_SETLK), which the kernel lets go with the process. They need no process id.
//   - What a process left half done under the file's lock the next does anew: a place counts once
//     its last store says so, and a file without a living place is begun afresh.
//
// A file with a name cannot be sealed (F_SEAL_SHRINK is a memfd's), so anything that may write to
// it may make it shorter, and a page that it then lacks is SIGBUS. So its length is looked at
// before each use. A pool whose file was cut goes on over zeros of its own, and charges no more.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/calls.h"
#include "base/errors.h"

namespace vtensor {

// Opened once: its locks and its mapping are this object's own, and no child's.
class BudgetFile {
 public:
  static constexpr std::size_t kMostPools = 128;
  static constexpr std::size_t kLongestName = 64;
  static constexpr std::uint32_t kLayout = 2;

  using Counter = std::atomic<std::uint64_t>;
  struct alignas(64) Place {
    std::atomic<std::uint32_t> taken;  // stored last
    std::atomic<std::uint32_t> answered;
    Counter held, cached, spare, wanted;
    std::int64_t process;
    std::int32_t device_type, device_index;
    std::array<char, 128> command;  // ends with a zero
  };
  struct Content {
    std::uint64_t magic;
    std::uint32_t layout;
    std::atomic<std::uint32_t> last_request;
    std::uint64_t limit;
    std::array<Place, kMostPools> places;
    std::uint64_t last_word;  // kMagic, unless the file was cut, and maybe made longer since
  };

  static bool is_name(std::string_view name);
  // The names of this user's files, in order.
  static std::vector<std::string> names();
  // Null if the file is gone, or is not there and not to be made. `meter` counts the system's
  // calls, and refuses some in tests. Throws Error if the file is not this user's, DriverError.
  static std::unique_ptr<BudgetFile> open(CallMeter& meter, const std::string& name, bool make);
  ~BudgetFile();
  BudgetFile(const BudgetFile&) = delete;
  BudgetFile& operator=(const BudgetFile&) = delete;

  const std::string& name() const { return name_; }
  std::string path() const;

  // Makes the file long enough, with its memory, maps it, and begins it afresh. Requires: locked.
  void begin(std::uint64_t limit);
  // Maps it, unless it is too short to be whole.
  void map();
  // 0 if the file is not ours, or was cut.
  std::uint32_t layout() const;
  // Zeros, for good, once the file was cut. Good for a few accesses, for which the file is long
  // enough now. Requires: it is mapped.
  Content& content() const noexcept;
  // The same. Throws Error if the file has lost its name, so that the next pool of that name makes
  // another, or was cut, so that nothing says what its pools hold.
  Content& require_whole() const;

  // Whether it still has its name.
  bool linked() const;
  void unlink() const noexcept;

  // Whether another process has a sign of life in the place, or in any. True if that cannot be
  // seen.
  bool alive(std::size_t place) const;
  bool any_alive() const;
  // Gives and takes this object's sign of life.
  void enter(std::size_t place);
  void leave(std::size_t place) noexcept;

  // Wakes the other pools, whose listeners wait for it. Returns the number of this request.
  std::uint32_t request() noexcept;
  // Whether all others have answered it, or died.
  bool answered(std::uint32_t request, std::size_t own = kMostPools) const;
  // Sleeps until the last request is no longer `request`, or for a second: a thread that sleeps at
  // a page which the file no longer has cannot be woken.
  void await_request(std::uint32_t request) const noexcept;

  // The file's lock. Waits up to 1 s, and then throws TimedOut. Throws DriverError.
  class Lock {
   public:
    enum class Counted : bool { no, yes };
    explicit Lock(BudgetFile& file, Counted counted = Counted::yes);
    // Without a wait: false if another has it.
    Lock(BudgetFile& file, std::try_to_lock_t);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    explicit operator bool() const { return file_ != nullptr; }

   private:
    BudgetFile* file_;
  };

 private:
  BudgetFile(CallMeter& meter, std::string name);
  static void close_in_child();
  bool is_long_enough() const noexcept;
  // 0, or the error of `call`; of a call that a test refuses, `injected`.
  template <typename Body>
  int attempt(Call call, int injected, Body body);
  bool other_holds(off_t first, off_t bytes) const;
  // 0, or what the system refuses it with; EAGAIN if another holds it.
  int try_lock(off_t byte) noexcept;
  void unlock(off_t byte) noexcept;
  DriverError lock_refused(int error) const;

  CallMeter& meter_;
  const std::string name_;
  int fd_ = -1;
  Content* content_ = nullptr;
  mutable std::atomic<bool> cut_{false};  // content_ is not the file's any more
};

}  // namespace vtensor
