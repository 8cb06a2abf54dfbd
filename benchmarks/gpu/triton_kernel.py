"""A Triton kernel: only to be imported where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_one(source, offset, out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(source + offset))
