"""Baselines in C and C++, compiled when they are first needed with the system's compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..harness import Skipped

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def load_bare_mmap(populate: bool = False) -> Callable[[int, int, int], float]:
    """``bare_mmap(calls, bytes, stride)`` of bare_mmap.c. Raises Skipped where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Skipped("no C compiler for the bare loop: install one, or name it with CC=")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bare_mmap.so"
        source = HERE / "bare_mmap.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        function = ctypes.CDLL(str(library)).bare_mmap
    function.argtypes = [ctypes.c_size_t] * 3 + [ctypes.c_int]
    function.restype = ctypes.c_double

    def call(calls: int, size: int, stride: int) -> float:
        seconds = function(calls, size, stride, populate)
        if seconds < 0:
            raise OSError(f"bare loop: one of {calls} mmap calls was refused")
        return seconds

    return call


def load_heap() -> ctypes.CDLL:
    """The functions of heap.c. Raises Skipped where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Skipped("no C compiler for calls of the heap: install one, or name it with CC=")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "heap.so"
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "heap.c")], check=True
        )
        loaded = ctypes.CDLL(str(library))
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    for name, arguments in {
        "allocate_and_free": [pointer, pointer, size, size],
        "allocate_once": [pointer, size, ctypes.POINTER(pointer)],
        "bare_stitch": [size, size],
    }.items():
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = arguments, ctypes.c_double
    return loaded


def build_trace_points(library: Path) -> None:
    """Makes a library of trace_points.cpp. Raises Skipped where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise Skipped("no C++ compiler for the trace's points: install one, or name it with CXX=")
    sources = [HERE / "trace_points.cpp", CSRC / "base" / "trace.cpp", CSRC / "base" / "process.cpp"]
    options = ["-std=c++20", "-O3", "-shared", "-fPIC", f"-I{CSRC}", "-o", str(library)]
    subprocess.run([compiler, *options, *map(str, sources)], check=True)
