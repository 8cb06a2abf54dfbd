// A point of the trace by itself, and marks for what callgrind is to count. trace_cost.py builds it
// with the sources of the trace, and calls it under callgrind.
#include <valgrind/callgrind.h>

#include <cstdint>

#include "base/trace.h"

using namespace vtensor::trace;

namespace {

// What is at hand where a tensor tells of its growth.
struct Tensor {
  std::uint64_t base, item_bytes, rows, length;
};

[[gnu::noinline]] void bare(Tensor& tensor, std::uint64_t n) { tensor.length += n; }

[[gnu::noinline]] void traced(Tensor& tensor, std::uint64_t n) {
  const Span span(What::extend, tensor.base + tensor.length * tensor.item_bytes,
                  n * tensor.rows * tensor.item_bytes, tensor.base);
  tensor.length += n;
}

}  // namespace

extern "C" {

// Counts from here ...
void begin() {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

// ... to here, under a name.
void end(const char* name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}

void count_points(int times) {
  const auto count = [times](const char* name, void (*step)(Tensor&, std::uint64_t)) {
    Tensor tensor{0x700000000000, 4096, 1, 0};
    step(tensor, 1);
    begin();
    for (int i = 0; i < times; ++i) step(tensor, 1);
    end(name);
  };
  count("bare", bare);
  count("off", traced);
  const Recording recording(Recording::kDefaultCapacity);
  count("on", traced);
}

}  // extern "C"
