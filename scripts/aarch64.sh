#!/usr/bin/env bash
# aarch64.sh [TARGET...]: cross-compiles C++ tests for aarch64 and runs them under QEMU: the conformance suite by default,
# or the programs named, as test_fences; `all` for all. Needs Debian's g++-aarch64-linux-gnu, qemu-user and doctest-dev.
source "$(dirname "$0")/lib.sh"

[ $# -gt 0 ] || set -- conformance
build() {
  cmake -S . -B build/aarch64 -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-g0 -O1" \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" -DDOCTEST_INCLUDE_DIR=/usr/include \
    -DVTENSOR_BUILD_PYTHON=OFF -DVTENSOR_BUILD_TESTS=ON
  cmake --build build/aarch64 --target "$@"
}
run() {
  local programs
  programs=$([ "$1" = all ] || (IFS='|' && echo "^($*)$"))
  ctest --test-dir build/aarch64 -j "$JOBS" --output-on-failure --no-tests=error ${programs:+-R "$programs"}
}

step "Build for aarch64" build "$@"
step "Under QEMU" run "$@"
