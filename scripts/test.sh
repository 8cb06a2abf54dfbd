#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: the Python tests except the slow ones, which check.sh runs; with arguments, the
# tests that they name. GPU tests skip without a GPU.
source "$(dirname "$0")/lib.sh"

export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so
if [ $# -gt 0 ]; then
  step "Python tests" pytest "$@"
  exit
fi
# Two processes: more need more than two cores and 8 GB. Where there is no GPU, its tests are among them. By what is left
# out of tests/, so that conftest.py, and with it torch, is loaded in these two only, not in the process that leads them.
left_out=(--ignore tests/vllm)
if [ -e /dev/nvidiactl ]; then left_out+=(--ignore tests/gpu); fi
step "Python tests" pytest -n 2 --dist worksteal -m "not slow and not alone" "${left_out[@]}" tests
mapfile -t alone < <(grep -l 'mark\.alone' tests/python/test_*.py)
step "Python tests that run alone" pytest -m "alone and not slow" "${alone[@]}"
if [ -e /dev/nvidiactl ]; then step "GPU tests" pytest tests/gpu; fi
