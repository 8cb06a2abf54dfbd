// What a fork(2) must isolate (I13). A shared mapping stays shared with a forked child: its writes
// would reach the parent. Handlers around fork hold every host driver still, and in the child put a
// private mapping of the same memory in the place of each shared one and close the memfd.
//
// What the child then sees: everything it writes stays its own, and reads back. A 4 KiB page that
// it has not written shows the memfd as it is now, so writes that the parent makes after the fork,
// and pages that the parent gives back (as zeros), show through; except where the parent had copied
// the page from its handle before the fork, which is a true copy.
#pragma once

#include <mutex>

#include "driver/mapping_mirror.h"

namespace vtensor {

// The part of a host driver that the handlers touch. Registered for as long as it lives.
class ForkedState {
 public:
  ForkedState();
  ~ForkedState();
  ForkedState(const ForkedState&) = delete;
  ForkedState& operator=(const ForkedState&) = delete;

  std::mutex mutex;  // held over each change of a mapping together with its record
  MappingMirror mirror;
  int memfd = -1;  // owned; -1 in a forked child

 private:
  friend struct ForkHandlers;
  ForkedState* next_ = nullptr;
  ForkedState* previous_ = nullptr;
};

}  // namespace vtensor
