"""Finds memory that a piece of code has not given back."""

from __future__ import annotations

import fcntl
import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vtensor import pool as _pool
from vtensor._base.arguments import has_memory, of_type
from vtensor._base.processes import STORAGE_METHODS
from vtensor.pool import Pool, open_pools
from vtensor.tensor import VTensor

_WHAT = ("tensors", "pages_active", "pages_pinned", "nbytes_reserved")
_SECONDS = 10.0
_MOST_VIEWS = 8
_MEMORY = "/memfd:vtensor (deleted)"  # of a host pool


class Look:
    """The counts of pools at one moment, to compare with later counts. Without ``pools``, of all of the
    process, including those made later."""

    def __init__(self, *pools: Pool) -> None:
        _pool.notes_makers = True
        self._asked = [of_type("assert_no_leaks", "a pool", pool, Pool) for pool in pools]
        self._before = {pool: _counts(pool) for pool in self._pools()}
        self._mapped_before = {
            id(owner): (weakref.ref(owner), nbytes)
            for pool in self._pools()
            for owner, _, nbytes in _open_objects(pool)
        }
        self._files_before = _files()

    def _pools(self) -> list[Pool]:
        return self._asked or open_pools()

    def leaks(self) -> list[str]:
        """A description of each leak since the beginning; empty if there is none."""
        if self._found():
            gc.collect()  # garbage may hold the rest
        return self._found()

    def _found(self) -> list[str]:
        found = []
        for pool in self._pools():
            more = _counts(pool) - self._before.get(pool, Counter())
            if more:
                counts = ", ".join(f"{count:,} {what}" for what, count in more.items())
                held = "".join(f"\n  {line}" for line in self._holders(pool, "pages_pinned" in more))
                found.append(f"{pool!r} has {counts} more than before{held}")
        gone = _files() - self._files_before - sum(pool not in self._before for pool in self._pools())
        if not self._asked and not found and gone > 0:
            held = "".join(f"\n  {line}" for line in _views())
            found.append(f"views hold pages of {gone} pools that are gone{held}")
        return found

    def _holders(self, pool: Pool, views: bool) -> list[str]:
        """A line for each object that has more than before, and for views."""
        lines = []
        for owner, name, nbytes in _open_objects(pool):
            known, before = self._mapped_before.get(id(owner), (lambda: None, -1))
            if known() is not owner or nbytes > before:
                made = f", made at {owner._made_at}" if owner._made_at else ""
                lines.append(f"{name}, {nbytes:,} bytes mapped{made}")
        return lines + (_views() if views else [])


@contextmanager
def assert_no_leaks(*pools: Pool) -> Iterator[None]:
    """Asserts that the ``with`` gives back the memory that it takes (I14).

    At its end there must be no more open tensors, active or pinned pages and reserved addresses
    than at its beginning. The check trims the pools, waits for the mapper, and collects garbage if something
    is left. If the ``with`` raises, nothing is asserted, because the traceback keeps the variables of its
    frames alive.

    Args:
        pools: the pools to check. Defaults to all of the process. Name them if other threads use other pools
            at the same time. An open pool with nothing in it is no leak.

    Raises:
        AssertionError: if something is left. The message names each object that has more than before, and
            the line that made it.
        InvalidArgument: if one of ``pools`` is no pool.
        DriverError: if pages could not be unmapped.
        TimedOut: if work on the device still uses them after 10 s.
    """
    look = Look(*pools)
    yield
    left = look.leaks()
    if left:
        raise AssertionError(
            "[assert_no_leaks] memory is left: close() what has it, or drop tensors and views\n"
            + "\n".join(left)
        )


def _counts(pool: Pool) -> Counter[str]:
    if pool.broken is None:  # a broken one gives nothing back before its end
        pool.trim()
        pool.wait_idle(_SECONDS)
    stats = pool.stats()
    return Counter({what: getattr(stats, what) for what in _WHAT})


def _open_objects(pool: Pool) -> list[tuple[Any, str, int]]:
    """Each open object with memory of the pool, its name, bytes mapped."""
    found: list[tuple[Any, str, int]] = []
    owners: Iterator[Any] = pool._each_tensor()
    for t in owners:
        if t.closed:
            continue
        if isinstance(t, VTensor):
            found.append((t, f"VTensor {tuple(t.shape)} at {t.address:#x}", t.nbytes_mapped))
        else:
            found.append((t, f"{t!r}", t.stats().nbytes_mapped))
    for tag, heap in pool._each_heap():
        counts = heap.core.counts()
        if counts.allocations:
            found.append((heap, f"{counts.allocations} allocations with tag {tag!r}", counts.allocated))
    return found


def _views() -> list[str]:
    """The plain tensors over memory of vtensor's, with their sizes."""
    views = [
        f"a view {tuple(t.shape)} of {t.dtype} at {t.data_ptr():#x}"
        for t in gc.get_objects()
        if type(t) is torch.Tensor and has_memory(t) and t.numel()
        if STORAGE_METHODS.keys() <= vars(t.untyped_storage()).keys()
    ]
    return views[:_MOST_VIEWS] + (
        [f"and {len(views) - _MOST_VIEWS} others"] if len(views) > _MOST_VIEWS else []
    )


def _files() -> int:
    """The number of host pools with memory. Each has a memfd, which outlives the pool while views hold
    pages. It alone can be written to: readers, and tensors on their way to them, have copies to read."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") == _MEMORY:
                count += fcntl.fcntl(int(descriptor), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        except OSError:  # the descriptor of the listing itself
            pass
    return count
