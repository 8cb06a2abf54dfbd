"""Baselines in C and C++, compiled when they are first needed with the system's compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..harness import Skipped

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def compiled(library: Path, compiler: str, *arguments: str) -> None:
    """Makes a shared library. Raises Skipped where there is no compiler."""
    found = shutil.which(compiler)
    if found is None:
        raise Skipped(f"no compiler {compiler} for the bare loops: install one, or name it with CC= and CXX=")
    subprocess.run([found, "-shared", "-fPIC", "-o", str(library), *arguments], check=True)


def load(name: str, **functions: list[Any]) -> ctypes.CDLL:
    """The functions of a C file here, by their arguments; each returns seconds."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{name}.so"
        compiled(library, os.environ.get("CC", "cc"), "-O2", str(HERE / f"{name}.c"))
        loaded = ctypes.CDLL(str(library))
    for function, arguments in functions.items():
        getattr(loaded, function).argtypes, getattr(loaded, function).restype = arguments, ctypes.c_double
    return loaded


def load_bare_mmap(populate: bool = False) -> Callable[[int, int, int], float]:
    """``bare_mmap(calls, bytes, stride)`` of bare_mmap.c."""
    loaded = load("bare_mmap", bare_mmap=[ctypes.c_size_t] * 3 + [ctypes.c_int])

    def call(calls: int, size: int, stride: int) -> float:
        seconds: float = loaded.bare_mmap(calls, size, stride, populate)
        if seconds < 0:
            raise OSError(f"bare loop: one of {calls} mmap calls was refused")
        return seconds

    return call


def load_heap() -> ctypes.CDLL:
    """The functions of heap.c."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    return load(
        "heap",
        allocate_and_free=[pointer, pointer, size, size],
        allocate_once=[pointer, size, ctypes.POINTER(pointer)],
        bare_stitch=[size, size],
    )


def build_trace_points(library: Path) -> None:
    """Makes a library of trace_points.cpp."""
    sources = [HERE / "trace_points.cpp", CSRC / "base" / "trace.cpp", CSRC / "base" / "process.cpp"]
    compiled(library, os.environ.get("CXX", "c++"), "-std=c++20", "-O3", f"-I{CSRC}", *map(str, sources))
