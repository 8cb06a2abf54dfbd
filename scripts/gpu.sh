#!/usr/bin/env bash
# gpu.sh [ARGUMENTS]: builds vtensor with this machine's own Python (PYTHON3=, default python3), which has
# PyTorch, nanobind, scikit-build-core, cmake, ninja and pytest; downloads nothing. Then runs the GPU tests, asks the
# questions of benchmarks/gpu, and, in the time that is left, runs the benchmarks on the GPU. All of it ends within
# MINUTES= (default 8). What fails stops nothing after it. Results go to $OUT, or to benchmarks/results where OUT is
# not set, as they come. ARGUMENTS are those of `python -m benchmarks.gpu`; with --rehearsal it needs no GPU, and
# writes to build/gpu-rehearsal.
source "$(dirname "$0")/lib.sh"

python=$(command -v "${PYTHON3:-python3}") || die "no ${PYTHON3:-python3}: name a Python with PYTHON3="
site=$PWD/build/gpu-site
limit=$((${MINUTES:-8} * 60))
results=${OUT:-benchmarks/results}
rehearsal=false
for argument in "$@"; do
  if [ "$argument" = --rehearsal ]; then rehearsal=true results=${OUT:-build/gpu-rehearsal}; fi
done
PATH=$(dirname "$python"):$PATH
# The installed package comes before the source folder vtensor/, which has no extension in it.
export PYTHONPATH=$site:$PWD PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
failed=()

# attempt TITLE COMMAND...: as step, but what fails is only told at the end.
attempt() {
  (step "$@") || failed+=("$1")
}
# within SECONDS COMMAND...: at most so long, and no longer than the whole run may take.
within() {
  local seconds=$1 left=$((limit > SECONDS ? limit - SECONDS : 1))
  shift
  timeout --kill-after=10 $((seconds < left ? seconds : left)) "$@"
}

check_machine() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than Python 3.11"
  "$python" - <<'CODE' || die "install what is missing: this command downloads nothing"
import importlib.util, sys
missing = [m for m in ("torch", "nanobind", "scikit_build_core", "pytest") if not importlib.util.find_spec(m)]
sys.exit(f"{sys.executable} lacks: {', '.join(missing)}" if missing else 0)
CODE
}
build() {
  within 180 "$python" -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target "$site" .
}
has_gpu() {
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}
gpu_tests() {
  within 120 "$python" -m pytest -ra tests/gpu 2>&1 | tee "$results/gpu-tests.txt"
}
questions() {
  "$python" -m benchmarks.gpu --minutes "${MINUTES:-8}" --spent "$SECONDS" --out "$results" "$@"
}
benchmarks() {
  within 300 "$python" -m benchmarks --device cuda --json "$results/benchmarks-cuda.json" |
    tee "$results/benchmarks-cuda.txt"
}

step "Python" check_machine
step "Offline build" build
mkdir -p "$results"
attempt "GPU tests" gpu_tests
if has_gpu || $rehearsal; then
  attempt "Questions" questions "$@"
else
  echo "No GPU here: '$0 --rehearsal' asks the questions of stand-ins, to show that their code runs."
fi
if has_gpu && [ $# -eq 0 ] && [ $((limit - SECONDS)) -ge 60 ]; then attempt "Benchmarks" benchmarks; fi
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
