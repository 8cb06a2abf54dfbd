// Who asks the core for something.
#pragma once

#include "driver/driver.h"

namespace vtensor {

struct Caller {
  const char* operation;  // for messages: "VTensor.extend"
  Stream stream = 0;      // in which the caller's kernels run
  bool named = false;     // by the caller: not torch's own, so it may end before the tensor does
};

}  // namespace vtensor
