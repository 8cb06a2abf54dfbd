#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: the Python tests, all but the slow ones, which check.sh runs; with arguments,
# those that they name. What needs a GPU skips without one.
source "$(dirname "$0")/lib.sh"

export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so
if [ $# -gt 0 ]; then
  step "Python tests" pytest "$@"
  exit
fi
# Two processes: with more, what a machine of two cores or 8 GB has would not suffice.
step "Python tests" pytest -n 2 --dist worksteal -m "not slow and not alone" tests/python
step "Python tests that run alone" pytest -m "alone and not slow" tests/python
step "GPU tests" pytest tests/gpu
