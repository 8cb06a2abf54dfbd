#!/usr/bin/env bash
# docs.sh: builds the documentation into build/site; a warning is an error.
source "$(dirname "$0")/lib.sh"

# NO_MKDOCS_2_WARNING silences a notice of the theme.
step "Documentation" env NO_MKDOCS_2_WARNING=1 $PYTHON -m mkdocs build
