#!/usr/bin/env bash
# coverage.sh: counts the lines of csrc/ that the C++ tests and the quick Python tests execute, by room, and lists
# those that none does. Needs doctest, and gcov of the compiler.
source "$(dirname "$0")/lib.sh"

build=build/coverage
environment=$PWD/$build/environment

# One build of the extension and the C++ tests. The environment lies over .venv: its packages come first.
build() {
  rm -rf "$environment"
  $PYTHON -m venv --without-pip "$environment"
  local packages
  packages=$(echo "$environment"/lib/python3*/site-packages)
  echo "$PWD"/$VENV/lib/python3*/site-packages >"$packages/under.pth"
  "$environment/bin/python" -m pip install -q --no-build-isolation --no-deps -e . -C build-dir=$build \
    -C cmake.build-type=Debug -C cmake.define.VTENSOR_BUILD_TESTS=ON \
    -C cmake.define.CMAKE_CXX_FLAGS="-O0 --coverage -fprofile-update=atomic"
  sed -i "\\#^$(dirname "$PWD")\$#d" "$packages"/*editable*.pth # see build.sh
  find $build -name '*.gcda' -delete
}
cpp_tests() {
  ctest --test-dir $build --output-on-failure -j "$JOBS"
}
python_tests() {
  VTENSOR_SIMCUDA=$PWD/$build/libsimcuda.so "$environment/bin/python" -m pytest -q -n 2 --dist worksteal \
    -m "not slow and not alone" tests/python
}
report() {
  gcovr --object-directory $build --filter csrc/ -j "$JOBS" --json $build/lines.json --txt $build/lines.txt $build
  cat $build/lines.txt
  for room in csrc/*/; do
    printf '%-14s %s\n' "$room" "$(gcovr -a $build/lines.json --filter "$room" --txt-summary | grep ^lines)"
  done
}

step "Build that counts" build
step "C++ tests" cpp_tests
step "Python tests" python_tests
step "Lines of csrc/" report
