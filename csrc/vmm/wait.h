// Waiting for the device, with a bound (I12) and without a lock (I11).
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/trace.h"
#include "driver/driver.h"

namespace vtensor {

// Whether the fence passes within `patience`. Asks often at first, because most fences pass in
// microseconds.
inline bool wait_for(Driver& driver, const FencePtr& fence, std::chrono::nanoseconds patience) {
  if (!fence || driver.passed(*fence)) return true;
  const trace::Span span(trace::What::wait, 0, 0);
  const auto until = std::chrono::steady_clock::now() + patience;
  std::chrono::nanoseconds pause = std::chrono::microseconds(5);
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(pause);
    if (driver.passed(*fence)) return true;
    pause = std::min<std::chrono::nanoseconds>(2 * pause, std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace vtensor
