// The points of the trace (I16), at which the core and its drivers say what they do: for Perfetto,
// for notebooks, and for finding out why a step was slow. No allocation, no Python. Without a
// Recording a point costs one relaxed load.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/calls.h"

namespace vtensor::trace {

// X(name), one for each kind of event.
#define VTENSOR_TRACE_KINDS(X)                                                              \
  X(driver_call) /* `call` says which */                                                    \
  X(extend)      /* a tensor's length grew */                                               \
  X(shrink)      /* a tensor's length fell, `close` included */                             \
  X(prepare)     /* growth was announced */                                                 \
  X(fork)        /* pages became shared */                                                  \
  X(unshare)     /* shared pages became a tensor's own */                                   \
  X(map)         /* pages came to stand behind addresses */                                 \
  X(unmap)       /* pages left their addresses */                                           \
  X(retire)      /* pages wait for a fence or for the mapper */                             \
  X(revive)      /* waiting or prepared pages were taken into use, without a driver call */ \
  X(zero)                                                                                   \
  X(copy)                                                                                   \
  X(populate)                                                                               \
  X(cache) /* a closed tensor left mapped pages for the next */                             \
  X(reuse) /* the next tensor took cached pages */                                          \
  X(lease)                                                                                  \
  X(wait) /* a thread waited: for a fence, for the mapper, for pages */                     \
  X(out_of_memory)                                                                          \
  X(error) /* of the mapper, not yet raised */

enum class What : std::uint8_t { VTENSOR_TRACE_KINDS(VTENSOR_ENUMERATOR) count_ };

constexpr std::size_t kWhatCount = static_cast<std::size_t>(What::count_);

inline constexpr std::array<std::string_view, kWhatCount> kWhatNames = {
    VTENSOR_TRACE_KINDS(VTENSOR_NAME)};

// Whether a recording runs. Set by Recording, and unset in a forked child.
inline std::atomic<bool> on{false};

inline bool recording() { return on.load(std::memory_order_relaxed); }

// Nanoseconds of CLOCK_MONOTONIC, so that no step of the wall clock shows in a duration. A
// Recording converts them to Unix time.
std::uint64_t now() noexcept;

struct Event {
  std::uint64_t begin;  // nanoseconds of now(); events() makes it Unix time, as in torch's profile
  std::uint64_t duration = 0;  // nanoseconds
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t subject = 0;  // the first address of a tensor's range; 0: of no tensor
  std::uint32_t thread = 0;   // the kernel's number
  What what;
  Call call = Call::count_;  // if `what` is driver_call
  ThreadRole role = ThreadRole::caller;
};

// Records an event of the calling thread, if a recording runs. `event.begin` is a time of now().
void record(Event event) noexcept;

inline void event(What what, std::uint64_t address, std::uint64_t bytes,
                  std::uint64_t subject = 0) noexcept {
  if (!recording()) return;
  record({.begin = now(), .address = address, .bytes = bytes, .subject = subject, .what = what});
}

// An event that lasts as long as this object, whether its scope ends by a return or by a throw.
class Span {
 public:
  Span(What what, std::uint64_t address, std::uint64_t bytes, std::uint64_t subject = 0,
       Call call = Call::count_) noexcept
      : event_{.begin = recording() ? now() : 0,
               .address = address,
               .bytes = bytes,
               .subject = subject,
               .what = what,
               .call = call} {}
  ~Span() {
    if (event_.begin == 0) return;
    event_.duration = now() - event_.begin;
    record(event_);
  }
  Span& operator=(Span&&) = delete;

 private:
  Event event_;
};

// Keeps the newest of the events that begin and end between construction and stop(). One recording
// runs at a time. Memory is taken as events come. All methods may be called from any thread. In a
// forked child nothing is recorded, and events() and dropped() throw (I13).
class Recording {
 public:
  // 48 MiB when full: 4,096 decode steps over the K and V of 64 layers, two events each.
  static constexpr std::size_t kDefaultCapacity = std::size_t{1} << 20;

  // Room for at least `capacity` events, at most 2^28. Throws Error while another runs.
  explicit Recording(std::size_t capacity);
  ~Recording();
  Recording& operator=(Recording&&) = delete;

  // A second call does nothing.
  void stop();
  // The events so far, sorted by begin; of two with the same begin the longer first.
  std::vector<Event> events() const;
  // How many events were replaced by newer ones.
  std::uint64_t dropped() const;

  std::size_t capacity() const { return capacity_; }
  std::uint64_t started() const { return start_ + unix_offset_; }

 private:
  friend void record(Event) noexcept;

  const std::size_t capacity_;
  Event* ring_;                // event number n is at n % capacity_
  std::uint64_t count_ = 0;    // events recorded so far
  std::uint64_t start_;        // as now() gives it
  std::uint64_t unix_offset_;  // Unix time less now()
};

}  // namespace vtensor::trace
