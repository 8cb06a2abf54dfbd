// A lease: launched work still needs the present extents of some tensors.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bind/tensor_core.h"

namespace vtensor::bind {

// Begins and ends in one call from Python each: no exception from outside leaves it open (I17).
// Each tensor's extent is held like a view would hold it.
class Lease {
 public:
  // For work that will be launched in `stream`: torch's current one at the end unless named.
  // `tensors` are any number of VTensors.
  Lease(nb::handle tensors, std::optional<Stream> stream);
  // A lease that was not ended is held for good: its work may still be running.
  ~Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Throws Closed, and Error where it has begun.
  void begin();
  // All of the work is launched. Where it is being captured into a graph, the graph holds the
  // extents for its life. Where the driver refuses that, they stay held, and the error is raised.
  // Does nothing where it has not begun.
  void end();

 private:
  std::vector<nb::object> cores_;
  std::optional<Stream> stream_;
  std::vector<Generation*> generations_;
  bool begun_ = false;
};

}  // namespace vtensor::bind
