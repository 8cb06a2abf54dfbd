"""Baselines in C, compiled when they are first needed with the system's compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..harness import Skipped


def load_bare_mmap() -> Callable[[int, int, int], float]:
    """``bare_mmap(calls, bytes, stride)`` of bare_mmap.c. Raises Skipped where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Skipped("no C compiler for the bare loop: install one, or name it with CC=")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bare_mmap.so"
        source = Path(__file__).parent / "bare_mmap.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        function = ctypes.CDLL(str(library)).bare_mmap
    function.argtypes = [ctypes.c_size_t] * 3
    function.restype = ctypes.c_double

    def call(calls: int, size: int, stride: int) -> float:
        seconds = function(calls, size, stride)
        if seconds < 0:
            raise OSError(f"bare loop: one of {calls} mmap calls was refused")
        return seconds

    return call
