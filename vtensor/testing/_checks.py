"""Refusal of driver calls, and a check that a pool's own tables agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vtensor import _core
from vtensor._base.arguments import integer, of_type
from vtensor.errors import DriverError, VTensorError
from vtensor.pool import Pool


class Refusals:
    """The calls of ``pool`` that :func:`fail_after` has refused; false if there are none."""

    def __init__(self, pool: _core.PagePool) -> None:
        self._core: _core.PagePool | None = pool
        self._calls: dict[str, int] = {}

    @property
    def calls(self) -> dict[str, int]:
        """The number of refusals, by the name of the driver call."""
        return self._calls if self._core is None else self._core.refused_calls()

    def __bool__(self) -> bool:
        return bool(self.calls)

    def __repr__(self) -> str:
        named = ", ".join(f"{name} {count}" for name, count in self.calls.items())
        return f"<vtensor.testing.Refusals {named or 'none'}>"


@contextmanager
def fail_after(pool: Pool, skip: int, refuse: int = 1) -> Iterator[Refusals]:
    """Failure injection: lets ``skip`` driver calls of ``pool`` pass, then refuses the next ``refuse`` calls,
    which are not made.

    The operation must then raise a :class:`~vtensor.DriverError` and change nothing (I8). It raises nothing
    if the call was only a question, such as ``cuStreamGetCtx``, or is tried again later, such as the
    unmapping of pages that were given back. The mapper's calls count too, so make the pool with
    ``prefetch=0`` to refuse your own.

    The ``with`` gives a :class:`Refusals`. It is false if no call was refused, because at most ``skip`` were
    made, whether or not anything was raised.

    Raises:
        Closed: the pool is closed.
        InvalidArgument: ``skip`` or ``refuse`` cannot be a number of calls.
    """
    core = of_type("fail_after", "pool", pool, Pool)._open_core("fail_after")
    skip = integer("fail_after", "skip", skip, 0, 2**64 - 1)
    refuse = integer("fail_after", "refuse", refuse, 0, 2**64 - 1)
    refusals = Refusals(core)
    try:
        core.fail_after(skip, refuse)
        yield refusals
    finally:
        core.disarm()
        refusals._calls, refusals._core = refusals.calls, None


def check_invariants(pool: Pool) -> None:
    """Checks that the page tables, counts and lists of ``pool`` agree (I3 to I6).

    Raises:
        AssertionError: they contradict one another, which is a bug of vtensor: please report it.
        InvalidArgument: it is no pool.
    """
    of_type("check_invariants", "pool", pool, Pool)
    try:
        pool._core.check_invariants()
    except VTensorError as error:
        raise AssertionError(str(error)) from None


def wake_again(pool: Pool, fail: int | None) -> None:
    """Wakes what sleeps in ``pool``. A driver call, refused after ``fail`` others unless that is None, leaves
    all asleep until the next try."""
    check_invariants(pool)
    asleep = pool.stats().nbytes_asleep
    if fail is not None:
        try:
            with fail_after(pool, fail):
                return pool.wake()
        except DriverError:
            check_invariants(pool)
            assert pool.stats().nbytes_asleep >= asleep  # more if the sleep could not give all back
    pool.wake()
