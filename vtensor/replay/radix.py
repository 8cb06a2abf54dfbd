"""The upper bound of prefix reuse: a radix cache of 16-token units that wastes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from vtensor.replay.baselines import ManagerStats, OneSample


@dataclass(eq=False)
class _Node:
    """One unit of tokens that follows its parent's."""

    parent: _Node | None = None
    key: tuple[int, ...] = ()
    users: int = 0
    used_at: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class RadixCache(OneSample):
    """An ideal manager: it allocates memory by the token and keeps each published unit once.

    If a token needs memory, it evicts the least recently used leaf.

    Args:
        tokens: the number of tokens that fit into the memory.
        max_batch, max_len: as for :class:`OneSample`.
        unit: tokens of the smallest prefix that can be reused.
    """

    def __init__(self, tokens: int, max_batch: int, max_len: int, unit: int = 16) -> None:
        super().__init__(max_batch, max_len)
        self.unit = unit
        self._tokens_free = tokens
        self._paths: list[list[_Node]] = [[] for _ in range(max_batch)]
        self._roots: dict[str, _Node] = {}
        self._idle = 0  # units that no slot uses
        self._leaves: list[tuple[int, int, _Node]] = []  # idle leaves, and some that were
        self._ties = count()
        self._clock = 0

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int:
        slot = self._free_slots.pop()
        if tokens is not None:
            for node in self._walk(tokens, (len(tokens) - 1) // self.unit, salt):
                self._use(slot, node)
        self._lengths[slot] = len(self._paths[slot]) * self.unit
        return slot

    def step(self, lengths: Sequence[int]) -> bool:
        if not self.fits(lengths):
            return False
        needed = sum(lengths) - sum(self._lengths)
        while needed > self._tokens_free:
            self._evict()
        self._tokens_free -= needed
        self._lengths = list(lengths)
        return True

    def fits(self, lengths: Sequence[int]) -> bool:
        return sum(lengths) - sum(self._lengths) <= self._tokens_free + self._idle * self.unit

    def free(self, slot: int) -> None:
        path, length = self._paths[slot], self._lengths[slot]
        super().free(slot)
        self._tokens_free += length - len(path) * self.unit
        self._clock += 1
        for node in reversed(path):
            node.users -= 1
            node.used_at = self._clock
            if node.users == 0:
                self._idle += 1
                self._note_leaf(node)
        path.clear()

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int:
        path, units = self._paths[slot], len(tokens) // self.unit
        node = path[-1] if path else self._root(salt)
        for start in range(len(path) * self.unit, units * self.unit, self.unit):
            key = tuple(tokens[start : start + self.unit])
            known = node.children.get(key)
            if known is None:
                known = node.children[key] = _Node(node, key, users=1)
                path.append(known)
            else:  # two slots computed it; it is kept once
                self._tokens_free += self.unit
                self._use(slot, known)
            node = known
        return units * self.unit

    def _root(self, salt: str) -> _Node:
        return self._roots.setdefault(salt, _Node())

    def _walk(self, tokens: Sequence[int], units: int, salt: str) -> Iterator[_Node]:
        node: _Node | None = self._root(salt)
        for start in range(0, units * self.unit, self.unit):
            assert node is not None
            node = node.children.get(tuple(tokens[start : start + self.unit]))
            if node is None:
                return
            yield node

    def _use(self, slot: int, node: _Node) -> None:
        if node.users == 0:
            self._idle -= 1
        node.users += 1
        self._paths[slot].append(node)

    def _note_leaf(self, node: _Node) -> None:
        if node.users == 0 and not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.used_at, next(self._ties), node))

    def _evict(self) -> None:
        while True:
            used_at, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if node.users or node.children or node.used_at != used_at or parent is None:
                continue  # the node is no longer an idle leaf
            del parent.children[node.key]
            node.parent = None
            self._idle -= 1
            self._tokens_free += self.unit
            self._note_leaf(parent)
            return

    def stats(self) -> ManagerStats:
        return ManagerStats(unit=self.unit, tokens=sum(self._lengths), waste=0.0)
