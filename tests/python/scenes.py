"""Operations of every kind, each with what is there before it: for tests that cut them off in all places."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest
import torch

import test_sleep
import vtensor
from kv_support import UNIT, lengths_with, make_cache
from support import PER_PAGE, filled, quarter, ramp, same_bytes
from test_heap import allocate, content, fill, free, inside
from vtensor import together
from vtensor.testing.kv_model import check_contents, expected, write

LENGTH = 10
PAGE = 4096


def prepared(pool):
    """A tensor whose pages are not shared, one that shares them, and pages of other owners to be zeroed."""
    filled(pool, 12, 255).close()
    alone = quarter(pool, LENGTH, rows=(2,), capacity=16, when_full="move")
    parent = quarter(pool, LENGTH, rows=(2,), capacity=16, when_full="move")
    alone.copy_(ramp(alone))
    parent.copy_(ramp(parent))
    child = parent.fork()
    moved = quarter(pool, LENGTH, rows=(2,), capacity=16, when_full="move")
    moved.copy_(ramp(moved)).shrink(5, front=True)
    return alone, parent, child, moved


def more(pool, n=6):
    return torch.full((2, n, pool.page_size // PER_PAGE), 9, dtype=torch.uint8)


def shows_zeros(t):
    assert not t.any()  # I7
    return t


# What is done, to (pool, alone, parent, child, moved).
OPERATIONS = {
    "empty": lambda pool, *t: shows_zeros(quarter(pool, 9, rows=(2,))),
    "empty_reused": lambda pool, *t: shows_zeros(quarter(pool, 8).extend(8)),  # where pages are cached
    "from_tensor": lambda pool, *t: vtensor.from_tensor(more(pool), 1, 20, pool=pool),
    "extend": lambda pool, a, p, c, m: a.extend(6),
    "extend_shared": lambda pool, a, p, c, m: c.extend(6),
    "append": lambda pool, a, p, c, m: a.append(more(pool)),
    "append_shared": lambda pool, a, p, c, m: c.append(more(pool)),
    "extend_and_move": lambda pool, a, p, c, m: m.extend(9),
    "append_and_move": lambda pool, a, p, c, m: m.append(more(pool, 9)),
    "shrink": lambda pool, a, p, c, m: a.shrink(9),
    "shrink_shared": lambda pool, a, p, c, m: c.shrink(9),
    "shrink_front": lambda pool, a, p, c, m: c.shrink(6, front=True),
    "fork": lambda pool, a, p, c, m: a.fork(),
    "fork_again": lambda pool, a, p, c, m: c.fork(),
    "unshare": lambda pool, a, p, c, m: c.unshare(2, 9),
    "reallocate": lambda pool, a, p, c, m: a.reallocate(40),
    "reallocate_shared": lambda pool, a, p, c, m: c.reallocate(40),
    "reserve": lambda pool, a, p, c, m: together.reserve(a, 40),
    "reindex": lambda pool, a, p, c, m: a.reindex([1, 1]),
    "reindex_shared": lambda pool, a, p, c, m: c.reindex([1, 0, 1]),
    "close": lambda pool, a, p, c, m: c.close(),
    "fill_shared": lambda pool, a, p, c, m: p.fill_(3),
    "trim": lambda pool, *t: pool.trim(),
}


class Scene:
    """Objects of a pool before an operation. What it is, at any time; what has to hold; and its end."""

    exact = True  # no worker maps beside it

    def state(self):
        """What a refused operation leaves as it was."""
        return self.facts()


class Tensors(Scene):
    """Those of `prepared`."""

    PAGES = 80

    def __init__(self, pool: vtensor.Pool) -> None:
        self.pool = pool
        self.tensors = prepared(pool)
        self.contents = [t.clone() for t in self.tensors]
        self.addresses = [t.address for t in self.tensors]

    def facts(self):
        """What an operation changes, the same in any pool."""
        facts = []
        for t, address in zip(self.tensors, self.addresses, strict=True):
            moved = t.address - address
            at = moved if abs(moved) < 1 << 16 else "elsewhere"
            facts.append("closed" if t.closed else (t.shape, t.capacity, at, t.tolist()))
        return facts, self.pool.budget

    def state(self):
        stats = self.pool.stats()
        mapped = stats.pages_used, stats.pages_mapped, stats.pages_pinned, stats.nbytes_reserved
        return self.facts(), stats.pages_active, stats.tensors, self.exact and mapped

    def check(self) -> None:
        for t, kept in zip(self.tensors, self.contents, strict=True):
            assert same_bytes(t, kept)

    def end(self, name: str) -> None:
        for t in self.tensors:
            if not t.closed and t.length:
                t.truncate(t.length - 1).extend(1)
            t.close()


class Cache(Scene):
    """Slot 0 has a published prompt, 1 is its fork, 2 is alone, of 3 and 4 pages are in host memory, and 5 is
    free. Two bands, that are alike."""

    PAGES = 150
    PROMPT = list(range(2 * UNIT + 3))

    def __init__(self, pool: vtensor.Pool) -> None:
        filled(pool, 12, 255).close()
        self.cache = cache = make_cache(pool, bands=2)
        self.expected = {0: self.PROMPT, 1: self.PROMPT, 2: range(100, 120), 3: range(200, 220)}
        assert cache.alloc(self.PROMPT) == 0 and cache.step(lengths_with(cache, 0, len(self.PROMPT)))
        write(cache, 0, 0, self.PROMPT)
        cache.publish(0, self.PROMPT)
        assert cache.fork(0) == [1]
        for slot in (2, 3):
            assert cache.alloc() == slot and cache.step(lengths_with(cache, slot, 20))
            write(cache, slot, 0, self.expected[slot])
        assert cache.fork(3) == [4]
        self.expected[4] = self.expected[3]
        cache.swap_out([3, 4])
        cache.wait(3), cache.wait(4)

    def facts(self):
        if self.cache.closed:
            return "closed"
        stats = self.cache.stats()
        counts = (stats.slots_used, stats.slots_swapped, stats.nbytes_swapped, stats.prefix_tokens)
        return self.cache.lengths, [self.cache.bands_away(slot) for slot in range(3)], counts

    def check(self) -> None:
        for slot, values in self.expected.items():
            if self.cache.lengths[slot]:
                self.cache.wait(slot)
                check_contents(self.cache, slot, list(values)[: self.cache.lengths[slot]])

    def end(self, name: str) -> None:
        if not self.cache.closed:
            for slot in (3, 4):
                assert self.cache.lengths[slot] or "free" in name or self.cache.swap_in(slot)
            for slot in range(3):
                assert all(self.cache.swap_in(slot, bands=[band]) for band in self.cache.bands_away(slot))
            if name not in ("reorder", "write"):
                self.check()
        self.cache.close()


class Beams(Cache):
    """Slots 0, 1 and 2 are alone, 3 was freed and keeps its pages, 4 and 5 were never used."""

    USED_AFTER = {"alloc a freed slot": 4, "fork twice": 5, "reorder to two forks": 3}  # slots

    def __init__(self, pool: vtensor.Pool) -> None:
        filled(pool, 12, 255).close()
        self.cache = cache = make_cache(pool, bands=2)
        self.expected = {slot: range(100 * slot, 100 * slot + 20) for slot in range(3)}
        for slot in range(4):
            assert cache.alloc() == slot and cache.step(lengths_with(cache, slot, 20))
            write(cache, slot, 0, range(100 * slot, 100 * slot + 20))
        cache.free(3)

    def end(self, name: str) -> None:
        assert self.cache.stats().slots_used == self.USED_AFTER[name]  # none is left of a first try
        self.cache.close()


class Short(Beams):
    """Likewise, where what is free suffices for half of what slot 0 is to have."""

    PAGES = 36

    def end(self, name: str) -> None:
        assert self.cache.step([52, 20, 20, 0, 0, 0])
        self.check()
        self.cache.close()


class Memory(Scene):
    """An arena with blocks, an adopted module, and allocations of a heap with holes between them."""

    PAGES = 40

    def __init__(self, pool: vtensor.Pool) -> None:
        self.pool = pool
        self.arena = vtensor.Arena(16 * PAGE, pool=pool)
        self.blocks = vtensor.Blocks(self.arena, 8, [(0, PAGE, PAGE)])
        self.arena.map([(10 * PAGE, 12 * PAGE)])
        self.blocks.hold([0, 5])
        self.arena.tensor[:PAGE] = 5
        self.layer = torch.nn.Linear(40, 40)
        self.weight, self.address = self.layer.weight.detach().clone(), self.layer.weight.data_ptr()
        with inside(pool) as self.heap:
            self.kept = [allocate(2 * PAGE) for _ in range(7)]
            fill(self.kept[3], 2 * PAGE, 9)
            for i in (0, 2, 4, 6, 1, 5):
                free(self.kept[i])
        self.allocated = 0

    def allocate(self) -> None:
        with inside(self.pool):
            self.allocated = allocate(12 * PAGE) or 0
        if not self.allocated:
            raise vtensor.DriverError("[heap] the allocation was refused: by a test")

    def facts(self):
        if self.arena.closed:
            with pytest.raises(vtensor.Closed):
                self.arena.tensor.numel()
            return "closed"
        moved = self.layer.weight.data_ptr() != self.address
        return self.arena.stats().pages_active, self.blocks.mapped, self.heap.counts().allocations, moved

    def check(self) -> None:
        assert self.arena.closed or self.arena.tensor[:PAGE].eq(5).all()
        assert torch.equal(self.layer.weight, self.weight)
        assert content(self.kept[3], 2 * PAGE) == bytes([9]) * 2 * PAGE

    def end(self, name: str) -> None:
        self.check()
        free(self.allocated or None), free(self.kept[3])
        self.layer = None
        self.arena.close()
        self.pool._close_heaps()


class Awake(test_sleep.Scene, Scene):
    """All that can sleep, some of it shared."""

    PAGES = 256

    def facts(self):
        return self.pool.stats().nbytes_asleep

    def end(self, name: str) -> None:
        self.pool.wake()
        self.check()
        self.go_on()
        super().end()


class Asleep(Awake):
    def __init__(self, pool: vtensor.Pool) -> None:
        super().__init__(pool)
        pool.sleep(contents="host")

    def check(self) -> None:
        if not self.pool.stats().nbytes_asleep:
            super().check()


# Of each operation: before what it is done, and how.
TABLE: dict[str, tuple[type, Callable]] = {
    name: (Tensors, lambda s, run=run: run(s.pool, *s.tensors)) for name, run in OPERATIONS.items()
} | {
    "budget": (Tensors, lambda s: setattr(s.pool, "budget", 30 * PAGE)),
    "alloc": (Cache, lambda s: s.cache.alloc()),
    "alloc a prefix": (Cache, lambda s: s.cache.alloc([*Cache.PROMPT, 1])),
    "step": (Cache, lambda s: s.cache.step([60, 37, 50, 0, 0, 0])),
    "step of a band": (Cache, lambda s: s.cache.step([35, 35, 50, 0, 0, 0], bands=[1])),
    "prepare": (Cache, lambda s: s.cache.prepare([60, 37, 50, 0, 0, 0])),
    "prepare from a freed slot": (Short, lambda s: s.cache.prepare([52, 20, 20, 0, 0, 0])),
    "free": (Cache, lambda s: s.cache.free(1)),
    "truncate": (Cache, lambda s: s.cache.truncate(1, 20)),
    "cache.fork": (Cache, lambda s: s.cache.fork(2)),
    "reorder": (Cache, lambda s: s.cache.reorder([0, 2], [0, 0])),
    "alloc a freed slot": (Beams, lambda s: s.cache.alloc()),
    "fork twice": (Beams, lambda s: s.cache.fork(0, 2)),
    "reorder to two forks": (Beams, lambda s: s.cache.reorder([0, 1, 2], [0, 0, 0])),
    "publish": (Cache, lambda s: s.cache.publish(2, [7] * 20)),
    "cache.unshare": (Cache, lambda s: s.cache.unshare(1, 0, 20)),
    "write": (Cache, lambda s: s.cache.write(0, 1, 3, *expected(s.cache, 0, [3]))),
    "swap_out": (Cache, lambda s: s.cache.swap_out([0, 1, 2])),
    "swap_out of bands": (Cache, lambda s: s.cache.swap_out([0, 1, 2], bands=[1])),
    "swap_in": (Cache, lambda s: s.cache.swap_in([3, 4])),
    "close a cache": (Cache, lambda s: s.cache.close()),
    "make a cache": (Memory, lambda s: make_cache(s.pool)),
    "map": (Memory, lambda s: s.arena.map([(9 * PAGE, 11 * PAGE), (14 * PAGE, 15 * PAGE)])),
    "unmap": (Memory, lambda s: s.arena.unmap([(10 * PAGE, 12 * PAGE)])),
    "hold": (Memory, lambda s: s.blocks.hold([1, 2, 5, 7])),
    "release": (Memory, lambda s: s.blocks.release([5])),
    "an arena with zeros": (Memory, lambda s: vtensor.Arena(4 * PAGE, zeros=True, pool=s.pool).close()),
    "allocate": (Memory, lambda s: s.allocate()),
    "sleep": (Awake, lambda s: s.pool.sleep(contents="host")),
    "sleep in a folder": (Awake, lambda s: s.pool.sleep(contents=tempfile.gettempdir())),
    "wake": (Asleep, lambda s: s.pool.wake()),
    "adopt": (Memory, lambda s: vtensor.adopt(s.layer, s.pool)),
}


# What makes no driver call that could be refused, or hands over what is lost if it is not stored.
MORE: dict[str, tuple[type, Callable]] = {
    "truncate a tensor": (Tensors, lambda s: s.tensors[0].truncate(1)),
    "prepare a tensor": (Tensors, lambda s: s.tensors[0].prepare(3)),
    "write in place": (Tensors, lambda s: s.tensors[2].zero_()),
    "with": (Tensors, lambda s: s.tensors[0].__exit__(None, None, None)),
    "empty_like": (Tensors, lambda s: vtensor.empty_like(s.tensors[0])),
    "lease": (Tensors, lambda s: vtensor.lease(s.tensors[0]).__enter__().__exit__(None, None, None)),
    "stats": (Tensors, lambda s: s.pool.stats()),
    "wait_idle": (Tensors, lambda s: s.pool.wait_idle()),
    "free a swapped request": (Cache, lambda s: s.cache.free(3)),
    "wait": (Cache, lambda s: s.cache.wait(3)),
    "record_stream": (Cache, lambda s: s.cache.record_stream()),
    "make an arena": (Memory, lambda s: vtensor.Arena(PAGE, pool=s.pool)),
    "prepare an arena": (Memory, lambda s: s.arena.prepare([(14 * PAGE, 15 * PAGE)])),
    "trim an arena": (Memory, lambda s: s.arena.trim()),
    "trim some": (Memory, lambda s: s.arena.trim([(0, PAGE)])),
    "holds": (Memory, lambda s: s.arena.holds([(0, PAGE)])),
    "close an arena": (Memory, lambda s: s.arena.close()),
    "prepare blocks": (Memory, lambda s: s.blocks.prepare([2])),
    "begin a step": (Memory, lambda s: s.blocks.begin_step()),
    "whole": (Memory, lambda s: s.blocks.whole([0])),
    "trim blocks": (Memory, lambda s: s.blocks.trim([5])),
}
