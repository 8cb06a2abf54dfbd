"""An arena: any pages of one flat range, for as long as blocks need them."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import vtensor
from machines import case
from support import Rival, eventually, filled, open_pool, quarter
from vtensor import testing

PAGE = 4096
BLOCK = 6144  # one and a half pages: neighbours share one
BLOCKS = 24
PAGES = BLOCKS * BLOCK // PAGE
FOREIGN = 255


def block(i: int) -> tuple[int, int]:
    return i * BLOCK, (i + 1) * BLOCK


def pages_of(blocks) -> set[int]:
    return {page for i in blocks for page in range(i * BLOCK // PAGE, -(-(i + 1) * BLOCK // PAGE))}


def content(arena: vtensor.Arena, i: int) -> torch.Tensor:
    begin, end = block(i)
    return arena.tensor[begin:end]


# --- random programs --------------------------------------------------------------------------------------


class ArenaMachine(RuleBasedStateMachine):
    """Blocks that come and go beside a tensor that wants the memory, against a count for every block."""

    kind, options = "host", {"prefetch": 0}
    budget = 16

    def __init__(self) -> None:
        super().__init__()
        self.pool = open_pool(self.kind, self.budget, **self.options)
        self.arena = vtensor.Arena(BLOCKS * BLOCK, pool=self.pool)
        self.uses = dict.fromkeys(range(BLOCKS), 0)
        self.written: dict[int, int] = {}  # of blocks in use
        self.bytes = {0}  # that were ever written here
        self.rival = Rival(self.pool, 8)
        self.met = False  # by the mapper, perhaps, and not raised yet: a refused call

    def used(self) -> list[int]:
        return [i for i, n in self.uses.items() if n]

    def attempt(self, operation, fail: int | None) -> bool:
        """Whether it was granted; else nothing has changed (I8).

        What a driver call refused is tried again: the mapper makes calls too, and equal draws are to make the
        same blocks whichever of them was refused.
        """
        active = self.arena.stats().pages_active
        try:
            if fail is None:
                operation()
            else:
                self.met = True
                with testing.fail_after(self.pool, fail):
                    operation()
            return True
        except vtensor.OutOfPages:
            if fail is not None:  # what was refused may have been to make room
                return self.attempt(operation, None)
        except vtensor.DriverError:
            assert fail is not None or self.met  # by the mapper, before (I10)
            self.met = fail is not None
            assert self.arena.stats().pages_active == active
            return self.attempt(operation, None)
        assert self.arena.stats().pages_active == active
        return False

    @rule(which=st.lists(st.integers(0, BLOCKS - 1), max_size=6), fail=st.none() | st.integers(0, 4))
    def map(self, which: list[int], fail: int | None) -> None:
        needed = pages_of(self.used()) | pages_of(which)
        held, kept = self.arena.holds([block(i) for i in which]), []
        if not self.attempt(lambda: kept.extend(self.arena.map([block(i) for i in which])), fail):
            others = self.pool.stats().pages_active - len(pages_of(self.used()))
            assert len(needed) + others > self.budget, "refused though there were pages"
            return
        if fail is None:  # a refused one may have given up some
            assert all(k for k, h in zip(kept, held, strict=True) if h)
        for i in which:
            self.uses[i] += 1
            assert {int(b) for b in content(self.arena, i).unique()} <= self.bytes, "another's bytes (I7)"

    @precondition(lambda self: self.used())
    @rule(data=st.data(), fail=st.none() | st.integers(0, 4))
    def unmap(self, data: st.DataObject, fail: int | None) -> None:
        which = data.draw(st.lists(st.sampled_from(self.used()), unique=True, min_size=1))
        # What the driver refuses of it waits, and is tried again.
        assert self.attempt(lambda: self.arena.unmap([block(i) for i in which]), fail)
        for i in which:
            self.uses[i] -= 1
            if not self.uses[i]:
                self.written.pop(i, None)

    @precondition(lambda self: self.used())
    @rule(data=st.data(), byte=st.integers(1, FOREIGN - 1))
    def write(self, data: st.DataObject, byte: int) -> None:
        i = data.draw(st.sampled_from(self.used()))
        content(self.arena, i).fill_(byte)
        self.written[i] = byte
        self.bytes.add(byte)

    @rule(which=st.lists(st.integers(0, BLOCKS - 1), max_size=4))
    def prepare(self, which: list[int]) -> None:
        assert self.attempt(lambda: self.arena.prepare([block(i) for i in which]), None)

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        assert self.attempt(lambda: self.pool.wait_idle(), None)
        assert self.arena.stats().nbytes_mapped == len(pages_of(self.used())) * PAGE

    @rule(which=st.lists(st.integers(0, BLOCKS - 1), max_size=6))
    def trim_some(self, which: list[int]) -> None:
        evicted = self.arena.stats().pages_evicted
        self.arena.trim([block(i) for i in which])
        assert self.arena.stats().pages_evicted == evicted
        assert self.attempt(lambda: self.pool.wait_idle(), None)
        mapped = {record.index for record in self.arena.pages()}
        assert mapped & pages_of(which) <= pages_of(self.used())

    @rule(contents=st.sampled_from(["host", "discard"]), discard=st.booleans())
    def sleep(self, contents: str, discard: bool) -> None:
        """Its pages come back, and what no block needs does not."""
        assert self.attempt(lambda: self.pool.wait_idle(), None)
        self.pool.sleep(tag="kv", contents=contents)
        assert not any(self.arena.holds([block(i) for i in range(BLOCKS)]))
        if not self.attempt(lambda: self.pool.wake(discard=discard), None):
            self.rival.close()
            assert self.attempt(lambda: self.pool.wake(discard=discard), None)
        if discard or contents == "discard":
            self.written = dict.fromkeys(self.written, 0)

    @rule(pages=st.integers(1, 8))
    def another_tensor(self, pages: int) -> None:
        """What the arena only keeps for later gives way to it."""
        if not self.rival.take(pages, FOREIGN):
            assert len(pages_of(self.used())) + pages > self.budget

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        for i, byte in self.written.items():
            assert content(self.arena, i).eq(byte).all()
        assert all(self.arena.holds([block(i) for i in self.used()]))

    @invariant()
    def counts_agree(self) -> None:
        stats = self.arena.stats()
        assert stats.pages_active == len(pages_of(self.used()))  # I4
        assert self.pool.stats().pages_used <= self.budget  # I5
        testing.check_invariants(self.pool)

    def teardown(self) -> None:
        self.arena.close()
        self.rival.close()
        self.pool.close()
        assert self.pool.stats().pages_used == 0


def machine(kind: str, **options):
    return case(type(f"{kind}{options}", (ArenaMachine,), {"kind": kind, "options": options}), 25, 30)


TestHost = machine("host", prefetch=0)
TestHostCaching = machine("host", prefetch=8 * PAGE, cache=16 * PAGE)
TestHostZeroing = machine("host", prefetch=8 * PAGE, cache=16 * PAGE, zero="always")
TestSimcuda = machine("simcuda", prefetch=0)
TestSimcudaCaching = machine("simcuda", prefetch=8 * PAGE, cache=16 * PAGE)


# --- what no block needs ----------------------------------------------------------------------------------


def test_the_oldest_goes_when_memory_is_short(pool_factory):
    page = 1 << 20
    pool = pool_factory("host", 20, page_size=page, prefetch=page, cache=20 * page)
    arena = vtensor.Arena(64 * page, pool=pool)
    arena.map([(0, 19 * page)])
    for i in range(19):
        arena.unmap([(i * page, (i + 1) * page)])
    with vtensor.empty(0, grow_dim=0, capacity=2 * page, dtype=torch.uint8, pool=pool) as other:
        other.extend(2 * page)
        kept = [record.index for record in arena.pages() if record.state == "cached"]
    assert kept == list(range(1, 19))  # one page was missing: the longest unused went
    assert arena.stats().pages_evicted == 1
    assert arena.holds([(page, 3 * page)]) == [True]
    assert not any(arena.holds([(0, page), (0, 2 * page), (19 * page, 20 * page)]))


@pytest.mark.exact
def test_what_blocks_held_comes_to_no_tensor(pool_factory, kind):
    """I7: not even to the one whose pages they were before."""
    pool = pool_factory(kind, 8, cache=0)
    filled(pool, 16, 3).close()
    t = filled(pool, 16, 1)
    t.truncate(0)
    with vtensor.Arena(8 * PAGE, pool=pool) as arena:
        arena.map([(0, 8 * PAGE)])
        arena.tensor.fill_(42)
        arena.unmap([(0, 8 * PAGE)])
        pool.wait_idle()
        t.extend(16)
        assert t.ne(42).all()


def test_a_zero_policy_that_asks_for_zeros_gets_them(pool_factory, kind):
    arena = vtensor.Arena(BLOCKS * BLOCK, pool=pool_factory(kind, 64, prefetch=8 * PAGE, zero="always"))
    arena.map([block(0)])
    content(arena, 0).fill_(5)
    arena.unmap([block(0)])
    arena.pool.wait_idle()
    arena.map([block(0)])
    assert not content(arena, 0).any()


# --- ahead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["new_owner", "always"])
def test_what_is_prepared_again_has_not_stayed(pool_factory, kind, zero):
    """I2: its pages came back with other contents, so `map` does not say that they are as they were."""
    pool = pool_factory(kind, 16, prefetch=8 * PAGE, cache=16 * PAGE, zero=zero)
    arena = vtensor.Arena(BLOCKS * BLOCK, pool=pool)
    two = [block(0), block(8)]
    arena.map(two)
    content(arena, 0).fill_(9)
    content(arena, 8).fill_(8)
    arena.unmap(two)
    arena.trim()
    pool.wait_idle()
    arena.prepare(two)
    pool.wait_idle()
    assert arena.stats().pages_prefetched == len(pages_of([0, 8]))
    assert arena.holds(two) == arena.map(two) == [False, False]
    content(arena, 0).fill_(7)
    assert arena.holds(two) == arena.map(two) == [True, True]


def test_what_the_mapper_meets_is_raised_by_the_next_operation(pool_factory):
    """I10."""
    pool = pool_factory("host", 16, prefetch=8 * PAGE)
    with vtensor.Arena(BLOCKS * BLOCK, pool=pool) as arena:

        def is_raised() -> bool:
            try:
                arena.prepare([block(0)])
            except vtensor.DriverError:
                return True
            return False

        def is_idle() -> bool:
            try:
                pool.wait_idle()
            except vtensor.DriverError:  # what it had met until then
                return False
            return True

        with testing.fail_after(pool, 0, 2**40):
            eventually(is_raised)
        eventually(is_idle)
        arena.map([block(0)])
        assert arena.stats().pages_active == 2


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 8 * PAGE], ids=["caller", "mapper"])
def test_pages_outlive_the_work_that_uses_them(sim, stream_pool, ahead):
    """I3: a page that no block needs is unmapped only after the work launched before has passed."""
    pool = stream_pool(prefetch=ahead, cache=0)
    arena = vtensor.Arena(8 * PAGE, pool=pool)
    arena.map([(0, 4 * PAGE)])
    sim.hold(0)
    sim.kernel(0, arena.tensor[: 4 * PAGE], writes=4)
    arena.unmap([(0, 4 * PAGE)])
    assert arena.stats().pages_pinned == 4
    arena.map([(0, PAGE)])  # back in use, with no wait
    assert (arena.stats().pages_active, arena.stats().pages_pinned) == (1, 3)
    sim.release(0)
    eventually(lambda: arena.stats().pages_pinned == 0)
    assert arena.stats().pages_active == 1 and arena.tensor[:PAGE].eq(4).all()


def test_pages_outlive_the_work_of_the_stream_that_an_arena_is_closed_on(sim, stream_pool):  # I3
    pool = stream_pool(prefetch=0, cache=0)
    arena = vtensor.Arena(4 * PAGE, pool=pool)
    arena.map([(0, 4 * PAGE)])
    stream = sim.stream(held=True)
    sim.kernel(stream, arena.tensor, writes=4)
    arena.close(stream=stream)
    assert pool.stats().pages_pinned == 4
    sim.release(stream)
    eventually(lambda: pool.stats().pages_pinned == 0)


def test_a_block_waits_on_the_device_for_the_zeroing_of_what_was_prepared(sim, stream_pool):
    """I7: prepared pages are zeroed on the side stream; the caller's kernels start behind that."""
    pool = stream_pool(prefetch=8 * PAGE, cache=0)
    filled(pool, 16, FOREIGN % 128).close()
    eventually(lambda: pool.stats().pages_mapped == 0)
    arena = vtensor.Arena(8 * PAGE, pool=pool)
    sim.hold()  # the side stream as well
    arena.prepare([(0, 3 * PAGE)])
    eventually(lambda: arena.stats().pages_prefetched == 3)
    sim.release(0)
    arena.map([(0, 3 * PAGE)])
    sim.kernel(0, arena.tensor[: 3 * PAGE], writes=7)
    assert sim.pending(0) > 0  # waits
    sim.release()
    assert arena.tensor[: 3 * PAGE].eq(7).all()


