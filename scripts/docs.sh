#!/usr/bin/env bash
# docs.sh [VERSION]: builds the documentation into build/site; a warning is an error. With VERSION 1.2.3 it also commits the
# site to the local branch gh-pages, as version 1.2 and the latest, beside those that are there.
source "$(dirname "$0")/lib.sh"

export NO_MKDOCS_2_WARNING=1 # silences a notice of the theme
add_version() {
  $PYTHON -m pip install -q mike==2.1.3
  $VENV/bin/mike deploy --update-aliases "${1%.*}" latest
  $VENV/bin/mike set-default latest
}

step "Documentation" $PYTHON -m mkdocs build
if [ $# -gt 0 ]; then step "Version ${1%.*} on gh-pages" add_version "$1"; fi
