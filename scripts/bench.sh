#!/usr/bin/env bash
# bench.sh [ARGUMENTS]: the benchmarks, by default on the CPU; --help lists the arguments.
source "$(dirname "$0")/lib.sh"

step "Benchmarks" $PYTHON -m benchmarks "$@"
