#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: the Python tests; those that need a GPU skip without one.
source "$(dirname "$0")/lib.sh"

export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so
step "Python tests" pytest "${@:-tests}"
