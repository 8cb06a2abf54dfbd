"""Pools for the questions, and leases."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import vtensor
from vtensor import testing

from .session import Session

LOOK_AHEAD = 1 << 30  # bytes a tensor: a page of each row, of as many as a question has


def open_pool(session: Session, page_size: int, budget: int, look_ahead: bool = False) -> vtensor.Pool:
    """A pool on the GPU, or over the simulated libcuda."""
    ahead = LOOK_AHEAD if look_ahead else 0
    if session.rehearsal:
        library = os.environ["VTENSOR_SIMCUDA"]
        return testing.simulated_cuda_pool(library, page_size=page_size, budget=budget, prefetch=ahead)
    return vtensor.Pool("cuda", page_size=page_size, budget=budget, prefetch=ahead)


def lease(tensors: Sequence[vtensor.VTensor]) -> contextlib.AbstractContextManager[Any]:
    """Around launches over `tensors`, which may be none."""
    return vtensor.lease(*tensors) if tensors else contextlib.nullcontext()
