"""Finds memory that a piece of code has not given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vtensor import pool as _pool
from vtensor._arguments import of_type
from vtensor.kv import KVCache
from vtensor.pool import Pool
from vtensor.tensor import VTensor

_WHAT = ("tensors", "pages_active", "pages_pinned", "pages_quarantined", "nbytes_reserved")
_SECONDS = 10.0


class Look:
    """The counts of pools at one moment, to compare with later counts.

    Args:
        pools: the pools. Defaults to all of the process, including those made later.
    """

    def __init__(self, *pools: Pool) -> None:
        self._asked = [of_type("assert_no_leaks", "a pool", pool, Pool) for pool in pools]
        self._before = {pool: _counts(pool) for pool in self._pools()}
        self._files_before = _files()

    def _pools(self) -> list[Pool]:
        with _pool._sets_lock:
            return list(self._asked or _pool._pools)

    def leaks(self) -> list[str]:
        """A description of each leak since the beginning; empty if there is none."""
        if self._found():
            gc.collect()  # garbage may hold the rest
        return self._found()

    def _found(self) -> list[str]:
        found = []
        for pool in self._pools():
            before, now = self._before.get(pool, {}), _counts(pool)
            more = {what: now[what] - before.get(what, 0) for what in _WHAT}
            if any(count > 0 for count in more.values()):
                counts = ", ".join(f"{count:,} {what}" for what, count in more.items() if count > 0)
                found.append(f"{pool!r} has {counts} more than before{_named(pool)}")
        gone = _files() - self._files_before - sum(pool not in self._before for pool in self._pools())
        if not self._asked and not found and gone > 0:
            found.append(f"views hold pages of {gone} pools that are gone")
        return found


@contextmanager
def assert_no_leaks(*pools: Pool) -> Iterator[None]:
    """Asserts that the ``with`` gives back the memory that it takes (I14).

    At its end there must be no more open tensors, active, pinned or quarantined pages and reserved addresses
    than at its beginning. The check trims the pools, waits for the mapper, and collects garbage if something
    is left. If the ``with`` raises, nothing is asserted, because the traceback keeps the variables of its
    frames alive.

    Args:
        pools: the pools to check. Defaults to all of the process. Name them if other threads use other pools
            at the same time. An open pool with nothing in it is no leak.

    Raises:
        AssertionError: if something is left. The message says what, and in which tensors.
        InvalidArgument: if one of ``pools`` is no pool.
        DriverError: if pages could not be unmapped.
        TimedOut: if work on the device still uses them after 10 s.
    """
    look = Look(*pools)
    yield
    left = look.leaks()
    if left:
        raise AssertionError(f"[assert_no_leaks] {'; '.join(left)}: close() them, or drop tensors and views")


def _counts(pool: Pool) -> dict[str, int]:
    pool.trim()
    pool.wait_idle(_SECONDS)
    stats = pool.stats()
    return {what: getattr(stats, what) for what in _WHAT}


def _named(pool: Pool) -> str:
    open_tensors: list[Any] = [entry._tensor() for entry in list(pool._tensors)]
    named = [
        f"{tuple(t.shape)} at {t.address:#x}" if isinstance(t, VTensor) else repr(t)
        for t in open_tensors
        if isinstance(t, (KVCache, VTensor)) and not t.closed
    ]
    return f" (its open tensors: {', '.join(named)})" if named else ""


def _files() -> int:
    """The number of host pools with memory. Each has a memfd, which outlives the pool while views hold
    pages."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:vtensor")
        except OSError:  # the descriptor of the listing itself
            pass
    return count
