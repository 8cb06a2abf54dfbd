#!/usr/bin/env bash
# check.sh: all that test.sh leaves out: lint, format, types, layers, documentation, the golden stub, the slow
# Python tests, the random ones with more draws, and the C++ tests under the sanitizers.
source "$(dirname "$0")/lib.sh"

cpp_sources() {
  git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'tests/*.cpp' 'tests/*.h'
}
check_cpp_format() {
  cpp_sources | xargs clang-format --dry-run -Werror
}
# Without the editable install's finder (-S), for which the whole source folder is part of vtensor.
check_layers() {
  PYTHONPATH=$($PYTHON -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    $PYTHON -S -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())'
}
check_stub_and_rules() {
  pytest -q tests/python/test_{stubs,architecture}.py
}
slow_tests() {
  export VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so VTENSOR_TESTS=thorough
  pytest -n 2 --dist worksteal -m "slow or thorough" --ignore tests/gpu --ignore tests/vllm tests # as in test.sh
}
# The general suites again with the default options: look-ahead and reuse. Python fills what it frees, so that a use of
# it shows.
default_pools() {
  local general=(tests/python/test_{tensor,sharing,torch_safety,kv_cache,kv_swaps,cache_layers,threads,regressions,refusals,modes}.py)
  export PYTHONMALLOC=debug
  VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so VTENSOR_POOLS=default pytest -q -n 2 --dist worksteal "${general[@]}"
}

# NVIDIA's cuda.h is needed for this alone, so it stays out of the environment: each release is downloaded once.
check_cuda_abi() {
  local headers=build/cuda-headers release header
  for release in nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-runtime==13.0.96 nvidia-cuda-runtime==13.5.37; do
    compgen -G "$headers/$release/nvidia/*/include/cuda.h" >/dev/null ||
      $PYTHON -m pip install -q --no-deps --upgrade --target "$headers/$release" "$release" ||
      echo "skipped: $release could not be downloaded"
  done
  for header in $headers/*/nvidia/*/include/cuda.h $VENV/lib/python3*/site-packages/nvidia/*/include/cuda.h \
    /usr/local/cuda/include/cuda.h; do
    [ -e "$header" ] || continue
    "${CXX:-c++}" -std=c++20 -fsyntax-only -I csrc -I tests -isystem "$(dirname "$header")" tests/cuda_abi/equal.cpp || return
    echo "equal to $header"
  done
}

check_tidy() {
  cmake --preset debug --log-level=WARNING -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null # for its compile commands
  git ls-files -co --exclude-standard 'csrc/base/*.cpp' 'csrc/driver/*.cpp' 'csrc/vmm/*.cpp' 'csrc/policy/*.cpp' 'csrc/tensor/*.cpp' 'csrc/arena/*.cpp' 'csrc/heap/*.cpp' 'csrc/kv/*.cpp' |
    xargs -P "$JOBS" -n 4 clang-tidy --quiet -p build/debug
}

# Checks the analysis of vmm/pool_lock.h itself: clang-tidy must fail if a lock is missing.
check_lock_analysis() {
  { clang-tidy --quiet tests/thread_safety/unlocked.cpp -- -std=c++20 -I csrc 2>&1 || true; } |
    grep "requires holding lock 'pool_lock'"
}

# cpp_tests PRESET: configures, builds and runs the C++ tests under one sanitizer.
cpp_tests() {
  cmake --preset "$1" --log-level=WARNING
  cmake --build --preset "$1"
  # ThreadSanitizer of GCC 12 cannot place its shadow where the kernel randomises addresses widely.
  local fixed_addresses=(setarch "$(uname -m)" -R)
  "${fixed_addresses[@]}" true 2>/dev/null || fixed_addresses=()
  "${fixed_addresses[@]}" ctest --preset "$1" -j "$JOBS"
}

step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "mypy" mypy
step "import-linter" check_layers
step "clang-format" check_cpp_format
scripts/docs.sh
step "Golden stub and include rules" check_stub_and_rules
step "Slow Python tests" slow_tests
step "Python tests with default pools" default_pools
step "libcuda as cuda.h declares it" check_cuda_abi
step "C++ tests under ASan and UBSan" cpp_tests asan-ubsan
step "C++ tests under TSan" cpp_tests tsan
step "clang-tidy" check_tidy
step "clang-tidy sees a lock that is not taken" check_lock_analysis
