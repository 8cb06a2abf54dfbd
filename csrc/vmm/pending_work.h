// The work that may still use some pages: the streams in which it was launched, and fences after
// it.
#pragma once

#include <vector>

#include "driver/driver.h"
#include "vmm/caller.h"

namespace vtensor {

// Whether all fences have passed; forgets the ones that have. Throws what the driver does; no fence
// is lost then.
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
  // Work in the caller's stream does. The fence of a stream that the caller named is made now: when
  // it is needed the stream may be gone, or its number may stand for another.
  void note(const Caller& caller);
  // Work in the streams that `other` has noted, also in the future, uses the pages.
  void note_streams_of(const PendingWork& other) {
    for (const Stream stream : other.streams_) note(stream);
  }
  // Work will be launched in the caller's stream, until the lease ends. `after` is a fence after it
  // if the caller named the stream; null if the work was captured into a graph. Requires: the
  // device is asynchronous.
  void begin_lease(const Caller& caller);
  void end_lease(const Caller& caller, FencePtr after);
  // Adds other work, and fences.
  void add(const PendingWork& other, const std::vector<FencePtr>& after);
  // Fences after all work launched so far.
  std::vector<FencePtr> fences() const;
  void clear();

 private:
  // Forgets the fences that have passed, as far as the driver says.
  void forget_passed();

  Driver& driver_;
  std::vector<Stream> streams_;  // torch's and our own
  std::vector<Stream> leased_;   // named by leases that have not ended
  std::vector<FencePtr> after_;  // of work in other streams
};

}  // namespace vtensor
