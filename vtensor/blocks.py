"""An arena cut into the blocks of an engine: held by number while they are in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from vtensor import _core
from vtensor._base.arguments import MOST, integer, items, of_type, require_tables
from vtensor._base.processes import StaysHere
from vtensor._base.streams import Stream, stream_handle
from vtensor.arena import Arena
from vtensor.errors import InvalidArgument

__all__ = ["Blocks"]

BlocksCore = _core.BlocksCore

_PER_BLOCK = 17  # bytes of tables


class Blocks(StaysHere):
    """The blocks of an engine's block table over an :class:`Arena`: a held block has memory.

    An engine holds the blocks that its requests use, and releases those that they leave. A released block
    keeps its pages and contents until others need the memory. Holding it again before that costs no driver
    call, as a prefix cache needs it.

    An engine that plans the next step while one runs calls :meth:`begin_step` when it hands a step to the
    device, and :meth:`end_step` when the results are there. Blocks released in between go after the steps
    that had begun by then.

    Methods take ``numbers`` of blocks, from 0 to ``count - 1``. For others they raise ``InvalidArgument``,
    and once the arena is closed ``Closed``; nothing was changed then.

    Args:
        arena: the arena of the blocks.
        count: number of blocks, numbered from 0.
        parts: where the bytes of block ``b`` are: for each part ``(offset, stride, size)``, ``size`` bytes at
            ``offset + b * stride``. A table with K and V of all layers side by side has one part; a table for
            each layer has as many parts as layers. Parts and blocks may share pages.

    Raises:
        InvalidArgument: blocks without bytes, or with bytes that are not in the arena.
        CapacityExceeded: their tables are larger than the machine's free memory.
    """

    def __init__(self, arena: Arena, count: int, parts: Sequence[tuple[int, int, int]]) -> None:
        of_type("Blocks", "arena", arena, Arena)
        count = integer("Blocks", "count", count)
        wanted = "a sequence of (offset, stride, size), each in bytes"
        given = [
            tuple(integer("Blocks", "parts", end) for end in items("Blocks", "a part", part, wanted))
            for part in items("Blocks", "parts", parts, wanted)
        ]
        wrong = any(len(part) != 3 or min(part) < 0 or max(part) >= MOST for part in given)
        if not 1 <= count < MOST or wrong:
            raise InvalidArgument(
                f"[Blocks] {count} blocks of parts {given[:4]}: give at least one block, and each part as "
                "(offset, stride, size) in bytes"
            )
        if all(offset + (count - 1) * stride + size <= arena.nbytes for offset, stride, size in given):
            require_tables("Blocks", f"count {count}", count * _PER_BLOCK)  # else the core refuses them
        self.arena = arena
        """The arena of the blocks."""
        self._core = BlocksCore(arena._core, count, cast(list[tuple[int, int, int]], given))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def hold(self, numbers: Iterable[int]) -> tuple[list[int], list[int]]:
        """Gives blocks their memory, in one batch of driver calls, or none if all have it. A held block stays
        held.

        Returns:
            ``(kept, lost)``, with each of ``numbers`` once. Blocks in ``kept`` were held already, or have the
            contents of their last release. Blocks in ``lost`` show zeros, or what this arena once wrote.

        Raises:
            OutOfPages: memory is short, even after others gave up what they keep for later. Nothing was
                changed.
            DriverError: the driver refuses a call. Nothing was changed.
        """
        return BlocksCore.hold(self._core, numbers)

    def prepare(self, numbers: Iterable[int]) -> None:
        """Has the mapper map blocks that are held soon, and returns at once. A block that is not held after
        all keeps its pages until others need them, or :meth:`trim` gives them back.

        Raises:
            DriverError: the driver refused a call of the mapper for an earlier ``prepare``.
        """
        BlocksCore.prepare(self._core, numbers)

    def release(self, numbers: Iterable[int], stream: Stream | None = None) -> None:
        """Ends the hold on blocks, once the steps under way have ended. A block that is not held stays so.

        Args:
            stream: the stream of the work that uses the blocks; the current one unless given.
        """
        BlocksCore.release(self._core, numbers, stream_handle("Blocks.release", stream))

    def begin_step(self) -> None:
        """Notes the begin of a step, which may use all blocks that are held now."""
        BlocksCore.begin_step(self._core)

    def end_step(self, stream: Stream | None = None) -> None:
        """Notes the end of the oldest step under way.

        Args:
            stream: as for :meth:`release`.

        Raises:
            InvalidArgument: no step is under way.
        """
        BlocksCore.end_step(self._core, stream_handle("Blocks.end_step", stream))

    def whole(self, numbers: Iterable[int]) -> list[bool]:
        """Whether each block has memory, with the contents of its last release: :meth:`hold` would keep it.
        Changes nothing, and does not keep the block. False for blocks of an arena that sleeps."""
        return BlocksCore.whole(self._core, numbers)

    def trim(self, numbers: Iterable[int]) -> int:
        """Gives back the memory of those blocks that are not held. Returns the bytes given back: pages that
        held blocks share stay."""
        return BlocksCore.trim(self._core, numbers) * self.arena.pool.page_size

    @property
    def mapped(self) -> int:
        """Number of blocks that are held, or were released and wait for steps to end."""
        return self._core.mapped

    def __repr__(self) -> str:
        if self.arena.closed:
            return f"<vtensor.Blocks {len(self):,} closed>"
        if _core.in_forked_child():
            return f"<vtensor.Blocks {len(self):,}, in {self.arena!r}>"
        return f"<vtensor.Blocks {len(self):,}, {self.mapped:,} in use, in {self.arena!r}>"
