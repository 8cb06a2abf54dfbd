// The reading side of the trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/calls.h"
#include "base/trace.h"

namespace vtensor::trace {

struct Event {
  std::uint64_t begin;     // nanoseconds of Unix time, which torch's profiler writes too
  std::uint64_t duration;  // nanoseconds
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t subject;  // the first address of a tensor's range; 0: of no tensor
  std::uint32_t thread;   // as the kernel numbers it
  What what;
  Call call;  // Call::count_ unless `what` is driver_call
  ThreadRole role;
  std::uint8_t padding = 0;  // so that every byte has a value
};

struct Ring;

// The events that begin and end between its making and stop(). One runs at a time.
//
// The ring keeps the newest events. It has memory only while the recording runs, and only as much
// as events have reached. All methods may be called from any thread. In a forked child nothing is
// recorded, and all but stop() throw (I13).
class Recording {
 public:
  // 64 bytes an event, so 64 MiB if the ring fills: 4,096 decode steps over the K and V of 64
  // layers, two events each.
  static constexpr std::size_t kDefaultCapacity = std::size_t{1} << 20;

  // Room for at least `capacity` events, at most 2^28. Throws Error while another runs.
  explicit Recording(std::size_t capacity);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Takes the events out of the ring. A second call does nothing.
  void stop();

  // Sorted by begin; of two with the same begin the longer first. Those so far, while it runs.
  std::vector<Event> events();
  // How many events newer ones have replaced.
  std::uint64_t dropped();

  std::size_t capacity() const;
  std::uint64_t started() const { return to_unix(start_); }

 private:
  void finish(bool keep);
  // The events before ticket `end` that the ring still has, and how many are lost.
  std::vector<Event> collect(std::uint64_t end, std::uint64_t& lost) const;
  std::uint64_t to_unix(std::uint64_t time) const {
    return time + static_cast<std::uint64_t>(unix_offset_);
  }

  Ring* ring_ = nullptr;
  std::uint64_t first_ = 0;  // ticket
  std::uint64_t start_ = 0;  // as now() gives it
  std::int64_t unix_offset_ = 0;
  bool stopped_ = false;
  std::vector<Event> kept_;  // once stopped
  std::uint64_t dropped_ = 0;
};

}  // namespace vtensor::trace
