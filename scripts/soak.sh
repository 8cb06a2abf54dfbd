#!/usr/bin/env bash
# soak.sh MINUTES [ARGUMENTS]: random operations in threads beside refused driver calls, on the host and on the
# simulated libcuda; writes benchmarks/results/soak-<date>.json. Not a part of CI.
source "$(dirname "$0")/lib.sh"

[ $# -ge 1 ] || die "say how many minutes: scripts/soak.sh 10"
export VTENSOR_SIMCUDA=${VTENSOR_SIMCUDA:-$PWD/build/tests/libsimcuda.so}
step "Soak" env PYTHONPATH=. $PYTHON tests/soak.py "$1" --out "benchmarks/results/soak-$(date +%F).json" "${@:2}"