def test_more_goes_where_what_is_on_its_way_out_takes_long(sim, stream_pool):
    pool = stream_pool(pages=8, patience=20, prefetch=8 * PAGE, cache=8 * PAGE)
    held, free = (vtensor.Arena(4 * PAGE, pool=pool) for _ in range(2))
    stream = sim.stream(held=True)
    for arena in (held, free):
        arena.map([(0, 4 * PAGE)])
    sim.kernel(stream, held.tensor, writes=4)
    held.unmap([(0, 4 * PAGE)], stream=stream)
    free.unmap([(0, 4 * PAGE)])
    begun = time.monotonic()
    quarter(pool, 4).fill_(1)  # while the oldest pages wait for a kernel
    assert time.monotonic() - begun < 10
    assert held.stats().pages_pinned == 4 and free.stats().nbytes_mapped < 4 * PAGE


# --- ends -------------------------------------------------------------------------------------------------


def test_views_outlive_a_closed_arena(pool_factory):
    """I3: they keep the addresses, which read as zeros."""
    pool = pool_factory("host", 64)
    arena = vtensor.Arena(BLOCKS * BLOCK, pool=pool)
    arena.map([block(0)])
    content(arena, 0).fill_(7)
    view = arena.tensor[:BLOCK]
    arena.close()
    pool.wait_idle()
    assert pool.stats().pages_used == 0 and pool.stats().nbytes_reserved == PAGES * PAGE
    assert not view.any()
    del view, arena
    eventually(lambda: pool.stats().nbytes_reserved == 0)


# --- arguments --------------------------------------------------------------------------------------------


def test_nothing_asked_is_nothing_done(pool):
    arena = vtensor.Arena(BLOCKS * BLOCK, pool=pool)
    arena.map([])
    arena.map([(5, 5)])
    arena.unmap([])
    arena.prepare([(7, 7)])
    assert arena.stats().nbytes_mapped == 0
