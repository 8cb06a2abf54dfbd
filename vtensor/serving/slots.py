"""The calls of a cache that a scheduler uses: those of ``vtensor.KVCache``. A paged or a static manager with
the same calls can replace it, and be compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vtensor.kv import KVCache


class SlotStats(Protocol):
    """The part of ``KVCacheStats`` that a scheduler reads."""

    @property
    def unit(self) -> int:
        """Tokens of the smallest prefix that can be shared."""


class KVCacheManager(Protocol):
    """One slot a sequence; :class:`vtensor.KVCache` documents each call. A call that raises has changed
    nothing, and ``free`` raises InvalidArgument for a free slot."""

    @property
    def max_batch(self) -> int:
        """Slots."""

    @property
    def max_len(self) -> int:
        """The most tokens of a slot."""

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int: ...

    def step(self, lengths: Sequence[int]) -> bool: ...

    def fits(self, lengths: Sequence[int]) -> bool: ...

    def free(self, slot: int) -> None: ...

    def length(self, slot: int) -> int: ...

    def fork(self, slot: int, n: int = 1) -> list[int]: ...

    def reorder(self, slots: Sequence[int], sources: Sequence[int]) -> list[int]: ...

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int: ...

    def swap_out(self, slot: int | Sequence[int]) -> None: ...

    def swap_in(self, slot: int | Sequence[int]) -> bool: ...

    def stats(self) -> SlotStats: ...


def fits_at_last(cache: KVCacheManager, lengths: Sequence[int]) -> bool:
    """Whether a refused step is granted once nothing is on its way out any more, as a ``vtensor.KVCache``
    answers. Other managers give memory back at once."""
    return isinstance(cache, KVCache) and cache.fits(lengths, wait=True)
