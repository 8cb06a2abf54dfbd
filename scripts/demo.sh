#!/usr/bin/env bash
# demo.sh [ARGUMENTS]: continues a text with each of Hugging Face's caches and with VTensorCache.
source "$(dirname "$0")/lib.sh"

step "Demo" $PYTHON -m vtensor demo "$@"
