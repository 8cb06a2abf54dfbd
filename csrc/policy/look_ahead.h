// How far ahead of a tensor's length pages should be ready: as far as the tensor grows while the
// mapper makes pages, and one more call like the last ones. A tensor that grows by one token every
// 20 ms needs one page just in time; a tensor filled as fast as memory allows needs tens of
// megabytes. Waking the mapper costs several times as much as growing, so the mapper is woken only
// if less is ready, and then makes twice as much ready.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace vtensor {

class LookAhead {
 public:
  // A call added `n` positions. The first call (a prompt) says nothing about later calls.
  void step(std::size_t n) {
    step_ = std::min(n, last_);
    last_ = n;
  }

  // Measures the rate: at `now` (ns) the length, now `position`, reached a new page.
  void mark(std::size_t position, std::uint64_t now) {
    if (position > marked_position_ && now > marked_at_ && marked_at_ != 0) {
      const double rate =
          static_cast<double>(position - marked_position_) / static_cast<double>(now - marked_at_);
      rate_ = std::max(rate, rate_ * 0.75);  // fast to rise, slow to fall
    }
    marked_position_ = position;
    marked_at_ = now;
  }

  // The mapper is woken if fewer positions beyond the length are ready. 0 until the second call.
  std::size_t least() const { return step_ == 0 ? 0 : std::max({step_, within_horizon(), kLeast}); }
  // How many positions the mapper then makes ready.
  std::size_t lead() const {
    return step_ == 0 ? 0 : std::max({step_, 2 * within_horizon(), 2 * kLeast});
  }

 private:
  // How long ahead pages are asked for (ns): time for the mapper to run on a busy machine, and to
  // serve other clients. If growth is as fast as the mapper, no horizon is long enough.
  static constexpr double kHorizon = 160e6;
  static constexpr double kMost = 1e15;
  static constexpr std::size_t kLeast = 4;

  std::size_t within_horizon() const {
    return static_cast<std::size_t>(std::min(rate_ * kHorizon, kMost));
  }

  std::size_t last_ = 0;
  std::size_t step_ = 0;
  double rate_ = 0;  // positions a nanosecond
  std::size_t marked_position_ = 0;
  std::uint64_t marked_at_ = 0;
};

}  // namespace vtensor
