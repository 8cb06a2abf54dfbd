// Isolates a forked child (I13). A shared mapping stays shared with the child, whose writes would
// reach the parent. So handlers of fork(2) lock every host driver, and in the child replace each
// shared mapping by a private one of the same memory and close the memfd.
//
// What the child writes stays its own, and reads back. A 4 KiB page that it has not written shows
// the memfd as it is now: later writes of the parent, and zeros for pages that the parent gives
// back. Only what the parent had copied from its handle before the fork is a true copy.
#pragma once

#include <mutex>

#include "driver/mapping_mirror.h"

namespace vtensor {

// The part of a host driver that the handlers use. Registered as long as it lives.
class ForkedState {
 public:
  ForkedState();
  ~ForkedState();
  ForkedState(const ForkedState&) = delete;
  ForkedState& operator=(const ForkedState&) = delete;

  std::mutex mutex;  // held while a mapping and its record change
  MappingMirror mirror;
  int memfd = -1;  // owned; -1 in a forked child
};

}  // namespace vtensor
