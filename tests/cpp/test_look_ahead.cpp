// How far to look ahead, by the rate of growth.
#include <doctest/doctest.h>

#include "policy/look_ahead.h"

namespace vtensor {
namespace {

constexpr std::uint64_t kMs = 1'000'000;

// Grows by one position every `ns`, into a new page every 32.
LookAhead growing(std::uint64_t ns) {
  LookAhead pace;
  for (std::uint64_t position = 1; position <= 320; ++position) {
    pace.step(1);
    if (position % 32 == 0) pace.mark(position, 1 + position * ns);
  }
  return pace;
}

TEST_CASE("as much is ready as grows within the horizon, and twice that is made") {
  CHECK(growing(kMs).least() == 160);
  CHECK(growing(kMs).lead() == 320);
  CHECK(growing(50 * kMs).least() == 4);
  CHECK(growing(50 * kMs).lead() == 8);
}

}  // namespace
}  // namespace vtensor
