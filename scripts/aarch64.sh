#!/usr/bin/env bash
# aarch64.sh [TARGET...|WHEEL]: cross-compiles C++ tests for aarch64 and runs them under QEMU: the conformance suite by
# default, or the programs named, as test_fences; `all` for all. With a WHEEL of Python 3.12 and later it runs
# `python -m vtensor info` and the README's first program, in a Debian 13 for aarch64 (as root; torch's import alone takes
# minutes). Needs Debian's g++-aarch64-linux-gnu, qemu-user and doctest-dev, or qemu-user and debootstrap.
source "$(dirname "$0")/lib.sh"

[ $# -gt 0 ] || set -- conformance
root=$PWD/build/aarch64-debian

build() {
  cmake -S . -B build/aarch64 -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-g0 -O1" \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" -DDOCTEST_INCLUDE_DIR=/usr/include \
    -DVTENSOR_BUILD_PYTHON=OFF -DVTENSOR_BUILD_TESTS=ON
  cmake --build build/aarch64 --target "$@"
}
run() {
  local programs
  programs=$([ "$1" = all ] || (IFS='|' && echo "^($*)$"))
  ctest --test-dir build/aarch64 -j "$JOBS" --output-on-failure --no-tests=error ${programs:+-R "$programs"}
}

# Unpacked, not configured: nothing of it has to run.
unpack_debian() {
  local package
  rm -rf "$root"
  debootstrap --foreign --variant=minbase --arch=arm64 --include=python3,libstdc++6,libgomp1 trixie "$root" | tail -n 1
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
}
# pip decides by this machine what torch needs, so that is named. The oldest torch has no CUDA on aarch64.
install_wheel() {
  local platform=${1##*-}
  python3 -m pip install -q --no-deps --only-binary :all: --python-version 3.13 --target "$root/packages" \
    --platform "${platform%.whl}" --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 "$1" numpy \
    "torch==$(oldest torch)" filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing_extensions
}
try_wheel() {
  local python=(qemu-aarch64 -L "$root" -E "PYTHONPATH=$root/packages" "$root/usr/bin/python3.13" -P)
  first_program >"$root/first.py"
  "${python[@]}" -m vtensor info
  "${python[@]}" "$root/first.py"
}

if [[ $1 == *.whl ]]; then
  step "Debian 13 for aarch64" unpack_debian
  step "$(basename "$1")" install_wheel "$1"
  step "Under QEMU" try_wheel
  exit
fi
step "Build for aarch64" build "$@"
step "Under QEMU" run "$@"
