#!/usr/bin/env bash
# gpu.sh [--only N,N]: builds vtensor with this machine's own Python (PYTHON3=, default python3), which has PyTorch,
# cuda-bindings, nanobind, scikit-build-core, cmake, ninja and pytest; downloads nothing. During the build it asks those
# questions of benchmarks/gpu.py that need no vtensor and measure nothing. Then it runs the GPU tests, asks the other
# questions, and, in the time that is left, runs the tests of attention and the benchmarks on the GPU. All of it ends
# within MINUTES= (default 8). A failure stops nothing after it: without a build it asks the questions that need none.
# Results go to $OUT, or to benchmarks/results, as they come. With --only it asks those questions and runs no tests.
source "$(dirname "$0")/lib.sh"

python=$(command -v "${PYTHON3:-python3}") || die "no ${PYTHON3:-python3}: name a Python with PYTHON3="
site=$PWD/build/gpu-site
limit=$((${MINUTES:-8} * 60))
grace=10 # seconds from an interruption to a kill
results=${OUT:-benchmarks/results}
PATH=$(dirname "$python"):$PATH
# The installed package comes before the source folder vtensor/, which has no extension in it. Kernels that are not
# installed, but unpacked, come through PYTHONPATH.
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
failed=()
tests=(cuda_mapping cuda_tensor serving shared_memory beside_cuda_core torch_memory generate)

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
  "$python" - <<'CODE' || die "install what is missing: this command downloads nothing"
import importlib.util, sys
missing = [m for m in ("torch", "nanobind", "scikit_build_core", "pytest") if not importlib.util.find_spec(m)]
missing += ["Python 3.11"] if sys.version_info < (3, 11) else []
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
# questions WHICH SECONDS: leaves SECONDS to what comes after them.
questions() {
  local left=$((limit - SECONDS - grace - 5 - $2))
  within "$limit" "$python" -m benchmarks.gpu --only "$1" --out "$results" \
    --minutes "$(printf '%d.%02d' $((left / 60)) $((left % 60 * 100 / 60)))"
}
benchmarks() {
  within 300 "$python" -m benchmarks --device cuda --json "$results/benchmarks-cuda.json" \
    --table "$results/benchmarks-cuda.txt"
}

mkdir -p "$results"
rm -f "$results"/{build,gpu-tests}.txt
step "Python" check_machine
gpu=false
if has_gpu; then gpu=true; else echo "No GPU here: no question is asked, and tests that need one are skipped."; fi

if [ "${1:-}" = --only ]; then
  attempt "Offline build" build
  if $gpu; then attempt "Questions" questions "$2" 0; fi
else
  if $gpu; then
    (step "Questions while it builds" questions first 0) &
    asking=$!
  fi
  attempt "Offline build" build
  is_built=$([ ${#failed[@]} -eq 0 ] && echo true || echo false)
  if $gpu; then wait "$asking" || failed+=("Questions while it builds"); fi
  if $is_built; then attempt "GPU tests" gpu_tests "${tests[@]}"; fi
  if $gpu; then attempt "Questions" questions rest 70; fi
  if $is_built; then attempt "GPU tests of attention" gpu_tests attention; fi
  if $gpu && $is_built && [ $((limit - SECONDS)) -ge 60 ]; then attempt "Benchmarks" benchmarks; fi
fi
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
