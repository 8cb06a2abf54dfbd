#!/usr/bin/env bash
# venv.sh demo|test|dev: makes .venv and installs what that extra of pyproject.toml needs, pinned by
# constraints.txt. Does nothing where an earlier run did it and neither file has changed since.
source "$(dirname "$0")/lib.sh"

extra=${1:?usage: venv.sh demo|test|dev}
stamp=$VENV/.installed-$extra

is_current() {
  [ -f "$1" ] && [ ! pyproject.toml -nt "$1" ] && [ ! constraints.txt -nt "$1" ]
}
# Each extra holds the ones before it.
case $extra in
  demo) holders="demo test dev" ;;
  test) holders="test dev" ;;
  dev) holders="dev" ;;
  *) die "no extra named '$extra': demo, test or dev" ;;
esac
for holder in $holders; do
  if is_current $VENV/.installed-"$holder"; then exit 0; fi
done

make_venv() {
  local python=${PYTHON3:-python3}
  command -v "$python" >/dev/null ||
    die "no $python: install Python 3.11 or newer, or name one with PYTHON3="
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: constraints.txt needs 3.11 or newer (vtensor itself 3.10);" \
      "name one with PYTHON3="
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments: install its venv module" \
      "(Debian, Ubuntu: apt-get install python3-venv)"
  [ -x $PYTHON ] || "$python" -m venv $VENV
}

find_compiler() {
  command -v "${CXX:-c++}" >/dev/null ||
    die "no C++ compiler: install one that knows C++20, GCC 11 or newer" \
      "(Debian, Ubuntu: apt-get install g++), or name one with CXX="
}

# vtensor builds against the environment it will run in, so the build tools come first.
install_build_tools() {
  $PYTHON -m pip install -q -c constraints.txt \
    scikit-build-core nanobind cmake ninja nvidia-cuda-runtime
}
install_extra() {
  $PYTHON -m pip install --progress-bar off -c constraints.txt --no-build-isolation -e ".[$extra]" |
    grep -E --line-buffered '^(Collecting|Building|Installing|Successfully)' | cut -c1-200
}

find_compiler
step "Virtual environment in $VENV" make_venv
step "Build tools" install_build_tools
step "Dependencies and first build (PyTorch: some hundred MB)" install_extra
touch "$stamp"
