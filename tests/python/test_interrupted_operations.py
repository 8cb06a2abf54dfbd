"""Every operation, with an exception from outside before each of its bytecodes (I17): what is left is as
before it or as after it, can be used and closed, and leaks nothing (I14)."""

from __future__ import annotations

import contextlib
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vtensor
from interrupts import at_every_bytecode, place
from scenes import MORE, TABLE, Awake, Cache
from support import draws, every, filled, open_pool, quarter
from test_heap import allocate
from vtensor import testing
from vtensor._torch.memory import entered

ALL = {name: case for name, case in (TABLE | MORE).items() if name != "allocate"}  # which ctypes does
CACHES = sorted(name for name in ALL if ALL[name][0] is Cache and "close" not in name)
LONG = {"empty", "empty_like", "from_tensor", "adopt", "write", "publish"}


class Try:
    """A scene in a pool of its own."""

    def __init__(self, kind: str, make: type) -> None:
        self.pool = open_pool(kind, make.PAGES)
        self.scene = make(self.pool)

    def end(self, name: str) -> None:
        self.scene.end(name)
        self.pool.close()
        stats = self.pool.stats()
        assert (stats.pages_used, stats.nbytes_reserved, stats.tensors) == (0, 0, 0)


def after(kind: str, make: type, run, name: str):
    """What the scene is before the operation, and after it."""
    undisturbed = Try(kind, make)
    before = undisturbed.scene.facts()
    result = run(undisturbed.scene)
    facts = before, undisturbed.scene.facts()
    if hasattr(result, "close"):
        result.close()
    undisturbed.end(name)
    return facts


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if ALL[n][0] is Awake else n for n in ALL]
)
def test_an_operation_is_whole(kind, name):
    make, run = ALL[name]
    before, wanted = after(kind, make, run, name)

    def check(one: Try, outcome) -> None:
        if outcome.interrupted:
            assert one.scene.facts() in (before, wanted)
        else:
            assert one.scene.facts() == wanted
        if hasattr(outcome.result, "close"):
            outcome.result.close()
        if not one.pool.closed:
            testing.check_invariants(one.pool)
        if one.scene.facts() == before:
            one.scene.check()
            with contextlib.suppress(vtensor.Closed):
                run(one.scene)  # it can be done again
        one.end(name)

    stride = 4 if "make" in name or name in LONG else 1
    stride *= every(1) if kind == "simcuda" else 1
    at_every_bytecode(lambda: Try(kind, make), lambda one: run(one.scene), check, each=place, stride=stride)


@pytest.mark.thorough
@settings(max_examples=draws(30))
@given(
    history=st.lists(st.sampled_from(CACHES), max_size=5),
    what=st.sampled_from(CACHES),
    stride=st.integers(3, 30),
)
def test_whatever_came_before(history, what, stride):
    def attempt(one: Try, name: str) -> None:
        with contextlib.suppress(vtensor.VTensorError):  # a slot is free by now, or away
            ALL[name][1](one.scene)

    def setup() -> Try:
        one = Try("host", Cache)
        for name in history:
            attempt(one, name)
        return one

    undisturbed = setup()
    before = undisturbed.scene.facts()
    attempt(undisturbed, what)
    wanted = undisturbed.scene.facts()
    undisturbed.pool.close()

    def check(one: Try, outcome) -> None:
        assert one.scene.facts() in (before, wanted)
        testing.check_invariants(one.pool)
        one.scene.cache.close()
        one.pool.close()
        assert one.pool.stats().pages_used == 0

    at_every_bytecode(setup, lambda one: attempt(one, what), check, each=place, stride=stride)


def enter(context):
    return context.__enter__()


def test_a_failure_that_was_to_be_injected(pool_factory, kind):
    """Refuses no call of others."""
    pool = pool_factory(kind, 64)

    def check(injected, outcome):
        if not outcome.interrupted:
            injected.__exit__(None, None, None)
        filled(pool, 40).close()

    assert at_every_bytecode(lambda: testing.fail_after(pool, 0), enter, check) > 0


def test_a_heap_that_was_entered(pool_factory, kind):
    """Serves nothing outside."""
    heap = pool_factory(kind, 64)._heap("memory", "memory")

    def check(inside, outcome):
        if not outcome.interrupted:
            inside.__exit__(None, None, None)
        assert allocate(100) is None

    assert at_every_bytecode(lambda: entered(heap), enter, check) > 0


def test_a_module_that_is_adopted(pool_factory, kind):
    """Other threads may put it to sleep then: no lock is left behind."""

    def make():
        return pool_factory(kind, 64), torch.nn.Linear(3, 3)

    def check(made, outcome):
        pool = made[0]
        thread = Thread(target=pool.sleep, kwargs={"contents": "discard"}, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        pool.close()

    adopted = at_every_bytecode(make, lambda made: vtensor.adopt(made[1], made[0]), check, each=place)
    assert adopted > 0


def test_a_pool_that_is_closed(pool_factory, kind):
    """It is open as before, less the tensors that were closed by then; or closed, with all of them. What was
    moved into it stays until it is dropped."""

    def make():
        pool, layer = pool_factory(kind, 64), torch.nn.Linear(30, 30)
        vtensor.adopt(layer, pool)
        heap = pool._heaps["weights"]  # as a `with vtensor.memory()` keeps it
        return [pool, [filled(pool, 6, i + 1) for i in range(3)], heap, layer]

    def check(made, outcome):
        pool, tensors, *_ = made
        if pool.closed:
            assert all(t.closed for t in tensors)
            with pytest.raises(vtensor.Closed):
                quarter(pool, 1)
        else:
            for i, t in enumerate(tensors):
                assert t.closed or t.extend(1)[:6].eq(i + 1).all()
            filled(pool, 3).close()
        pool.close()
        stats = pool.stats()
        assert pool.closed and stats.tensors == 0 and stats.pages_used == stats.pages_orphaned > 0
        del made[3], _
        stats = pool.stats()
        assert stats.pages_used == stats.nbytes_reserved == 0

    assert at_every_bytecode(make, lambda made: made[0].close(), check) > 0
