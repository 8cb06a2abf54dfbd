#!/usr/bin/env bash
# stubs.sh: writes vtensor/_core.pyi, the golden description of the extension, from the built extension.
source "$(dirname "$0")/lib.sh"

$PYTHON -m nanobind.stubgen -q -m vtensor._core -o vtensor/_core.pyi
