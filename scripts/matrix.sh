#!/usr/bin/env bash
# matrix.sh [torch=VERSION] [transformers=VERSION] [python=COMMAND] [tests=GROUP] [keep=yes] [table=no]
# Builds and tests one combination in an environment of its own, and puts a row into docs/versions.md.
#
# With torch= or python= everything is installed again, the newest of what is not named; torch's CUDA build
# takes 6 GB of disk. With transformers= alone that release is laid over .venv. `oldest` stands for
# the oldest release that pyproject.toml allows. Without any of them, the oldest and the newest transformers
# that the project is tested with are laid over .venv, one after the other.
#
# tests=  all            the default with torch= or python=
#         transformers   the files that import transformers; the default without
#         others         the files that do not
#         core           the files that use most of torch
# keep=yes leaves the environment in build/matrix; table=no prints the row only.
source "$(dirname "$0")/lib.sh"

CORE=(tensor torch_safety operators sharing arena heap adopt sleep kv_cache kv_swaps kv_bands attention_views sdpa
  flash_attention flash_lengths flex_attention state_machine kv_machine serving_engine sleep_served transformers_compile
  transformers_use)
TABLE=docs/versions.md

torch="" transformers="" python="" tests="" keep=no table=yes
for argument in "$@"; do
  case $argument in
    torch=* | transformers=* | python=* | tests=* | keep=* | table=*) declare "${argument%%=*}=${argument#*=}" ;;
    *) die "'$argument' is not known: $(sed -n '2s/^# //p' "$0")" ;;
  esac
done
if [ -z "$torch$transformers$python" ]; then
  "$0" "$@" transformers=oldest
  exec "$0" "$@" "transformers=$(sed -n 's/^transformers==//p' constraints.txt)"
fi
if [ "$torch" = oldest ]; then torch=$(oldest torch); fi
if [ "$transformers" = oldest ]; then transformers=$(oldest transformers); fi

environment=$PWD/build/matrix/${python:+$(basename "$python")-}${torch:+torch-$torch-}transformers-${transformers:-newest}
inside=$environment/bin/python

# Over .venv: packages of this environment come first, and pip takes those of .venv for installed.
lay_over_venv() {
  $PYTHON -m venv "$environment"
  echo "import site; site.addsitedir('$(echo "$PWD"/$VENV/lib/python3*/site-packages)')" \
    >"$(echo "$environment"/lib/python3*/site-packages)/under.pth"
  "$inside" -m pip install -q --no-cache-dir "transformers==$transformers"
}
install_anew() {
  "${python:-python3}" -m venv "$environment"
  "$inside" -m pip install -q --no-cache-dir scikit-build-core nanobind cmake ninja
  "$inside" -m pip install -q --no-cache-dir --no-build-isolation --config-settings="build-dir=$environment/build" \
    "torch${torch:+==$torch}" "transformers${transformers:+==$transformers}" -e ".[test]"
}
prepare() {
  rm -rf "$environment"
  if [ -n "$torch$python" ]; then install_anew; else lay_over_venv; fi
}

all=(tests/python/test_*.py)
mapfile -t with_transformers < <(grep -lE '^(from |import |pytest\.importorskip\(").*transformers' "${all[@]}")
if [ -z "$tests" ]; then if [ -n "$torch$python" ]; then tests=all; else tests=transformers; fi; fi
case $tests in
  all) files=("${all[@]}") ;;
  transformers) files=("${with_transformers[@]}") ;;
  others) mapfile -t files < <(printf '%s\n' "${all[@]}" | grep -vxF "$(printf '%s\n' "${with_transformers[@]}")") ;;
  core) files=("${CORE[@]/#/tests/python/test_}") && files=("${files[@]/%/.py}") ;;
  *) die "no tests named '$tests': all, transformers, others or core" ;;
esac

log=$PWD/build/matrix/$(basename "$environment")-$tests.log
# Two processes, if none of the tests has to run alone.
processes=()
if [ "$tests" = transformers ]; then processes=(-n 2 --dist worksteal); fi
# The row counts failures. A run that ends without its count has no row.
run_tests() {
  VTENSOR_SIMCUDA=$PWD/build/tests/libsimcuda.so \
    "$inside" -P -m pytest -q -p no:cacheprovider "${processes[@]}" "${files[@]}" 2>&1 | tee "$log" || true
  summary >/dev/null
}
# pytest's last line. Threads that end after it may print more.
summary() {
  grep -E '^[0-9]+ (passed|failed|error).* in [0-9.]+s' "$log" | tail -n 1
}
count() {
  summary | { grep -oE "[0-9]+ ($1)" || true; } | awk '{sum += $1} END {print sum + 0}'
}

[ -e build/tests/libsimcuda.so ] || die "no build/tests/libsimcuda.so: run scripts/build.sh first"
if [ "$keep" != yes ]; then trap 'rm -rf "$environment"' EXIT; fi
mkdir -p build/matrix
step "Environment in ${environment#"$PWD"/}" prepare
versions=$("$inside" -P -c '
import platform, torch
from importlib.metadata import version
print(platform.python_version(), torch.__version__, version("transformers"), sep=" | ")')
if [ "$tests" = others ]; then versions="${versions% | *} | –"; fi
begun=$SECONDS
step "Tests: $tests" run_tests
failed=$(count "failed|errors?")
row="| $versions | $tests | $(date -I) | $(count passed) | $failed | $(count skipped) | $((SECONDS - begun)) |"
if [ "$table" = yes ]; then
  rows=$(sed '1,/^| ---/d' $TABLE | grep -vF "| $versions | $tests |" || true)
  sed -i '/^| ---/q' $TABLE
  printf '%s\n' "$rows" "$row" | grep . | sort -t '|' -k 3,3V -k 4,4V -k 2,2V -k 5,5 >>$TABLE
fi
printf '\n%s\n' "$row"
[ "$failed" = 0 ] || die "$failed tests failed, see ${log#"$PWD"/}"
