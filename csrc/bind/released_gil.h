// Lets Python run meanwhile, like nanobind's gil_scoped_release, and survives the interpreter's
// end.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace vtensor::bind {

class ReleasedGil {
 public:
  ReleasedGil() : thread_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (const abi::__forced_unwind&) {
      // The interpreter has ended, and Python before 3.14 ends the daemon threads that come back to
      // it by unwinding them, which no C++ frame of theirs need allow: that would end the process.
      // They stay here until it has ended, as Python itself keeps them from 3.14 on.
      for (;;) pause();
    }
  }

 private:
  PyThreadState* const thread_;
};

}  // namespace vtensor::bind
