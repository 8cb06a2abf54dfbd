"""One flat range of addresses whose pages are mapped in any order: memory for engines with block tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from vtensor import _core
from vtensor._base.arguments import MOST, integer, of_type, require_tables, tag_of
from vtensor._base.notebook import Drawn
from vtensor._base.processes import Closes
from vtensor._base.streams import Stream, stream_handle
from vtensor._base.torch_modes import whole_storage
from vtensor.errors import Closed
from vtensor.pool import Pool, default_pool

__all__ = ["Arena", "ArenaStats"]

# Its methods are called by the class, as those of a tensor's core: see tensor.py.
ArenaCore = _core.ArenaCore

_PER_ZERO_PAGE = 24  # bytes of tables for each page of addresses, while it is filled

Interval = tuple[int, int]


@dataclass(frozen=True)
class ArenaStats:
    """Counts of an arena at one moment.

    Attributes:
        nbytes_reserved: bytes of addresses; they cost no memory.
        nbytes_mapped: bytes of mapped pages: active, prefetched, cached and pinned ones.
        page_size: bytes of one page.
        pages_active: pages that a block needs.
        pages_prefetched: pages mapped by :meth:`Arena.prepare` that no block has needed yet.
        pages_cached: pages that no block needs any more, left mapped until others need their memory.
        pages_pinned: pages that go once the work launched before has passed.
        pages_evicted: cached pages that the arena has given up because others needed their memory.
    """

    nbytes_reserved: int
    nbytes_mapped: int
    page_size: int = field(repr=False)
    pages_active: int
    pages_prefetched: int
    pages_cached: int
    pages_pinned: int
    pages_evicted: int = field(repr=False)


class Arena(Closes, Drawn):
    """One flat reserved range as one plain tensor; blocks of bytes in it are mapped in any order.

    :attr:`tensor` never moves, and may cover more bytes than there is memory. :meth:`map` gives blocks their
    pages, :meth:`unmap` takes them. A page is mapped as long as one block needs it, so blocks may share pages
    and need not begin at page borders. A page that no block needs any more stays mapped, cached, until the
    pool needs its memory. So blocks that come and go make no driver call.

    A write to an unmapped page ends the process. On the CPU such a page reads as zeros. On CUDA a kernel that
    reads it faults, unless ``zeros`` is given.

    Methods take ``intervals`` as :meth:`map` does. For bytes that are not in the arena they raise
    ``InvalidArgument``, and once it is closed ``Closed``; nothing was changed then.

    Args:
        nbytes: bytes of the range. The addresses behind it are rounded up to pages.
        pool: the pool of the pages; the default pool of the CPU unless given.
        zeros: CUDA: maps one read-only page of zeros wherever no other page is mapped, which costs calls when
            pages come and go.
        tag: the name by which :meth:`Pool.sleep` puts it to sleep.

    Raises:
        InvalidArgument: ``nbytes`` is not positive.
        CapacityExceeded: more addresses than a process has, or tables larger than the machine's free memory.
        Closed: the pool is closed.
    """

    _made_at: str

    def __init__(
        self, nbytes: int, *, pool: Pool | None = None, zeros: bool = False, tag: str = "kv"
    ) -> None:
        nbytes = integer("Arena", "nbytes", nbytes, 1)
        self._sleeps_as = tag_of("Arena", tag)
        self._pool = default_pool() if pool is None else of_type("Arena", "pool", pool, Pool)
        if zeros:
            pages = nbytes // self._pool.page_size
            require_tables("Arena", f"nbytes {nbytes} with zeros=True", pages * _PER_ZERO_PAGE)
        self._core = ArenaCore(self._pool._open_core("Arena"), min(nbytes, MOST), bool(zeros))
        self.nbytes = nbytes
        """Bytes of the range."""
        self._tensor: torch.Tensor | None = whole_storage(ArenaCore.storage(self._core))
        self._pool._register(self)

    @property
    def tensor(self) -> torch.Tensor:
        """The range as a ``uint8`` tensor ``[nbytes]``. Its views keep the addresses, and no page.

        Raises:
            Closed: the arena is closed.
        """
        _core.refuse_in_forked_child("Arena.tensor")
        if self.closed or self._tensor is None:
            raise Closed("[Arena.tensor] the arena is closed: make a new one")
        return self._tensor

    def map(self, intervals: Iterable[Interval]) -> list[bool]:
        """Maps the pages of blocks, in one batch of driver calls, or none if they are mapped.

        A page that was not mapped shows zeros, or what this arena once wrote.

        Args:
            intervals: blocks as pairs of bytes: from and up to. A block may be mapped several times, and
                needs its pages until it is unmapped as often.

        Returns:
            For each block, whether all its pages stayed mapped. If they did, and the block shares no page,
            it has the contents that it had when it was last unmapped. (A shared page may have gone and come
            back for another block; :class:`Blocks` knows that too.)

        Raises:
            OutOfPages: if memory is short, even after others gave up what they keep for later. Nothing was
                changed.
            DriverError: if the driver refuses a call. Nothing was changed.
        """
        return ArenaCore.map(self._core, intervals)

    def unmap(self, intervals: Iterable[Interval], stream: Stream | None = None) -> None:
        """Undoes one :meth:`map` of each of these blocks.

        A page goes only after the work launched so far in the streams that used it.

        Args:
            stream: the stream of the work that uses the blocks; the current one unless given.

        Raises:
            InvalidArgument: a page would be unmapped more often than it was mapped; nothing was changed then.
        """
        ArenaCore.unmap(self._core, intervals, stream_handle("Arena.unmap", stream))

    def prepare(self, intervals: Iterable[Interval]) -> None:
        """Has the pool's mapper map the pages of blocks that are needed soon. Returns at once.

        Prepared pages that no block needs yet go if memory is short. The next :meth:`map`, :meth:`prepare` or
        :meth:`Pool.wait_idle` raises the mapper's error, if there was one.
        """
        ArenaCore.prepare(self._core, intervals)

    def holds(self, intervals: Iterable[Interval]) -> list[bool]:
        """For each block, what :meth:`map` would return: whether all its pages stayed mapped. Maps nothing,
        and does not keep the pages mapped. False while the arena sleeps."""
        return ArenaCore.holds(self._core, intervals)

    def trim(self, intervals: Iterable[Interval] | None = None) -> int:
        """Gives back the pages that no block needs.

        Args:
            intervals: only those of these blocks; all unless given.

        Returns:
            The bytes of these pages. They go once the work that used them has passed.

        Raises:
            DriverError: pages of an operation that was refused cannot be unmapped.
        """
        return ArenaCore.trim(self._core, intervals) * self._pool.page_size

    def record_stream(self, stream: Stream | None = None) -> None:
        """Notes that work in ``stream`` (the current one unless given) uses the arena: pages go after it."""
        ArenaCore.record_stream(self._core, stream_handle("Arena.record_stream", stream))

    def stats(self) -> ArenaStats:
        """Counts of this moment."""
        counts = ArenaCore.counts(self._core)
        size = self._pool.page_size
        return ArenaStats(
            nbytes_reserved=counts.reserved_pages * size,
            nbytes_mapped=counts.mapped * size,
            page_size=size,
            pages_active=counts.active,
            pages_prefetched=counts.prefetched,
            pages_cached=counts.cached,
            pages_pinned=counts.pinned,
            pages_evicted=counts.evicted,
        )

    def pages(self) -> list[_core.PageRecord]:
        """The mapped pages, by their index."""
        return ArenaCore.pages(self._core)

    @property
    def pool(self) -> Pool:
        """The pool of the pages."""
        return self._pool

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._core.closed

    def _fall_asleep(self, sleep: _core.FallAsleep, discard: bool) -> None:
        ArenaCore.fall_asleep(self._core, sleep)

    def _wake(self) -> None:
        """Does nothing: the core knows whether the arena sleeps."""

    def close(self, stream: Stream | None = None) -> None:
        """Gives all pages back, after the work launched so far. The addresses stay while a view of
        :attr:`tensor` lives. A second call does nothing.

        Args:
            stream: the stream of the work that uses the arena; the current one unless given.
        """
        ArenaCore.close(self._core, stream_handle("Arena.close", stream))
        self._tensor = None

    def __repr__(self) -> str:
        if self.closed:
            return f"<vtensor.Arena {self.nbytes:,} bytes closed>"
        if _core.in_forked_child():
            return f"<vtensor.Arena {self.nbytes:,} bytes of another process>"
        mapped = self.stats().nbytes_mapped
        return f"<vtensor.Arena {self.nbytes:,} bytes, {mapped:,} mapped, in {self._pool!r}>"
