#!/usr/bin/env bash
# release.sh VERSION [--dry-run|--tag]: builds and checks all that a release consists of, into build/release/VERSION: the
# sdist, the wheels built from that sdist for $ARCHITECTURES (default: this machine's), each tried with one of $PYTHONS,
# SHA256SUMS, a CycloneDX SBOM, and report.md. A dry run, the default, ends there. --tag also tags the commit; pushing
# the tag publishes it (.github/workflows/wheels.yml).
source "$(dirname "$0")/lib.sh"

usage="usage: release.sh VERSION [--dry-run|--tag]"
version=${1:?$usage} mode=${2:---dry-run}
[[ $mode == --dry-run || $mode == --tag ]] || die "$usage"
out=$PWD/build/release/$version
sdist=$out/vtensor-$version.tar.gz
source=$PWD/build/release/source/vtensor-$version # the sdist, unpacked
tools=$PWD/build/release/tools/bin

tagged() {
  git rev-parse -q --verify "v$version^{commit}" >/dev/null
}
check_tree() {
  [ -z "$(git status --porcelain)" ] || die "the tree has changes: commit them first"
  if tagged && [ "$(git rev-parse "v$version^{commit}")" != "$(git rev-parse HEAD)" ]; then
    die "v$version is another commit: give the next version"
  fi
}
check_version() {
  local here
  here=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' vtensor/__init__.py)
  [ "$here" = "$version" ] || die "vtensor/__init__.py says $here, not $version: change __version__ there, its one place"
}
check_changelog() {
  local heading
  heading=$(grep -m 1 '^## ' CHANGELOG.md)
  [[ $heading == "## $version ("* ]] || die "CHANGELOG.md begins with '$heading': begin it with '## $version (date)'"
  if tagged || [ "$mode" = --tag ]; then
    [[ $heading =~ \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$ ]] || die "CHANGELOG.md says '$heading': give the date of the release"
  fi
}
install_tools() {
  python3 -m venv "${tools%/bin}"
  "$tools/python" -m pip install -q -c constraints.txt scikit-build-core build==1.6.1 twine==7.0.0 pydistcheck==0.11.3 \
    abi3audit==0.0.26 "cyclonedx-python-lib[json-validation]==11.12.0"
}
# From a clone: nothing that git does not have gets in.
build_sdist() {
  local clone=$PWD/build/release/clone
  git clone -q --no-hardlinks . "$clone"
  "$tools/python" -m build -q --sdist --no-isolation --skip-dependency-check --outdir "$out" "$clone"
  mkdir -p "${source%/*}"
  tar -xzf "$sdist" -C "${source%/*}"
}
build_wheels() {
  local pythons=(${PYTHONS:-python3})
  "$source/scripts/wheel.sh" "${pythons[@]}"
  cp "$source"/build/wheels/*.whl "$out"
}
check_files() {
  "$tools/twine" check --strict "$out"/*
  "$tools/pydistcheck" --max-allowed-size-compressed 3MB --max-allowed-files 1000 --max-allowed-size-uncompressed 20MB \
    --inspect "$out"/*
  if compgen -G "$out/*-abi3-*.whl" >/dev/null; then
    "$tools/abi3audit" --assume-minimum-abi3 3.12 --strict "$out"/*-abi3-*.whl
  fi
}
write_sbom() {
  "$tools/python" scripts/sbom.py "$version" "$out"/vtensor-* >"$out/vtensor-$version-$(uname -m).cdx.json"
}
write_hashes() {
  (cd "$out" && sha256sum vtensor-* >SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
}
write_report() {
  local file
  {
    echo "vtensor $version, commit $(git rev-parse --short HEAD), $(date -I)"
    printf '\n| file | KiB | tested here |\n| --- | --- | --- |\n'
    for file in "$out"/vtensor-*; do
      echo "| $(basename "$file") | $(($(stat -c %s "$file") / 1024)) | $(tested "${file##*/}") |"
    done
  } >"$out/report.md"
  cat "$out/report.md"
}
# tested NAME: where wheel.sh tried it.
tested() {
  case $1 in
    *.tar.gz) echo "the wheels are built from it" ;;
    *_"$(uname -m)".whl) grep -F "$1" "$source/build/wheels/tried.txt" | cut -f 2 | paste -sd ';' ;;
    *.whl) echo "not on this machine" ;;
    *) echo "valid CycloneDX" ;;
  esac
}

step "Tree" check_tree
step "Version" check_version
step "Changelog" check_changelog
rm -rf build/release
mkdir -p "$out"
step "Tools" install_tools
step "sdist" build_sdist
build_wheels
step "What package indexes ask for" check_files
step "SBOM" write_sbom
step "Hashes" write_hashes
step "Report" write_report
if [ "$mode" = --tag ]; then
  step "Tag" git tag -a "v$version" -m "vtensor $version"
  echo "Push it to publish: git push origin v$version"
fi
