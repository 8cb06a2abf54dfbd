#!/usr/bin/env bash
# demo.sh [ARGUMENTS]: the demo, with its picture under build/; see `python -m vtensor demo --help`.
source "$(dirname "$0")/lib.sh"

exec $PYTHON -m vtensor demo --picture build/demo.png "$@"
