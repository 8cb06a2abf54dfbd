"""The calls of a memory manager that a replay uses, and the managers that vtensor is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
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
    """A manager of at most ``max_batch`` slots of ``max_len`` tokens that neither forks nor swaps: the
    requests of a trace have one sample each, and the scheduler computes these again."""

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


class PagedCache(OneSample):
    """PagedAttention's memory manager: frames of 16 tokens, and a table of frames for each sequence. It has
    the tables only, and no memory.

    After vLLM's paper (Kwon et al., SOSP 2023) and its documentation of automatic prefix caching. vLLM's
    block is called a frame here, and a page is always the driver's. Frames are reference-counted. A full
    frame is indexed by a hash over its tokens and all tokens before them. Once its last user has gone, it
    stays in the index until its memory is needed. The least recently used frame is evicted first, and of one
    sequence the last frame. Only full frames are shared, so no write goes to a shared one.

    One choice is better than the documented one: frames outside the index are handed out before frames that
    could still be reused as a prefix.

    Args:
        frames: frames in the device's memory.
        max_batch, max_len: as for :class:`OneSample`.
        frame_tokens: tokens of a frame.

    ``tables[slot]`` lists the frames of a sequence. It does not check that slots are in use or that lengths
    do not shrink.
    """

    def __init__(self, frames: int, max_batch: int, max_len: int, *, frame_tokens: int = 16) -> None:
        if frames < 1:
            raise InvalidArgument(
                f"[PagedCache] memory for {frames} frames of {frame_tokens} tokens: give it more"
            )
        super().__init__(max_batch, max_len)
        self.frame_tokens = frame_tokens
        self.tables: list[list[int]] = [[] for _ in range(max_batch)]
        self.evictions = 0
        # The length up to which each slot needs no new frame.
        self._room = [0] * max_batch
        self._unused = frames  # what no request has had: millions for a small model
        self._refs: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()  # what one has given back, next to use first
        self._frame_of: dict[int, int] = {}  # by the hash of a full frame and all before it
        self._hash_of: list[int | None] = []

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int:
        slot, size = self._free_slots.pop(), self.frame_tokens
        table = self.tables[slot]
        if tokens is not None:
            hashes = self._hashed(slot, tokens, salt, size)[: (len(tokens) - 1) // size]
            table += map(self._frame_of.__getitem__, takewhile(self._frame_of.__contains__, hashes))
        for frame in table:
            self._free.pop(frame, None)
            self._refs[frame] += 1
        self._room[slot] = self._lengths[slot] = len(table) * size
        return slot

    def step(self, lengths: Sequence[int]) -> bool:
        size, grown = self.frame_tokens, self._grown(lengths)
        if self._frames_for(grown, lengths) > self._unused + len(self._free):
            return False
        for slot in grown:
            table = self.tables[slot]
            while len(table) * size < lengths[slot]:
                table.append(self._take())
            self._room[slot] = len(table) * size
        self._lengths = list(lengths)
        return True

    def fits(self, lengths: Sequence[int]) -> bool:
        return self._frames_for(self._grown(lengths), lengths) <= self._unused + len(self._free)

    def free(self, slot: int) -> None:
        super().free(slot)
        for frame in reversed(self.tables[slot]):
            self._refs[frame] -= 1
            if self._refs[frame] == 0:
                self._free[frame] = None
                if self._hash_of[frame] is None:
                    self._free.move_to_end(frame, last=False)
        self.tables[slot], self._room[slot] = [], 0

    def _grown(self, lengths: Sequence[int]) -> list[int]:
        """The slots whose new lengths are above their room."""
        return [slot for slot, (n, room) in enumerate(zip(lengths, self._room, strict=True)) if n > room]

    def _frames_for(self, slots: list[int], lengths: Sequence[int]) -> int:
        return sum(-(-lengths[slot] // self.frame_tokens) - len(self.tables[slot]) for slot in slots)

    def _take(self) -> int:
        frame = next(iter(self._free), -1)
        if self._unused and (frame < 0 or self._hash_of[frame] is not None):
            self._unused -= 1
            self._refs.append(1)
            self._hash_of.append(None)
            return len(self._refs) - 1
        del self._free[frame]
        known = self._hash_of[frame]
        if known is not None:
            del self._frame_of[known]
            self._hash_of[frame] = None
            self.evictions += 1
        self._refs[frame] = 1
        return frame

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int:
        table, hashes = self.tables[slot], self._hashed(slot, tokens, salt, self.frame_tokens)
        full = len(tokens) // self.frame_tokens
        for known, frame in zip(hashes[:full], table, strict=False):
            if known not in self._frame_of and self._hash_of[frame] is None:
                self._frame_of[known] = frame
                self._hash_of[frame] = known
        return full * self.frame_tokens

    def stats(self) -> ManagerStats:
        used = [slot for slot, table in enumerate(self.tables) if table]
        live = sum(self._lengths[slot] for slot in used)
        held = sum(len(self.tables[slot]) for slot in used) * self.frame_tokens
        return ManagerStats(unit=self.frame_tokens, tokens=live, waste=held / live - 1 if live else 0.0)


class StaticCache(PagedCache):
    """A slot of ``max_len`` tokens for each request, like preallocated tensors, as far as the memory for
    ``tokens`` goes: one frame each, which no other request shares."""

    def __init__(self, tokens: int, max_batch: int, max_len: int) -> None:
        frames = tokens // max_len
        if min(max_batch, frames) < 1:
            raise InvalidArgument(
                f"[StaticCache] one slot of {max_len} tokens, but memory for {tokens}: give it more, or "
                "lower max_len"
            )
        super().__init__(frames, min(max_batch, frames), max_len, frame_tokens=max_len)

    def step(self, lengths: Sequence[int]) -> bool:
        if max(lengths) > self.max_len:
            raise CapacityExceeded(
                f"[StaticCache.step] {max(lengths)} tokens, a slot has {self.max_len}: make it larger"
            )
        return super().step(lengths)


class RadixCache(OneSample):
    """An ideal manager, the upper bound of prefix reuse: it allocates memory by the token and keeps each
    published unit once.

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
