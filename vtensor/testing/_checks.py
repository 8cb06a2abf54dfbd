"""Refused driver calls, and whether a pool's own tables agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vtensor.errors import VTensorError
from vtensor.pool import Pool


@contextmanager
def fail_after(pool: Pool, skip: int, refuse: int = 1) -> Iterator[None]:
    """Failure injection: lets ``skip`` driver calls of ``pool`` through, then has the next ``refuse`` refused
    without being made. What the operation does then has to be a :class:`~vtensor.DriverError` that changed
    nothing (I8), unless the call was a mere question, such as ``cuStreamGetCtx``; the mapper's calls count
    too, so make the pool with ``ahead=0`` to meet your own.

    Raises:
        Closed: the pool is closed.
    """
    core = pool._open_core("fail_after")
    core.fail_after(skip, refuse)
    try:
        yield
    finally:
        core.disarm()


def check_invariants(pool: Pool) -> None:
    """Looks whether the page tables, counts and lists of ``pool`` agree (I3 to I6).

    Raises:
        AssertionError: they contradict one another, which is a bug of vtensor: please report it.
    """
    try:
        pool._core.check_invariants()
    except VTensorError as error:
        raise AssertionError(str(error)) from None
