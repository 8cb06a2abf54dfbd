#!/usr/bin/env bash
# gpu.sh [ARGUMENTS]: builds vtensor with this machine's own Python (PYTHON3=, default python3), which has
# PyTorch, nanobind, scikit-build-core, cmake, ninja and pytest; downloads nothing. During the build it asks those
# questions of benchmarks/gpu that need no vtensor and measure nothing. Then it runs the GPU tests, asks the other
# questions, and, in the time that is left, runs the tests of attention and the benchmarks on the GPU. All of it ends
# within MINUTES= (default 8). A failure stops nothing after it: without a build it asks the questions that need none.
# Results go to $OUT, or to benchmarks/results if OUT is not set, as they come: 8 files at most. ARGUMENTS are those
# of `python -m benchmarks.gpu`; with --only it asks those questions and runs no tests; with --rehearsal it needs no
# GPU, and writes to build/gpu-rehearsal.
source "$(dirname "$0")/lib.sh"

python=$(command -v "${PYTHON3:-python3}") || die "no ${PYTHON3:-python3}: name a Python with PYTHON3="
site=$PWD/build/gpu-site
limit=$((${MINUTES:-8} * 60))
grace=10 # seconds from an interruption to a kill
results=${OUT:-benchmarks/results}
rehearsal=false
everything=true
for argument in "$@"; do
  case $argument in
    --rehearsal) rehearsal=true results=${OUT:-build/gpu-rehearsal} ;;
    --only*) everything=false ;;
  esac
done
PATH=$(dirname "$python"):$PATH
# The installed package comes before the source folder vtensor/, which has no extension in it.
export PYTHONPATH=$site:$PWD PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
failed=()

# attempt TITLE COMMAND...: as step, but a failure is reported at the end only.
attempt() {
  (step "$@") || failed+=("$1")
}
# within SECONDS COMMAND...: at most SECONDS, and no longer than the whole run may take. An interrupted Python ends in
# order: pytest with its summary, the questions with what they found.
within() {
  local seconds=$1 left=$((limit - SECONDS - grace))
  shift
  if [ $left -le 0 ]; then
    echo "no time is left for: $*"
    return 124
  fi
  timeout --signal=INT --kill-after=$grace $((seconds < left ? seconds : left)) "$@"
}
# logged FILE COMMAND...: appends its output to FILE among the results, and shows the end of it. There is no pipe, which
# a process that the command leaves running could keep open.
logged() {
  local file=$results/$1 status=0
  shift
  "$@" >>"$file" 2>&1 || status=$?
  tail -n 25 "$file"
  return "$status"
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
  rm -rf "$site" # an older build is not used
  logged build.txt within 180 "$python" -m pip install -v --no-index --no-build-isolation --no-deps --upgrade \
    --target "$site" .
}
has_gpu() {
  within 60 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}
# gpu_tests NAME...: a process each, so that a test that hangs, or leaves the device in error, harms no other file.
gpu_tests() {
  local name status=0
  for name in "$@"; do
    logged gpu-tests.txt within 70 "$python" -m pytest -v --tb=short -o faulthandler_timeout=60 \
      "tests/gpu/test_$name.py" || status=1
  done
  return $status
}
# questions SECONDS [ARGUMENTS]: leaves SECONDS to what comes after them.
questions() {
  local left_to_others=$1
  shift
  within "$limit" "$python" -m benchmarks.gpu --minutes "${MINUTES:-8}" \
    --spent $((SECONDS + grace + 5 + left_to_others)) --out "$results" "$@"
}
benchmarks() {
  within 300 "$python" -m benchmarks --device cuda --json "$results/benchmarks-cuda.json" \
    --table "$results/benchmarks-cuda.txt"
}

mkdir -p "$results"
rm -f "$results"/{build,gpu-tests}.txt
step "Python" check_machine
gpu=false
if has_gpu; then gpu=true; fi
if ! $gpu && ! $rehearsal; then
  echo "No GPU here: '$0 --rehearsal' asks the questions of stand-ins, to show that their code runs."
fi
can_ask=$($gpu || $rehearsal && echo true || echo false)

if $everything && $can_ask; then
  (step "Questions while it builds" questions 0 --first "$@") &
  asking=$!
fi
attempt "Offline build" build
is_built=$([ ${#failed[@]} -eq 0 ] && echo true || echo false)
if [ -n "${asking:-}" ]; then wait "$asking" || failed+=("Questions while it builds"); fi

if ! $everything; then
  if $can_ask; then attempt "Questions" questions 0 "$@"; fi
else
  if $is_built; then attempt "GPU tests" gpu_tests cuda_mapping cuda_tensor beside_cuda_core torch_memory; fi
  if $can_ask; then attempt "Questions" questions 70 --rest "$@"; fi
  if $is_built; then attempt "GPU tests of attention" gpu_tests attention; fi
fi
if $gpu && $is_built && [ $# -eq 0 ] && [ $((limit - SECONDS)) -ge 60 ]; then attempt "Benchmarks" benchmarks; fi
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
