// A lease keeps the present extents of tensors mapped for launched work.
#pragma once

#include <optional>
#include <vector>

#include "bind/tensor_core.h"

namespace vtensor::bind {

// begin() and end() are one call from Python each, so no exception from outside leaves a lease half
// open (I17). It pins each tensor's extent as a view would.
class Lease {
 public:
  // For work that will be launched in `stream`; by default, torch's current stream at the end.
  // `tensors` is an iterable of VTensors.
  Lease(nb::handle tensors, std::optional<Stream> stream);
  // A lease without an end pins its extents for good: its work may still be running.
  ~Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Throws Closed, and Error if it has begun.
  void begin();
  // Called after all of the work is launched. If the work is captured into a graph, the graph pins
  // the extents for its life. If the driver refuses that, they stay pinned, and the error is
  // thrown. Does nothing if the lease has not begun.
  void end();

 private:
  std::vector<nb::object> cores_;
  std::optional<Stream> stream_;
  std::vector<Generation*> generations_;
  bool begun_ = false;
};

}  // namespace vtensor::bind
