#!/usr/bin/env bash
# gpu.sh: builds vtensor with this machine's own Python (PYTHON3=, default python3), which has PyTorch,
# nanobind, scikit-build-core, cmake, ninja and pytest; downloads nothing. Then runs the GPU tests and, where
# there is a GPU, the benchmarks on it; keeps what they print under $OUT, or benchmarks/results where OUT is
# not set.
source "$(dirname "$0")/lib.sh"

python=$(command -v "${PYTHON3:-python3}") || die "no ${PYTHON3:-python3}: name a Python with PYTHON3="
site=$PWD/build/gpu-site
results=${OUT:-benchmarks/results}
PATH=$(dirname "$python"):$PATH
# The installed package comes before the source folder vtensor/, which has no extension in it.
export PYTHONPATH=$site:$PWD PYTHONSAFEPATH=1

check_machine() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than Python 3.11"
  "$python" - <<'CODE' || die "install what is missing: this command downloads nothing"
import importlib.util, sys
missing = [m for m in ("torch", "nanobind", "scikit_build_core", "pytest") if not importlib.util.find_spec(m)]
sys.exit(f"{sys.executable} lacks: {', '.join(missing)}" if missing else 0)
CODE
}
build() {
  "$python" -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target "$site" .
}
gpu_tests() {
  mkdir -p "$results"
  "$python" -m pytest -ra tests/gpu 2>&1 | tee "$results/gpu-tests.txt"
}
has_gpu() {
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}
gpu_benchmarks() {
  "$python" -m benchmarks --device cuda --json "$results/benchmarks-cuda.json" |
    tee "$results/benchmarks-cuda.txt"
}

step "Python" check_machine
step "Offline build" build
step "GPU tests" gpu_tests
if has_gpu; then step "GPU benchmarks" gpu_benchmarks; fi
