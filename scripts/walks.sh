#!/usr/bin/env bash
# walks.sh: counts the functions in csrc/*/*.cpp that operations pass in their own thread (csrc/DESIGN.md, "Four
# walks"), and names them with -v. Lambdas, constructors and destructors count. Inline functions in headers do not.
source "$(dirname "$0")/lib.sh"

build=build/walks

build() {
  build_aside "$build" "-O0 -g1 -finstrument-functions"
  cc -shared -fPIC -O1 -o $build/walks.so -xc - <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { kMost = 1 << 16 };
static void* seen[kMost];
static long thread;  // 0: none is watched
void walks_begin(void) {
  memset(seen, 0, sizeof seen);
  thread = syscall(SYS_gettid);
}
void walks_end(const char* path) {
  thread = 0;
  FILE* file = fopen(path, "w");
  for (int i = 0; i < kMost; ++i) {
    Dl_info at;
    if (seen[i] != NULL && dladdr(seen[i], &at) != 0)
      fprintf(file, "%s 0x%lx\n", at.dli_fname, (unsigned long)((char*)seen[i] - (char*)at.dli_fbase));
  }
  fclose(file);
}
void __cyg_profile_func_enter(void* function, void* site) {
  if (thread == 0 || thread != syscall(SYS_gettid)) return;
  unsigned at = (unsigned)((unsigned long)function >> 4) % kMost;
  while (seen[at] != NULL && seen[at] != function) at = (at + 1) % kMost;
  seen[at] = function;
}
void __cyg_profile_func_exit(void* function, void* site) {}
END
}

walk() {
  LD_PRELOAD=$build/walks.so $build/environment/bin/python - "$build" "$@" <<'END'
import ctypes, subprocess, sys
import torch, vtensor
build, *verbose = sys.argv[1:]
watch = ctypes.CDLL(f"{build}/walks.so")

def walked(name, operation):
    watch.walks_begin()
    operation()
    watch.walks_end(f"{build}/walk.txt".encode())
    offsets = {}
    for line in open(f"{build}/walk.txt"):
        library, offset = line.split()
        offsets.setdefault(library, []).append(offset)
    passed = set()
    for library, several in offsets.items():
        command = ["addr2line", "-Cfe", library, *several]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        passed |= {(where.split("/csrc/")[1], what) for what, where in zip(told[::2], told[1::2]) if "/csrc/" in where}
    files = {}
    for where, what in sorted(passed):
        if ".cpp" in where:
            files.setdefault(where.split(":")[0], []).append(f"{what.split('(')[0]} ({where})")
    print(f"{name:38} {sum(map(len, files.values())):4} functions in {len(files):2} files")
    if verbose:
        for functions in files.values():
            print("", *functions, sep="\n    ")

for ahead in (True, False):
    pool = vtensor.Pool("cpu", **({} if ahead else {"prefetch": 0}))
    how = "pages ready" if ahead else "pages mapped"
    t = vtensor.empty(0, 64, grow_dim=0, capacity=100_000, pool=pool)
    x = torch.zeros(200, 64)  # of 256 that fill a page
    for _ in range(5):
        t.append(x)
    cache = vtensor.KVCache(2, 2, 64, 4, 4096, torch.float32, pool=pool, lookahead=1024 * ahead)
    slots = [cache.alloc() for _ in range(3)]
    lengths = [256 * (slot in slots) for slot in range(4)]
    assert cache.step(lengths)
    pool.wait_idle()
    walked(f"append over a page's end, {how}", lambda: t.append(x))
    lengths = [2 * length for length in lengths]
    walked(f"step over pages' ends, {how}", lambda: cache.step(lengths))
END
}

step "Instrumented build" build
walk "$@"
