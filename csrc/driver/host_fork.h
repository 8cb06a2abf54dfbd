// Takes a driver's memory from a forked child (I13). A shared mapping stays shared with the child,
// whose writes would reach the parent. So the child's handler of fork(2) puts inaccessible memory
// over every reserved range, and closes the memfd. The addresses stay taken: what the child
// allocates never lies where a view of the parent's memory points.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "driver/driver.h"

namespace vtensor {

struct HostReservation {
  Address base;
  std::size_t bytes;
};

// What a host driver's mutex guards, for the handlers to find. Registered as long as it lives.
class ForkedState {
 public:
  ForkedState();
  ~ForkedState();
  ForkedState(const ForkedState&) = delete;
  ForkedState& operator=(const ForkedState&) = delete;

  std::mutex mutex;  // held while a mapping or a range changes, and during a fork
  std::map<Address, HostReservation> reservations;  // by the address of the range
  int memfd = -1;                                   // owned; -1 in a forked child
};

}  // namespace vtensor
