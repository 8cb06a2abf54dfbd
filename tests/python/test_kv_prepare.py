"""KVCache.prepare: the mapper maps what a step will need, which makes no driver call (I8, I10, I15)."""

from __future__ import annotations

import time

import pytest
import torch

import vtensor
from kv_support import PAGE, RANGES, UNIT, filled, grown, lengths_with, make_cache, used
from support import calls, eventually
from vtensor import testing
from vtensor.testing.kv_model import check_contents, write

PROMPT = 5 * UNIT


@pytest.fixture
def pool_of(pool_factory, kind):
    """Makes pools that look ahead, of so many units of a slot."""
    return lambda units, **options: pool_factory(kind, units * RANGES, prefetch=1 << 20, **options)


def calls_of(pool) -> dict[str, int]:
    """By callers; not those of stats(), which counts what the kernel copied."""
    return {name: n for name, n in calls(pool).items() if name != "pagemap"}


def announced(cache, slot: int, length: int = PROMPT) -> bool:
    """Whether a step to `length` is ready at once; it is announced if not, by no driver call."""
    before, lengths = calls_of(cache.pool), cache.lengths
    answer = cache.prepare(lengths_with(cache, slot, length))
    assert calls_of(cache.pool) == before and cache.lengths == lengths
    return answer


def steps_without_a_call(cache, slot: int, length: int = PROMPT, *, prefix: int = 0) -> None:
    cache.pool.wait_idle()
    assert announced(cache, slot, length)
    before = calls_of(cache.pool)
    assert grown(cache, slot, length)
    assert calls_of(cache.pool) == before
    write(cache, slot, prefix, range(prefix, length))
    check_contents(cache, slot, range(length))
    testing.check_invariants(cache.pool)


@pytest.mark.parametrize("options", [{}, {"lookahead": 20}, {"tile": 12}, {"windows": [None, 20]}])
def test_a_step_that_was_announced(pool_of, options):
    with make_cache(pool_of(40), **options) as cache:
        slot, other = cache.alloc(), filled(cache, 3)
        assert not announced(cache, slot)
        steps_without_a_call(cache, slot)
        assert not announced(cache, other, 2 * UNIT + 1)
        steps_without_a_call(cache, other, 2 * UNIT + 1)


@pytest.mark.parametrize("idle", [True, False])
def test_pages_of_freed_slots(pool_of, idle):
    """The slot's own, which its last owner left, and those of others: no more than are missing."""
    with make_cache(pool_of(8)) as cache:
        for slot in [filled(cache, 2 * UNIT) for _ in range(4)]:
            cache.free(slot)
        if idle:
            cache.pool.wait_idle()
        slot = cache.alloc()
        assert not announced(cache, slot, 3 * UNIT)
        steps_without_a_call(cache, slot, 3 * UNIT)
        # A freed slot goes whole: one of the three that were left suffices.
        assert cache.pool.stats().pages_cached == 4 * RANGES
        assert used(cache) == 7 * RANGES


def test_pages_of_closed_tensors(pool_of, kind):
    pool = pool_of(8, cache=1 << 20)
    with make_cache(pool) as cache:
        t = vtensor.zeros(8 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool)
        t.close()
        pool.wait_idle()
        slot = cache.alloc()
        assert not announced(cache, slot, 6 * UNIT)  # is free beside it
        steps_without_a_call(cache, slot, 6 * UNIT)
        assert pool.stats().pages_cached == 8
        announced(cache, slot, 7 * UNIT)
        steps_without_a_call(cache, slot, 7 * UNIT)


def test_what_the_driver_refuses_the_mapper_is_raised_once(pool_factory):
    """I10: by wait_idle(), also if the slot has another owner by then."""
    with make_cache(pool_factory("host", 40 * RANGES, prefetch=1 << 20)) as cache:
        slot = cache.alloc()
        with testing.fail_after(cache.pool, 0, 1) as refused:
            cache.prepare(lengths_with(cache, slot, PROMPT))
            eventually(lambda: refused)
        assert grown(cache, slot, 1)
        cache.free(slot)
        assert cache.alloc() == slot
        with pytest.raises(vtensor.DriverError, match="refused"):
            cache.pool.wait_idle()
        assert grown(cache, slot, PROMPT)
        cache.pool.wait_idle()
        testing.check_invariants(cache.pool)


