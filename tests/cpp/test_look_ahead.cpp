// How far to look ahead, by the rate of growth and by what the mapper took.
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

TEST_CASE("a prompt says nothing of the steps after it") {
  LookAhead pace;
  pace.step(4096);
  CHECK(pace.least({}) == 0);
  CHECK(pace.lead({}) == 0);
  pace.step(1);
  CHECK(pace.least({}) == 4);
  CHECK(pace.lead({}) == 8);
}

TEST_CASE("as much is ready as grows within the horizon, and twice that is made") {
  Horizon horizon;
  const LookAhead pace = growing(kMs);
  CHECK(horizon.ns() == 40 * kMs);
  CHECK(pace.least(horizon) == 40);
  CHECK(pace.lead(horizon) == 80);
  CHECK(growing(20 * kMs).least(horizon) == 4);
}

TEST_CASE("a mapper that takes long is called earlier, within bounds, and not for ever") {
  Horizon horizon;
  horizon.served(5 * kMs);
  CHECK(horizon.ns() == 40 * kMs);
  horizon.served(50 * kMs);
  CHECK(horizon.ns() == 100 * kMs);
  CHECK(growing(kMs).least(horizon) == 100);
  horizon.served(5 * kMs);
  CHECK(horizon.ns() == 90 * kMs);
  horizon.served(5'000 * kMs);
  CHECK(horizon.ns() == 160 * kMs);
  for (int batch = 0; batch < 20; ++batch) horizon.served(0);
  CHECK(horizon.ns() == 40 * kMs);
}

}  // namespace
}  // namespace vtensor
