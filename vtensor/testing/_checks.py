"""Refused driver calls, and whether a pool's own tables agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vtensor._arguments import integer, of_type
from vtensor.errors import InvalidArgument, VTensorError
from vtensor.pool import Pool


@contextmanager
def fail_after(pool: Pool, skip: int, refuse: int = 1) -> Iterator[None]:
    """Failure injection: lets ``skip`` driver calls of ``pool`` through, then has the next ``refuse`` refused
    without being made. What the operation does then has to be a :class:`~vtensor.DriverError` that changed
    nothing (I8), unless the call was a mere question, such as ``cuStreamGetCtx``; the mapper's calls count
    too, so make the pool with ``prefetch=0`` to meet your own.

    Raises:
        Closed: the pool is closed.
        InvalidArgument: a number that no number of calls can be.
    """
    core = of_type("fail_after", "pool", pool, Pool)._open_core("fail_after")
    skip, refuse = integer("fail_after", "skip", skip), integer("fail_after", "refuse", refuse)
    if not 0 <= skip < 2**64 or not 0 <= refuse < 2**64:
        raise InvalidArgument(
            f"[fail_after] skip is {skip}, refuse {refuse}: each must be a number of calls, from 0"
        )
    core.fail_after(skip, refuse)
    try:
        yield
    finally:
        core.disarm()


def check_invariants(pool: Pool) -> None:
    """Looks whether the page tables, counts and lists of ``pool`` agree (I3 to I6).

    Raises:
        AssertionError: they contradict one another, which is a bug of vtensor: please report it.
        InvalidArgument: it is no pool.
    """
    of_type("check_invariants", "pool", pool, Pool)
    try:
        pool._core.check_invariants()
    except VTensorError as error:
        raise AssertionError(str(error)) from None
