// How far ahead of a tensor's length pages should be ready: as far as it will grow in the next few
// milliseconds, and one more call like the last ones. A tensor that grows by one token every 20 ms
// needs one page just in time; one that is filled as fast as memory allows, some megabytes. Waking
// the mapper costs several times what growing does, so it is woken only where less than that is
// ready, and then goes twice as far.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace vtensor {

class LookAhead {
 public:
  // A call added `n` positions. The first call (a prompt) says nothing of those to come.
  void step(std::size_t n) {
    step_ = std::min(n, last_);
    last_ = n;
  }

  // The length, now `position`, reached into new pages at `now` (ns): a look at the rate.
  void mark(std::size_t position, std::uint64_t now) {
    if (position > marked_position_ && now > marked_at_ && marked_at_ != 0) {
      const double rate =
          static_cast<double>(position - marked_position_) / static_cast<double>(now - marked_at_);
      const auto seen = static_cast<std::size_t>(std::min(rate * kHorizon, kMost));
      by_rate_ = std::max(seen, by_rate_ - by_rate_ / 4);  // fast to rise, slow to fall
    }
    marked_position_ = position;
    marked_at_ = now;
  }

  // Positions beyond the length: where fewer are ready, the mapper is woken. 0 until the second
  // call.
  std::size_t least() const { return step_ == 0 ? 0 : std::max({step_, by_rate_, kLeast}); }
  // How many it then makes ready.
  std::size_t lead() const { return step_ == 0 ? 0 : std::max({step_, 2 * by_rate_, 2 * kLeast}); }

 private:
  // Nanoseconds: what the mapper may need until it runs on a busy machine, and a fresh page or two.
  static constexpr double kHorizon = 10e6;
  static constexpr double kMost = 1e15;
  static constexpr std::size_t kLeast = 4;

  std::size_t last_ = 0;
  std::size_t step_ = 0;
  std::size_t by_rate_ = 0;
  std::size_t marked_position_ = 0;
  std::uint64_t marked_at_ = 0;
};

}  // namespace vtensor
