#!/usr/bin/env bash
# old_glibc.sh ARCHITECTURE FOLDER: puts into FOLDER what it takes to link C++ for glibc 2.28 with the GCC of a newer one:
# that C library's symbols, as zig writes them, and old_glibc.o for libstdc++. FOLDER/flags.sh sets CC, CXX, CXXFLAGS and
# LDFLAGS. Installs zig under build/zig. The compiler is $CXX, or Debian's cross compiler for ARCHITECTURE.
source "$(dirname "$0")/lib.sh"

[ $# -eq 2 ] || die "usage: old_glibc.sh x86_64|aarch64 FOLDER"
architecture=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
prefix=""
if [ "$architecture" != "$(uname -m)" ]; then prefix=$architecture-linux-gnu-; fi
cc=$prefix${CC:-gcc} cxx=$prefix${CXX:-g++}
command -v "$cxx" >/dev/null || die "no $cxx: install it (Debian, Ubuntu: apt-get install g++-${architecture/_/-}-linux-gnu)"

zig=build/zig/bin/python
if [ ! -x $zig ]; then
  python3 -m venv build/zig
  $zig -m pip install -q ziglang==0.17.1
fi
# zig leaves its symbol libraries in its cache.
echo 'int main(void) { return 0; }' >"$folder/empty.c"
ZIG_GLOBAL_CACHE_DIR=$folder/zig ZIG_LOCAL_CACHE_DIR=$folder/zig \
  $zig -m ziglang cc -target "$architecture-linux-gnu.2.28" "$folder/empty.c" -lm -lpthread -ldl -lrt -o "$folder/empty"
find "$folder/zig" \( -name 'lib*.so.*' -o -name libc_nonshared.a \) -exec cp {} "$folder" \;
for library in m pthread dl rt; do
  ln -sf "$(basename "$folder/lib$library.so".*)" "$folder/lib$library.so"
done
echo "GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( libld.so.2 ) )" >"$folder/libc.so"
"$cxx" -c -O2 -fPIC -o "$folder/old_glibc.o" scripts/old_glibc/old_glibc.cpp
cat >"$folder/flags.sh" <<END
export CC=$cc CXX=$cxx CXXFLAGS="-include $PWD/scripts/old_glibc/old_glibc.h"
export LDFLAGS="-static-libstdc++ -L$folder $folder/old_glibc.o"
END
