# Shared by the scripts beside it: sourced, never run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PYTHON=$VENV/bin/python
JOBS=${JOBS:-$(nproc)}
export CMAKE_BUILD_PARALLEL_LEVEL=$JOBS
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Python compiles each module when it is first imported: far fewer than pip would compile.
export PIP_COMPILE=0
# The tests start some hundred processes: each would compile vtensor anew, and each of pytest's rewrite all assertions.
unset PYTHONDONTWRITEBYTECODE
# cmake, ninja and the checkers come from the environment, not from the system.
if [ -d $VENV/bin ]; then PATH=$PWD/$VENV/bin:$PATH; fi

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step TITLE COMMAND...: runs the command under a heading and says how long it took. A function ends at the first
# of its commands that fails: beside `||` it would go on.
step() {
  local title=$1 start=$SECONDS status
  shift
  printf '\n== %s\n' "$title"
  set +e
  (set -e; "$@")
  status=$?
  set -e
  [ "$status" -eq 0 ] || die "'$title' failed: $*"
  printf -- '-- %s: %d s\n' "$title" $((SECONDS - start))
}

# build_aside FOLDER FLAGS: one build of the extension and the C++ tests, with these flags, in the folder. Its
# environment/ lies over .venv: its packages come first.
build_aside() {
  local environment=$PWD/$1/environment packages
  rm -rf "$environment"
  $PYTHON -m venv --without-pip "$environment"
  packages=$(echo "$environment"/lib/python3*/site-packages)
  echo "$PWD"/$VENV/lib/python3*/site-packages >"$packages/under.pth"
  "$environment/bin/python" -m pip install -q --no-build-isolation --no-deps -e . -C build-dir="$1" \
    -C cmake.build-type=Debug -C cmake.define.VTENSOR_BUILD_TESTS=ON -C cmake.define.CMAKE_CXX_FLAGS="$2"
  sed -i "\\#^$(dirname "$PWD")\$#d" "$packages"/*editable*.pth # see build.sh
}

# oldest PACKAGE: the version after >= in pyproject.toml.
oldest() {
  sed -n "s/.*\"$1>=\([0-9.]*\).*/\1/p" pyproject.toml | head -n 1
}

# The README's first program: its first two examples.
first_program() {
  awk '/^```/ {inside = /python/; n += inside; next} inside && n <= 2' README.md
}
