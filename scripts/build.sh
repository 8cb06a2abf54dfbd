#!/usr/bin/env bash
# build.sh: brings the installed extension and the simulated libcuda up to date with the sources.
source "$(dirname "$0")/lib.sh"

extension() {
  $PYTHON -m pip install -q --no-build-isolation --no-deps -e .
  # integrations/ is installed one folder deeper than it is, so scikit-build-core puts the folder of the
  # checkout on the import path too, with all else in it.
  find $VENV/lib -name '*editable*.pth' -exec sed -i "\\#^$(dirname "$PWD")\$#d" {} +
}
simulated_libcuda() {
  cmake --preset simcuda --log-level=WARNING
  cmake --build --preset simcuda
}

step "Extension" extension
step "Simulated libcuda" simulated_libcuda