def published(cache, units: int) -> None:
    slot = filled(cache, units * UNIT)
    cache.publish(slot, range(units * UNIT))
    cache.free(slot)
    cache.pool.wait_idle()


def test_prefixes_that_no_request_uses(pool_of):
    with make_cache(pool_of(8)) as cache:
        published(cache, 6)
        slot = cache.alloc()
        assert not announced(cache, slot)
        assert cache.stats().prefix_tokens == 3 * UNIT  # of six units
        steps_without_a_call(cache, slot)


def test_a_request_that_begins_with_a_prefix(pool_of):
    with make_cache(pool_of(20)) as cache:
        published(cache, 3)
        slot = cache.alloc([*range(3 * UNIT), 1])
        assert cache.length(slot) == 3 * UNIT
        assert not announced(cache, slot)
        steps_without_a_call(cache, slot, prefix=3 * UNIT)


def test_what_does_not_fit_gives_nothing_up(pool_of):
    with make_cache(pool_of(9)) as cache:
        published(cache, 2)
        held = filled(cache, 3 * UNIT)
        for freed in [filled(cache, 2 * UNIT) for _ in range(2)]:
            cache.free(freed)
        cache.pool.wait_idle()
        slot = cache.alloc()  # has pages of one of these
        lengths = lengths_with(cache, slot, 7 * UNIT)
        for _ in range(2):
            assert not cache.prepare(lengths) and not cache.fits(lengths)
            cache.pool.wait_idle()
            assert cache.stats().prefix_tokens == 2 * UNIT
            assert used(cache) == 9 * RANGES
        cache.truncate(held, 2 * UNIT)
        assert not announced(cache, slot, 7 * UNIT)
        steps_without_a_call(cache, slot, 7 * UNIT)
        assert cache.stats().prefix_tokens == 0


def test_pages_on_their_way_out_are_waited_for(pool_of):
    """Memory that a truncated request has just given back: nothing else goes for it."""
    with make_cache(pool_of(8)) as cache:
        published(cache, 2)
        held = filled(cache, 6 * UNIT)
        slot = cache.alloc()
        cache.truncate(held, UNIT)
        assert not announced(cache, slot)
        steps_without_a_call(cache, slot)
        assert cache.stats().prefix_tokens == 2 * UNIT


def test_what_is_ready_goes_to_who_needs_it(pool_of):
    with make_cache(pool_of(8)) as cache:
        slot, other = cache.alloc(), cache.alloc()
        announced(cache, slot, 6 * UNIT)
        cache.pool.wait_idle()
        assert grown(cache, other, 6 * UNIT)
        assert not grown(cache, slot, 6 * UNIT)
        cache.free(other)
        assert grown(cache, slot, 6 * UNIT)
        testing.check_invariants(cache.pool)


def test_shared_pages_are_left_to_the_step(pool_of):
    with make_cache(pool_of(20)) as cache:
        parent = filled(cache, UNIT + 3)
        fork = cache.fork(parent)[0]
        assert not announced(cache, fork)
        cache.pool.wait_idle()
        assert not announced(cache, fork)
        assert grown(cache, fork, PROMPT)
        for slot in (parent, fork):
            check_contents(cache, slot, range(UNIT + 3))
        testing.check_invariants(cache.pool)


def test_an_announcement_wakes_the_mapper_for_pages_to_zero(sim, stream_pool):
    """Also where nothing is to be mapped. The pages are the slot's own, which its last owner left. It got
    them before that owner's kernel had ended, so the mapper had not zeroed them."""
    pool = stream_pool(40 * RANGES, prefetch=1 << 20)
    with make_cache(pool) as cache:
        slot = filled(cache, PROMPT)
        pool.wait_idle()
        stream = sim.stream(held=True)
        sim.kernel(stream, cache[0][0][slot, :PROMPT])
        cache.free(slot, stream)
        assert cache.alloc(expect=PROMPT) == slot
        sim.release(stream)
        assert grown(cache, slot, 3)
        cache.fork(slot)
        pool.wait_idle()
        time.sleep(0.02)  # the mapper sleeps by then
        assert not announced(cache, slot, 4)  # the step has to copy the shared page
        pool.wait_idle(timeout=5)
        assert grown(cache, slot, UNIT)
        steps_without_a_call(cache, slot)


