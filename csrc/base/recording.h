// The reading side of the trace: the events of its points between two moments.
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
};

struct Ring;

// Holds what begins and ends between its making and stop(). Recordings may overlap, in one thread
// and in several: they share the ring of the first.
//
// The ring keeps the newest events. It has memory only while a recording runs, and only as much as
// events have reached. All methods may be called from any thread, and all but stop() throw in a
// forked child, where nothing is recorded (I13).
class Recording {
 public:
  // 64 bytes an event, so 64 MiB where all of it is reached: the 4,096 steps of a decode over the K
  // and V of 64 layers, each twice.
  static constexpr std::size_t kDefaultCapacity = std::size_t{1} << 20;

  // Room for at least `capacity` events, at most 2^28; 0 takes what a running recording has, or the
  // default. Throws InvalidArgument where a running one has less.
  explicit Recording(std::size_t capacity);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Takes the events out of the ring. A second call does nothing.
  void stop();

  // By begin, what encloses before what it encloses. So far, while it runs.
  std::vector<Event> events();
  // Events of this time that newer ones have replaced.
  std::uint64_t dropped();

  std::size_t capacity() const { return capacity_; }
  std::uint64_t started() const { return to_unix(start_); }

 private:
  void finish(bool keep);
  // Those of the tickets before `end` that the ring still has, and how many it has lost.
  std::vector<Event> collect(std::uint64_t end, std::uint64_t& lost) const;
  std::uint64_t to_unix(std::uint64_t time) const {
    return time + static_cast<std::uint64_t>(unix_offset_);
  }

  Ring* ring_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t first_ = 0;  // ticket
  std::uint64_t start_ = 0;  // as now() gives it
  std::int64_t unix_offset_ = 0;
  bool stopped_ = false;
  std::vector<Event> kept_;  // once stopped
  std::uint64_t dropped_ = 0;
};

}  // namespace vtensor::trace
