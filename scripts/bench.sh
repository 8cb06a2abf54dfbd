#!/usr/bin/env bash
# bench.sh [ARGUMENTS]: the benchmarks, on the CPU unless told otherwise; --help lists the arguments.
source "$(dirname "$0")/lib.sh"

step "Benchmarks" $PYTHON -m benchmarks "$@"
