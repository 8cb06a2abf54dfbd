"""The calls of a memory manager that a replay uses, the base of the managers that vtensor is compared
with, and the simplest of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from vtensor.errors import CapacityExceeded, InvalidArgument, OutOfPages
from vtensor.kv import KVCacheStats
from vtensor.serving import KVCacheManager


@dataclass(frozen=True)
class ManagerStats:
    """The part of ``KVCacheStats`` that a replay reads."""

    unit: int
    tokens: int
    waste: float
    driver_calls: dict[str, dict[str, int]] = field(default_factory=lambda: {"caller": {}, "mapper": {}})


class ReplayCache(KVCacheManager, Protocol):
    """The calls of a manager that a replay uses."""

    def stats(self) -> KVCacheStats | ManagerStats: ...


class OneSample:
    """A manager that neither forks nor swaps: the requests of a trace have one sample each, and the scheduler
    computes these again.

    Args:
        max_batch: the most slots.
        max_len: the most tokens of a slot.
    """

    def __init__(self, max_batch: int, max_len: int) -> None:
        self.max_batch, self.max_len = max_batch, max_len
        self._lengths = [0] * max_batch
        self._free_slots = list(reversed(range(max_batch)))
        self._hashes: list[list[int]] = [[] for _ in range(max_batch)]  # of each slot, by _hashed

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def free(self, slot: int) -> None:
        if slot in self._free_slots:
            raise InvalidArgument(f"[{type(self).__name__}.free] slot {slot} is free")
        self._lengths[slot], self._hashes[slot] = 0, []
        self._free_slots.append(slot)

    def _hashed(self, slot: int, tokens: Sequence[int], salt: str, unit: int) -> list[int]:
        """A hash of each full unit of a slot's tokens and all tokens before it."""
        hashes = self._hashes[slot]
        last = hashes[-1] if hashes else hash(salt)
        for start in range(len(hashes) * unit, len(tokens) - unit + 1, unit):
            last = hash((last, *tokens[start : start + unit]))
            hashes.append(last)
        return hashes

    def swap_out(self, slot: int | Sequence[int]) -> None:
        raise OutOfPages(f"[{type(self).__name__}.swap_out] there is no host memory: compute it again")

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        name = type(self).__name__
        raise InvalidArgument(f"[{name}] it swaps nothing and manages one sample each: take a KVCache")

    swap_in = fork = reorder = _refuse


class StaticCache(OneSample):
    """A slot of ``max_len`` tokens for each request, like preallocated tensors, as far as the memory for
    ``tokens`` goes."""

    def __init__(self, tokens: int, max_batch: int, max_len: int) -> None:
        super().__init__(min(max_batch, tokens // max_len), max_len)
        if self.max_batch < 1:
            raise InvalidArgument(
                f"[StaticCache] one slot of {max_len} tokens, but memory for {tokens}: give it more, or "
                "lower max_len"
            )

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int:
        return self._free_slots.pop()

    def step(self, lengths: Sequence[int]) -> bool:
        if max(lengths) > self.max_len:
            raise CapacityExceeded(
                f"[StaticCache.step] {max(lengths)} tokens, a slot has {self.max_len}: make it larger"
            )
        self._lengths = list(lengths)
        return True

    def fits(self, lengths: Sequence[int]) -> bool:
        return max(lengths) <= self.max_len

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int:
        return 0

    def stats(self) -> ManagerStats:
        live, held = sum(self._lengths), (self.max_batch - len(self._free_slots)) * self.max_len
        return ManagerStats(unit=self.max_len, tokens=live, waste=held / live - 1 if live else 0.0)
