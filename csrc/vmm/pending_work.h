// The work that may still use some pages: its streams, and fences after it.
#pragma once

#include <vector>

#include "driver/driver.h"
#include "vmm/caller.h"

namespace vtensor {

// Whether all fences have passed; forgets those that have. Throws what the driver does, and loses
// no fence then.
bool all_passed(Driver& driver, std::vector<FencePtr>& fences);

class PendingWork {
 public:
  explicit PendingWork(Driver& driver) : driver_(driver) {}

  // Whether work launched in `stream` may still run when the launch returns.
  static bool runs_behind(Driver& driver, Stream stream) {
    return driver.traits().asynchronous || stream == driver.copy_stream();
  }
  // Work in `stream` uses the pages. Requires: the stream lives as long as the pages are used.
  void note(Stream stream);
  // Work in the caller's stream uses the pages. For a stream that the caller named, a fence is made
  // now: later the stream may be gone, or its number stand for another.
  void note(const Caller& caller);
  // Present and future work in the streams noted by `other` uses the pages.
  void note_streams_of(const PendingWork& other) {
    for (const Stream stream : other.streams_) note(stream);
  }
  // begin_lease: work will be launched in the caller's stream until end_lease, whose `after` is a
  // fence after the work if the caller named the stream; null if the work was captured into a
  // graph. Requires: the device is asynchronous.
  void begin_lease(const Caller& caller);
  void end_lease(const Caller& caller, FencePtr after);
  // Adds the work of `other`, and the fences `after`.
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
