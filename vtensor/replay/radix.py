"""The upper bound of prefix reuse: a radix cache of 16-token units that wastes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from vtensor.replay.baselines import ManagerStats, OneSample


class RadixCache(OneSample):
    """An ideal manager: it allocates memory by the token and keeps each published unit once.

    If a token needs memory, it evicts the least recently used unit that no other follows.

    Args:
        tokens: the number of tokens that fit into the memory.
        max_batch, max_len: as for :class:`OneSample`.
        unit: tokens of the smallest prefix that can be reused.
    """

    def __init__(self, tokens: int, max_batch: int, max_len: int, unit: int = 16) -> None:
        super().__init__(max_batch, max_len)
        self.unit = unit
        self._tokens_free = tokens
        self._held = [0] * max_batch  # published units of each slot
        self._users: dict[int, int] = {}  # slots of each published unit, by its hash
        self._idle: OrderedDict[int, None] = OrderedDict()  # units without users; next to evict first

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int:
        slot = self._free_slots.pop()
        if tokens is not None:
            hashes = self._hashed(slot, tokens, salt, self.unit)[: (len(tokens) - 1) // self.unit]
            for unit in takewhile(self._users.__contains__, hashes):
                self._use(slot, unit)
        self._lengths[slot] = self._held[slot] * self.unit
        return slot

    def step(self, lengths: Sequence[int]) -> bool:
        if not self.fits(lengths):
            return False
        needed = sum(lengths) - sum(self._lengths)
        while needed > self._tokens_free:
            unit, _ = self._idle.popitem(last=False)
            del self._users[unit]
            self._tokens_free += self.unit
        self._tokens_free -= needed
        self._lengths = list(lengths)
        return True

    def fits(self, lengths: Sequence[int]) -> bool:
        return sum(lengths) - sum(self._lengths) <= self._tokens_free + len(self._idle) * self.unit

    def free(self, slot: int) -> None:
        hashes, length = self._hashes[slot][: self._held[slot]], self._lengths[slot]
        super().free(slot)
        self._tokens_free += length - len(hashes) * self.unit
        self._held[slot] = 0
        for unit in reversed(hashes):  # a unit is evicted before those that it follows
            self._users[unit] -= 1
            if self._users[unit] == 0:
                self._idle[unit] = None

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int:
        units = len(tokens) // self.unit
        for unit in self._hashed(slot, tokens, salt, self.unit)[self._held[slot] : units]:
            if unit in self._users:  # two slots computed it; it is kept once
                self._tokens_free += self.unit
            self._use(slot, unit)
        return units * self.unit

    def _use(self, slot: int, unit: int) -> None:
        self._users[unit] = self._users.get(unit, 0) + 1
        self._idle.pop(unit, None)
        self._held[slot] += 1

    def stats(self) -> ManagerStats:
        return ManagerStats(unit=self.unit, tokens=sum(self._lengths), waste=0.0)
