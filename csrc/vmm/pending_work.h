// The work that may still use some pages: the streams in which it was launched, and points behind
// it.
#pragma once

#include <vector>

#include "driver/driver.h"
#include "vmm/caller.h"

namespace vtensor {

// Forgets fences that have passed; whether all have. Throws what the driver does; none is lost
// then.
bool all_passed(Driver& driver, std::vector<FencePtr>& fences);

class PendingWork {
 public:
  explicit PendingWork(Driver& driver) : driver_(driver) {}

  // Whether what is launched there may still run when the launch returns.
  static bool runs_behind(Driver& driver, Stream stream) {
    return driver.traits().asynchronous || stream == driver.copy_stream();
  }
  // Work in `stream` uses the pages. Requires: the stream lasts as long as they do.
  void note(Stream stream);
  // Work in the caller's stream does. A stream that a caller named may be gone, or its number stand
  // for another, by the time that a fence is needed: its fence is made now.
  void note(const Caller& caller);
  // Work will be launched in the caller's stream, until the lease ends. `after` is a point behind
  // it if the caller named the stream; null if the work was captured into a graph. Requires: the
  // device is asynchronous.
  void begin_lease(const Caller& caller);
  void end_lease(const Caller& caller, FencePtr after);
  // Points behind all work launched so far.
  std::vector<FencePtr> fences() const;
  void clear();

 private:
  Driver& driver_;
  std::vector<Stream> streams_;  // torch's and our own
  std::vector<Stream> leased_;   // named by leases that have not ended
  std::vector<FencePtr> after_;  // behind work in other streams
};

}  // namespace vtensor
