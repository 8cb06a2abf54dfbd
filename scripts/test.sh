#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: the Python tests except the slow ones, which check.sh runs; with arguments, the
# tests that they name. GPU tests skip without a GPU.
source "$(dirname "$0")/lib.sh"

export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so
if [ $# -gt 0 ]; then
  step "Python tests" pytest "$@"
  exit
fi
# Two processes: more need more than two cores and 8 GB.
step "Python tests" pytest -n 2 --dist worksteal -m "not slow and not alone" tests/python
mapfile -t alone < <(grep -l 'mark\.alone' tests/python/test_*.py)
step "Python tests that run alone" pytest -m "alone and not slow" "${alone[@]}"
step "GPU tests" pytest tests/gpu