def test_bands_that_differ_are_left_out(pool_of):
    with make_cache(pool_of(20), bands=2) as cache:
        slot = cache.alloc()
        assert cache.step(lengths_with(cache, slot, UNIT), bands=[0])
        lengths = lengths_with(cache, slot, PROMPT)
        assert not cache.prepare(lengths)
        cache.pool.wait_idle()
        assert cache.pool.stats().pages_prefetched == 0 and not cache.prepare(lengths)
        assert cache.step(lengths)


def test_a_pool_without_a_mapper(pool_factory, kind):
    with make_cache(pool_factory(kind, 8 * RANGES, prefetch=0)) as cache:
        slot = cache.alloc()
        assert not announced(cache, slot)
        assert used(cache) == 0
        assert grown(cache, slot, PROMPT)
        assert announced(cache, slot)


LENGTH = UNIT + 3


def swap(cache, slot):
    cache.swap_out(slot)
    cache.wait(slot)
    cache.pool.wait_idle()
    assert used(cache) == 0
    assert cache.swap_in(slot)
    cache.wait(slot)


# What is done to a slot, and the tokens that it has then.
FOLLOWS = {
    "free": (lambda cache, slot: (cache.free(slot), cache.alloc()), 0),
    "truncate": (lambda cache, slot: cache.truncate(slot, 5), 5),
    "truncate to nothing": (lambda cache, slot: cache.truncate(slot, 0), 0),
    "swap": (swap, LENGTH),
    "fork": (lambda cache, slot: cache.free(cache.fork(slot)[0]), LENGTH),
    "publish": (lambda cache, slot: cache.publish(slot, range(LENGTH)), LENGTH),
    "less": (lambda cache, slot: grown(cache, slot, LENGTH + UNIT), LENGTH),
    "close": (lambda cache, slot: cache.close(), None),
}


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("what", FOLLOWS)
def test_what_follows_an_announcement(pool_of, what, idle):
    """The request is whole whatever the mapper had done by then, and nothing is left in the end."""
    pool = pool_of(20)
    follow, length = FOLLOWS[what]
    with make_cache(pool) as cache:
        slot = filled(cache, LENGTH)
        assert not announced(cache, slot)
        if idle:
            pool.wait_idle()
        followed = follow(cache, slot)
        if what == "free":
            slot = followed[1]  # another one, if pages of the first are still on their way
        if length is not None:
            check_contents(cache, slot, range(length))
            testing.check_invariants(pool)
            announced(cache, slot)
            pool.wait_idle()
            assert grown(cache, slot, PROMPT)
            check_contents(cache, slot, range(length))
            testing.check_invariants(pool)
    pool.trim()
    pool.wait_idle()
    assert pool.stats().pages_used == 0


def test_what_is_announced_goes_before_what_looks_ahead(pool_of):
    """Requests that decode ask for more at each step, and get what the announced prompt leaves."""
    with make_cache(pool_of(14), lookahead=2 * UNIT) as cache:
        decoding = [filled(cache, 2) for _ in range(2)]
        published(cache, 6)
        assert used(cache) >= 12 * RANGES
        slot = cache.alloc()
        lengths = lengths_with(cache, slot, PROMPT)
        for turn in range(2):
            ready = cache.prepare(lengths)
            assert turn > 0 or not ready
            now = cache.lengths
            for at in decoding:
                now[at] += UNIT
            assert cache.step(now)
            for at in decoding:
                lengths[at] = now[at]
        cache.pool.wait_idle()
        cache.prepare(lengths)
        cache.pool.wait_idle()
        before = calls_of(cache.pool)
        assert cache.step(lengths)
        assert calls_of(cache.pool) == before
        testing.check_invariants(cache.pool)
