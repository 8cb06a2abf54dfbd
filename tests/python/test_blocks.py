"""Blocks of an engine over an arena: held or not, whole or lost, and steps that may still use them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import vtensor
from machines import case
from support import Rival, calls, calls_since, filled, open_pool
from vtensor import testing

PAGE = 4096
COUNT = 16
SIZE = PAGE // 2  # two blocks share a page
LAYERS = 3
LAYER = COUNT * SIZE
PARTS = [(layer * LAYER, SIZE, SIZE) for layer in range(LAYERS)]
BUDGET = 14  # pages, of 24
numbers = st.lists(st.integers(0, COUNT - 1), max_size=6)


def pages_of(blocks) -> set[int]:
    return {(offset + b * stride) // PAGE for b in blocks for offset, stride, _ in PARTS}


def parts_of(arena: vtensor.Arena, block: int) -> list[torch.Tensor]:
    return [arena.tensor[offset + block * stride :][:size] for offset, stride, size in PARTS]


def make(pool: vtensor.Pool) -> vtensor.Blocks:
    return vtensor.Blocks(vtensor.Arena(LAYERS * LAYER, pool=pool), COUNT, PARTS)


@pytest.fixture
def blocks(pool_factory, kind):
    """In a pool that caches what no block needs."""
    blocks = make(pool_factory(kind, BUDGET, prefetch=8 * PAGE, cache=BUDGET * PAGE))
    yield blocks
    blocks.arena.close()


class BlocksMachine(RuleBasedStateMachine):
    """Blocks of requests, and steps, against what each block must hold."""

    kind = "host"

    def __init__(self) -> None:
        super().__init__()
        self.pool = open_pool(self.kind, BUDGET, prefetch=8 * PAGE, cache=BUDGET * PAGE)
        self.blocks = make(self.pool)
        self.held: set[int] = set()
        self.leaving: dict[int, int] = {}  # block: the step that it waits for
        self.begun = self.ended = 0
        self.written: dict[int, int] = {}  # also of blocks that were released
        self.values = iter(range(1, 10**9))
        self.rival = Rival(self.pool, 8)

    def mapped(self) -> set[int]:
        return self.held | set(self.leaving)

    def has_what_was_written(self, block: int) -> bool:
        value = self.written.get(block)
        return value is None or all(bool(p.eq(value).all()) for p in parts_of(self.blocks.arena, block))

    @rule(which=numbers, fail=st.none() | st.integers(0, 4))
    def hold(self, which: list[int], fail: int | None) -> None:
        fresh = set(which) - self.held
        whole = dict(zip(which, self.blocks.whole(which), strict=True))
        try:
            if fail is None:
                kept, lost = self.blocks.hold(which)
            else:
                try:
                    with testing.fail_after(self.pool, fail):
                        kept, lost = self.blocks.hold(which)
                finally:
                    with suppress(vtensor.DriverError):  # of the mapper: else a later operation raises it
                        self.pool.wait_idle()
        except vtensor.DriverError:
            assert fail is not None
            return self.hold(which, None)  # equal draws make equal blocks
        except vtensor.OutOfPages:
            if fail is not None:
                return self.hold(which, None)
            others = self.pool.stats().pages_active - len(pages_of(self.mapped()))
            assert len(pages_of(self.mapped() | set(which))) + others > BUDGET
            return
        assert sorted(kept + lost) == sorted(set(which)) and set(lost) <= fresh
        if fail is None:
            assert not any(whole[block] for block in lost)
        for block in kept:
            assert self.has_what_was_written(block)
        for block in lost:
            self.written.pop(block, None)
        self.held |= set(which)
        for block in which:
            self.leaving.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.written[block] = next(self.values) % 250 + 1
        for part in parts_of(self.blocks.arena, block):
            part.fill_(self.written[block])

    @rule(which=numbers)
    def release(self, which: list[int]) -> None:
        self.blocks.release(which)
        for block in self.held & set(which):
            self.held.remove(block)
            if self.begun != self.ended:
                self.leaving[block] = self.begun

    @rule(which=numbers)
    def prepare(self, which: list[int]) -> None:
        """Which blocks are held, and what they hold, is as before."""
        self.blocks.prepare(which)

    @rule()
    def begin_step(self) -> None:
        self.blocks.begin_step()
        self.begun += 1

    @precondition(lambda self: self.begun != self.ended)
    @rule()
    def end_step(self) -> None:
        self.blocks.end_step()
        self.ended += 1
        self.leaving = {block: step for block, step in self.leaving.items() if step > self.ended}

    @rule(which=numbers)
    def trim(self, which: list[int]) -> None:
        self.blocks.trim(which)
        self.pool.wait_idle()
        for block in set(which) - self.mapped():
            if not pages_of([block]) & pages_of(self.mapped()):
                assert self.blocks.whole([block]) == [False]

    @rule(
        contents=st.sampled_from(["host", "discard"]),
        discard=st.booleans(),
        released=numbers,
        ends=st.booleans(),
    )
    def sleep(self, contents: str, discard: bool, released: list[int], ends: bool) -> None:
        """Blocks are released, and steps end, during the sleep too."""
        self.pool.wait_idle()
        self.pool.sleep(tag="kv", contents=contents)
        assert not any(self.blocks.whole(range(COUNT)))
        self.release(released)
        if ends and self.begun != self.ended:
            self.end_step()
        try:
            self.pool.wake(discard=discard)
        except vtensor.OutOfPages:
            self.rival.close()
            self.pool.wake(discard=discard)
        if discard or contents == "discard":
            for block in self.held & set(self.written):
                self.written[block] = 0

    @rule(pages=st.integers(1, 8))
    def another_tensor(self, pages: int) -> None:
        if not self.rival.take(pages, 255):
            assert len(pages_of(self.mapped())) + pages > BUDGET

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        assert self.blocks.mapped == len(self.mapped())
        whole = dict(enumerate(self.blocks.whole(range(COUNT))))
        assert all(whole[block] for block in self.held)
        for block in self.written:
            assert not whole[block] or self.has_what_was_written(block)
        assert self.blocks.arena.stats().pages_active == len(pages_of(self.mapped()))
        testing.check_invariants(self.pool)

    def teardown(self) -> None:
        self.blocks.arena.close()
        self.rival.close()
        self.pool.close()
        assert self.pool.stats().pages_used == 0


TestHost = case(BlocksMachine, 40, 40)
TestSimcuda = case(type("Simcuda", (BlocksMachine,), {"kind": "simcuda"}), 40, 40)


# --- held, released, held again ---------------------------------------------------------------------------


def test_a_released_block_keeps_what_it_holds_until_memory_is_short(blocks):
    assert blocks.hold([3, 9]) == ([], [3, 9])
    for part in parts_of(blocks.arena, 3):
        part.fill_(7)
    blocks.release([3])
    assert blocks.mapped == 1
    before = calls(blocks.arena.pool)
    assert blocks.whole([3]) == [True] and blocks.hold([3]) == ([3], [])
    assert calls_since(blocks.arena.pool, before) == {}  # I15
    assert all(bool(part.eq(7).all()) for part in parts_of(blocks.arena, 3))
    blocks.release([3])
    filled(blocks.arena.pool, (BUDGET - 3) * 4, 1).close()
    assert blocks.whole([3, 9]) == [False, True]
    assert blocks.hold([3]) == ([], [3])


@pytest.mark.exact
def test_neighbours_are_mapped_by_one_call(pool_factory):
    blocks = make(pool_factory("host", BUDGET, prefetch=0))
    before = calls(blocks.arena.pool)
    blocks.hold([7, 1, 0, 6, 2, 5, 4, 3])
    assert calls_since(blocks.arena.pool, before)["mmap"] == LAYERS


# --- ahead ------------------------------------------------------------------------------------------------


def test_a_prepared_block_is_held_without_a_call(blocks):
    blocks.hold([0])
    blocks.prepare([0, 2, 3])
    blocks.arena.pool.wait_idle()
    stats = blocks.arena.stats()
    assert stats.pages_prefetched == LAYERS and stats.pages_active == LAYERS and blocks.mapped == 1
    before = calls(blocks.arena.pool)
    assert blocks.hold([2]) == ([], [2])
    assert calls_since(blocks.arena.pool, before) == {}  # I15
    assert all(bool(part.eq(0).all()) for part in parts_of(blocks.arena, 2))


def test_preparing_takes_nothing_that_a_released_block_holds(blocks):
    blocks.hold([0, 2, 4, 6])
    blocks.release([0, 2, 4, 6])
    blocks.prepare(range(8, COUNT))
    blocks.arena.pool.wait_idle()
    assert blocks.whole([0, 2, 4, 6]) == [True] * 4
