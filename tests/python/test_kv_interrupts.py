"""I17: what comes from outside between two bytecodes finds a KVCache before the operation or behind it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vtensor
from interrupts import at_every_bytecode, place
from kv_support import MAX_BATCH, MAX_LEN, UNIT, make_cache
from support import draws, open_pool
from vtensor import testing
from vtensor.testing.kv_model import check_contents, write

LENGTH = 2 * UNIT + 3
PROMPT = list(range(LENGTH))


class Scene:
    """Slot 0: a request; 1: its fork; 2: one that is swapped out. The index has the prompt of slot 0."""

    def __init__(self) -> None:
        self.pool = open_pool("host", 400)
        self.cache = cache = make_cache(self.pool)
        assert cache.alloc(PROMPT) == 0
        assert cache.step([LENGTH, 0, 0, 0, 0, 0])
        write(cache, 0, 0, PROMPT)
        cache.publish(0, PROMPT)
        assert cache.fork(0) == [1]
        assert cache.alloc() == 2
        assert cache.step([LENGTH, LENGTH, 20, 0, 0, 0])
        write(cache, 2, 0, range(20))
        cache.swap_out(2)

    def state(self) -> tuple:
        stats = self.cache.stats()
        return (
            [self.cache.length(slot) for slot in range(MAX_BATCH)],
            stats.slots_used,
            stats.slots_swapped,
            stats.nbytes_swapped,
            stats.prefix_tokens,
            stats.prefix_queries,
        )

    def end(self) -> None:
        self.cache.close()
        self.pool.close()
        assert self.pool.stats().pages_used == 0


OPERATIONS = {
    "alloc": lambda cache: cache.alloc(),
    "alloc with a prompt": lambda cache: cache.alloc(PROMPT, salt="", expect=60),
    "step": lambda cache: cache.step([LENGTH + 20, LENGTH, 0, 0, 0, 0]),
    "prepare": lambda cache: cache.prepare([LENGTH + 20, LENGTH, 0, 0, 0, 0]),
    "free": lambda cache: cache.free(1),
    "free of a swapped request": lambda cache: cache.free(2),
    "truncate": lambda cache: cache.truncate(1, 20),
    "fork": lambda cache: cache.fork(0, 2),
    "reorder": lambda cache: cache.reorder([0, 1], [1, 1]),
    "publish": lambda cache: cache.publish(1, PROMPT, salt="other"),
    "unshare": lambda cache: cache.unshare(1, 0, LENGTH),
    "swap_out": lambda cache: cache.swap_out(0),
    "swap_out of a group": lambda cache: cache.swap_out([0, 1]),
    "swap_in": lambda cache: cache.swap_in(2),
    "wait": lambda cache: cache.wait(2),
    "record_stream": lambda cache: cache.record_stream(),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_is_whole(what):
    operation = OPERATIONS[what]
    undisturbed = Scene()
    before = undisturbed.state()
    operation(undisturbed.cache)
    after = undisturbed.state()
    undisturbed.end()

    def check(scene: Scene, outcome) -> None:
        state = scene.state()
        assert state in (before, after) and (outcome.interrupted or state == after)
        testing.check_invariants(scene.pool)
        cache = scene.cache
        lengths = state[0]
        for slot, written in ((0, PROMPT), (1, PROMPT), (2, range(20))):
            if lengths[slot] and cache.lengths[slot] == 0:
                assert cache.swap_in(slot)
            cache.wait(slot)
            check_contents(cache, slot, list(written)[: lengths[slot]])
        for slot in range(MAX_BATCH):  # every slot can be ended, and used again
            if slot < 3 and lengths[slot]:
                cache.free(slot)
        scene.end()

    places = at_every_bytecode(Scene, lambda scene: operation(scene.cache), check)
    assert places > 5


@pytest.mark.thorough
@settings(max_examples=draws(30))
@given(
    history=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=5),
    what=st.sampled_from(sorted(OPERATIONS)),
    stride=st.integers(3, 30),
)
def test_whatever_came_before(history, what, stride):
    """Every slot has the beginning of the prompt, as far as it is long: so has it afterwards."""

    def attempt(scene: Scene, name: str) -> None:
        try:
            OPERATIONS[name](scene.cache)
        except vtensor.VTensorError:  # a slot is free by now, or away
            pass

    def setup() -> Scene:
        scene = Scene()
        for name in history:
            attempt(scene, name)
        return scene

    undisturbed = setup()
    before = undisturbed.state()
    attempt(undisturbed, what)
    after = undisturbed.state()
    undisturbed.end()

    def check(scene: Scene, outcome) -> None:
        assert scene.state() in (before, after)
        testing.check_invariants(scene.pool)
        cache = scene.cache
        for slot in range(MAX_BATCH):
            if cache.length(slot) and not cache.lengths[slot]:
                assert cache.swap_in(slot)
            cache.wait(slot)
            check_contents(cache, slot, PROMPT[: cache.length(slot)])
        scene.end()

    at_every_bytecode(setup, lambda scene: attempt(scene, what), check, each=place, stride=stride)


def test_closing_is_whole():
    """Open, or closed, whatever of the views is gone by then: a second call ends it."""

    def check(scene: Scene, outcome) -> None:
        if scene.cache.closed:
            with pytest.raises(vtensor.Closed):
                scene.cache[0]
        else:
            check_contents(scene.cache, 0, PROMPT)
        scene.end()

    assert at_every_bytecode(Scene, lambda scene: scene.cache.close(), check) > 5


def test_a_cache_that_was_never_handed_out_leaves_nothing():
    def check(pool: vtensor.Pool, outcome) -> None:
        if not outcome.interrupted:
            outcome.result.close()
        del outcome
        pool.close()
        stats = pool.stats()
        assert stats.pages_used == 0 and stats.nbytes_reserved == 0

    def make(pool: vtensor.Pool) -> vtensor.KVCache:
        return make_cache(pool, max_len=MAX_LEN)

    assert at_every_bytecode(lambda: open_pool("host", 400), make, check, stride=3) > 100
