// Tests for another architecture run under QEMU in user mode, which does less than the kernel.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <string>

namespace vtensor {

// Whether QEMU runs this test; says then that it is skipped because of `limit`. The kernel refuses
// advice that is none, QEMU takes it.
inline bool under_qemu(const char* limit) {
  constexpr int kNoAdvice = 9999;
  if (madvise(nullptr, 0, kNoAdvice) != 0) return false;
  MESSAGE("skipped under QEMU, which " << std::string(limit));
  return true;
}

}  // namespace vtensor
