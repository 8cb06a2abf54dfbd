#!/usr/bin/env bash
# format.sh: rewrites C++ and Python sources in the house format.
source "$(dirname "$0")/lib.sh"

git ls-files -co --exclude-standard '*.cpp' '*.h' | xargs clang-format -i
ruff format -q .
ruff check -q --fix .
