// The caller of an operation of the core.
#pragma once

#include "driver/driver.h"

namespace vtensor {

struct Caller {
  const char* operation;  // for messages: "VTensor.extend"
  Stream stream = 0;      // in which the caller's kernels run
  bool named = false;     // the caller named the stream, which may end before the tensor does
};

}  // namespace vtensor
