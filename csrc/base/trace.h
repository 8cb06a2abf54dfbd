// The points of the trace (I16), at which the core and its drivers say what they do: for Perfetto,
// for notebooks, and for finding out why a step was slow. No allocation, no lock, no Python.
// Without a recording (base/recording.h) a point costs one relaxed load.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/calls.h"

namespace vtensor::trace {

// X(name), one for each kind of event.
#define VTENSOR_TRACE_KINDS(X)                                                              \
  X(driver_call) /* `call` says which */                                                    \
  X(extend)      /* a tensor's length grew */                                               \
  X(shrink)      /* or went back, `close` included */                                       \
  X(prepare)     /* growth was announced */                                                 \
  X(fork)        /* pages became shared */                                                  \
  X(unshare)     /* shared pages became a tensor's own */                                   \
  X(map)         /* pages came to stand behind addresses */                                 \
  X(unmap)       /* and left them */                                                        \
  X(retire)      /* pages wait for a fence or for the mapper */                             \
  X(revive)      /* waiting or prepared pages were taken into use, without a driver call */ \
  X(zero)                                                                                   \
  X(copy)                                                                                   \
  X(populate)                                                                               \
  X(cache) /* a closed tensor left its mapped pages for the next one */                     \
  X(reuse) /* which took them */                                                            \
  X(lease)                                                                                  \
  X(wait) /* a thread waited: for a fence, for the mapper, for pages */                     \
  X(out_of_memory)                                                                          \
  X(error) /* of the mapper, not yet raised */

enum class What : std::uint8_t { VTENSOR_TRACE_KINDS(VTENSOR_ENUMERATOR) count_ };

constexpr std::size_t kWhatCount = static_cast<std::size_t>(What::count_);

inline constexpr std::array<std::string_view, kWhatCount> kWhatNames = {
    VTENSOR_TRACE_KINDS(VTENSOR_NAME)};

constexpr std::string_view name_of(What what) { return kWhatNames[static_cast<std::size_t>(what)]; }

// Whether a recording runs. Set by Recording, and unset in a forked child.
inline std::atomic<bool> on{false};

inline bool recording() { return on.load(std::memory_order_relaxed); }

// Nanoseconds of CLOCK_MONOTONIC, so that no step of the wall clock shows in a duration. A
// Recording converts them to Unix time.
std::uint64_t now() noexcept;

// Puts one event of the calling thread in the ring, if a recording runs. `begin` and `end` are
// times of now(), equal for an event without a duration. `subject` is the first address of the
// tensor's range, 0 if there is none.
void record(What what, std::uint64_t begin, std::uint64_t end, std::uint64_t address,
            std::uint64_t bytes, std::uint64_t subject = 0, Call call = Call::count_) noexcept;

inline void event(What what, std::uint64_t address, std::uint64_t bytes,
                  std::uint64_t subject = 0) noexcept {
  if (!recording()) return;
  const std::uint64_t time = now();
  record(what, time, time, address, bytes, subject);
}

// An event that lasts as long as this object, whether its scope ends by a return or by a throw.
class Span {
 public:
  Span(What what, std::uint64_t address, std::uint64_t bytes, std::uint64_t subject = 0,
       Call call = Call::count_) noexcept
      : begin_(recording() ? now() : 0),
        address_(address),
        bytes_(bytes),
        subject_(subject),
        what_(what),
        call_(call) {}
  ~Span() {
    if (begin_ != 0) record(what_, begin_, now(), address_, bytes_, subject_, call_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const std::uint64_t begin_, address_, bytes_, subject_;
  const What what_;
  const Call call_;
};

}  // namespace vtensor::trace
