#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: the Python tests; those that need a GPU skip without one.
source "$(dirname "$0")/lib.sh"

export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so
step "Python tests" pytest "${@:-tests}"
if [ $# -gt 0 ]; then exit; fi
# The general suites again with the options that users get: look-ahead and parking.
general=()
for name in tensor capacity sharing torch_safety kv_cache kv_swaps cache_layers threads regressions; do
  general+=("tests/python/test_$name.py")
done
export VTENSOR_POOLS=default
step "Python tests with default pools" pytest -q "${general[@]}"
