// A lease: launched work still needs the present extents of some tensors.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bind/tensor_core.h"

namespace vtensor::bind {

// Begins when made. Each tensor's extent is held like a view would hold it.
class Lease {
 public:
  // For work that will be launched in `stream`: torch's current one at the end unless named. Throws
  // Closed.
  Lease(const std::vector<TensorCore*>& tensors, std::optional<Stream> stream);
  // What nobody ended stays held for good: work may be running that nobody knows of.
  ~Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // All of the work is launched. Where it is being captured into a graph, the graph holds the
  // extents for its life. Where the driver refuses that, they stay held, and the error is raised.
  void end();

 private:
  std::optional<Stream> stream_;
  std::vector<Generation*> generations_;
};

}  // namespace vtensor::bind
