#!/usr/bin/env bash
# venv.sh demo|test|dev: makes .venv and installs what that extra of pyproject.toml needs, pinned by
# constraints.txt. Does nothing if an earlier run did it and neither file has changed since.
source "$(dirname "$0")/lib.sh"

extra=${1:?usage: venv.sh demo|test|dev}
stamp=$VENV/.installed-$extra

is_current() {
  [ -f "$1" ] && [ ! pyproject.toml -nt "$1" ] && [ ! constraints.txt -nt "$1" ]
}
# Each extra includes the ones before it.
case $extra in
  demo) holders="demo test dev" ;;
  test) holders="test dev" ;;
  dev) holders="dev" ;;
  *) die "no extra named '$extra': demo, test or dev" ;;
esac
for holder in $holders; do
  if is_current $VENV/.installed-"$holder"; then exit 0; fi
done

minimum_python=$(sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)

make_venv() {
  local python=${PYTHON3:-python3}
  command -v "$python" >/dev/null ||
    die "no $python: install Python $minimum_python or newer, or name one with PYTHON3="
  "$python" -c "import sys; sys.exit(sys.version_info < (${minimum_python/./, }))" ||
    die "$("$python" --version) is too old, vtensor needs $minimum_python or newer: name one with PYTHON3="
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
  $PYTHON -m pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
}
install() {
  $PYTHON -m pip install --progress-bar off -c constraints.txt "$@" |
    grep -E --line-buffered '^(Collecting|Building|Installing|Successfully)' | cut -c1-200
}
# Without a GPU the CPU build is as good, and a tenth of the size: it is taken if an index has it.
install_torch() {
  local torch
  torch=$(grep '^torch==' constraints.txt)
  if $PYTHON -m pip freeze | grep -E "^$torch(\+|\$)" >/dev/null; then return; fi
  if [ ! -e /dev/nvidiactl ]; then
    if $PYTHON -m pip install -q --dry-run --no-deps "$torch+cpu" >/dev/null 2>&1; then
      step "PyTorch for CPUs: 0.2 GB to download, 1 GB on disk" install "$torch+cpu"
      return
    fi
    printf '\n%s\n' "Without a GPU, PyTorch for CPUs is enough: 0.2 GB instead of 3. To take it, stop here and set" \
      "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
  fi
  step "PyTorch with CUDA: 3 GB to download, 5 GB on disk" install "$torch"
}

find_compiler
step "Virtual environment in $VENV" make_venv
step "Build tools" install_build_tools
install_torch
step "Dependencies and first build" install --no-build-isolation -e ".[$extra]"
touch "$stamp"
