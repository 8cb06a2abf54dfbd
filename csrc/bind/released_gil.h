// Releases the GIL for a scope, like nanobind's gil_scoped_release, and survives the end of the
// interpreter.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace vtensor::bind {

class ReleasedGil {
 public:
  ReleasedGil() : thread_(PyEval_SaveThread()) {}
  ReleasedGil& operator=(ReleasedGil&&) = delete;
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (const abi::__forced_unwind&) {
      // The interpreter has ended. Python before 3.14 unwinds daemon threads that return to it. A
      // C++ frame that does not allow that would end the process. So the thread stays here until
      // the process ends, as it does in Python from 3.14 on.
      for (;;) pause();
    }
  }

 private:
  PyThreadState* const thread_;
};

template <typename Body>
auto without_gil(const Body& body) {
  const ReleasedGil released;
  return body();
}

}  // namespace vtensor::bind
