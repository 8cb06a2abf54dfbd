// The copying stream of the host: threads that make the copies that callers queue.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/driver.h"

namespace vtensor {

// Copies in one direction run side by side. A copy in the other direction waits for all that were
// queued before it, so the order of copies cannot be told from that of a stream.
class HostCopies {
 public:
  // Makes the memory of mapped pages present before a copy into them; called in any thread.
  using Populate = std::function<void(std::byte* at, std::size_t bytes)>;

  explicit HostCopies(Populate populate) : populate_(std::move(populate)) {}
  // Returns when all queued copies are done and the threads have ended.
  ~HostCopies();
  HostCopies& operator=(HostCopies&&) = delete;

  // Queues one copy; the threads start with the first. Throws DriverError, with nothing queued, if
  // no thread can be made.
  void copy(CopyDirection direction, void* to, const void* from, std::size_t bytes);
  // A point after all copies queued so far; null if all are done.
  FencePtr fence();
  static bool passed(const Fence& fence);

 private:
  struct Piece {
    CopyDirection direction;
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  // One core does not fill the memory's bandwidth, and two leave others to the program.
  static constexpr std::size_t kThreads = 2;
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

  bool may_begin() const;
  void work(std::size_t thread);

  const Populate populate_;
  std::mutex mutex_;  // guards the members below; `*done_` is read without it
  std::condition_variable changed_;
  // Pieces are numbered in the order in which they were queued, and begun in that order.
  std::list<Piece> waiting_;
  std::uint64_t queued_ = 0;
  std::uint64_t begun_ = 0;
  CopyDirection direction_ = CopyDirection::out;                  // of the pieces that threads copy
  std::array<std::uint64_t, kThreads> copying_ = {kNone, kNone};  // the piece of each thread
  // How many pieces are copied, counted from the first. Fences share the count and may outlive this
  // object.
  const std::shared_ptr<std::atomic<std::uint64_t>> done_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  bool stopping_ = false;
  std::vector<std::unique_ptr<std::thread>> threads_;
};

}  // namespace vtensor
