"""Prefixes that are published and shared without a mapping call by the caller (I6, I8, I15)."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import pytest

import vtensor
from kv_support import RANGES, UNIT, filled, grown, lengths_with, make_cache
from support import calls_since, eventually
from vtensor import testing
from vtensor.testing.kv_model import check_contents, expected, write

PREFIX, PROMPT = 3 * UNIT, 5 * UNIT
TOKENS = list(range(PROMPT))
MAPPING = {"mmap", "munmap", "cuMemMap", "cuMemUnmap", "cuMemSetAccess"}


@pytest.fixture
def cache(pool_factory, kind):
    pool = pool_factory(kind, 40 * RANGES, prefetch=1 << 20)
    with make_cache(pool, lookahead=UNIT) as cache:
        yield cache


def mapping_calls(cache, operation) -> dict[str, int]:
    """What the calling thread maps and unmaps during an operation."""
    before = cache.pool.stats().driver_calls["caller"]
    operation()
    return {name: n for name, n in calls_since(cache.pool, before).items() if name in MAPPING}


def published(cache, tokens: int = PREFIX) -> int:
    """A slot that has published its first tokens, whose K and V hold their numbers."""
    slot = filled(cache, tokens)
    cache.pool.wait_idle()
    assert not mapping_calls(cache, lambda: cache.publish(slot, TOKENS[:tokens]))
    return slot


def shared(cache, *, publisher_stays: bool = False) -> int:
    """A slot that begins with a published prefix, which is not mapped yet."""
    publisher = published(cache)
    if publisher_stays:
        cache.alloc(tokens=TOKENS)  # after which the publisher's writes do not reach the pages
    else:
        cache.free(publisher)
    cache.pool.wait_idle()
    slots: list[int] = []
    assert not mapping_calls(cache, lambda: slots.append(cache.alloc(tokens=TOKENS, deferred=True)))
    slot = slots[0]
    assert cache.length(slot) == PREFIX and not mapped(cache, slot)
    return slot


def mapped(cache, slot: int) -> int:
    """Pages of the prefix that are mapped."""
    return sum(page.index < PREFIX // UNIT for page in cache.pages(slot))


def holds(cache, slot: int, length: int = PREFIX) -> None:
    check_contents(cache, slot, TOKENS[:length])
    testing.check_invariants(cache.pool)


# --- the mapper maps what is shared


@pytest.mark.parametrize("publisher_stays", [False, True])
def test_the_mapper_maps_a_prefix_and_the_rest_of_the_prompt(cache, publisher_stays):
    slot = shared(cache, publisher_stays=publisher_stays)
    lengths = lengths_with(cache, slot, PROMPT)
    assert not mapping_calls(cache, lambda: cache.prepare(lengths))
    eventually(lambda: cache.prepare(lengths))
    cache.pool.wait_idle()
    assert not mapping_calls(cache, lambda: cache.step(lengths))
    write(cache, slot, PREFIX, TOKENS[PREFIX:])
    holds(cache, slot, PROMPT)


def test_prepare_is_false_until_the_prefix_is_mapped(cache):
    slot = shared(cache)
    assert not cache.prepare(lengths_with(cache, slot, PREFIX))
    cache.pool.wait_idle()
    assert cache.prepare(lengths_with(cache, slot, PREFIX))
    assert mapped(cache, slot) == PREFIX // UNIT * RANGES


def test_calls_refused_to_the_mapper_are_made_by_the_step(cache):
    slot = shared(cache)
    lengths = lengths_with(cache, slot, PROMPT)
    with testing.fail_after(cache.pool, 0, refuse=1_000_000):
        cache.prepare(lengths)
        with pytest.raises(vtensor.DriverError):
            cache.pool.wait_idle()
        testing.check_invariants(cache.pool)
    assert cache.step(lengths)
    write(cache, slot, PREFIX, TOKENS[PREFIX:])
    holds(cache, slot, PROMPT)


# --- the mapper is late: whatever comes first maps the prefix

FIRST = {
    "a step": lambda cache, slot: cache.step(lengths_with(cache, slot, PREFIX + 1)),
    "a step of the same length": lambda cache, slot: cache.step(cache.lengths),
    "a step of a band": lambda cache, slot: cache.step(cache.lengths, bands=[0]),
    "a wait": lambda cache, slot: cache.wait(slot),
    "a fork": lambda cache, slot: cache.fork(slot),
    "a beam": lambda cache, slot: cache.reorder([slot], [slot]) and cache.fork(slot),
    "a swap": lambda cache, slot: (cache.swap_out(slot), cache.swap_in(slot), cache.wait(slot)),
    "a cut": lambda cache, slot: cache.truncate(slot, UNIT),
    "a publication": lambda cache, slot: (cache.publish(slot, TOKENS[:PREFIX]), cache.wait(slot)),
    "a part": lambda cache, slot: cache.unshare(slot, 0, 1),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("prepared", [False, True])
def test_the_mapper_is_late(cache, first, prepared):
    slot = shared(cache)
    if prepared:
        cache.prepare(lengths_with(cache, slot, PROMPT))
    FIRST[first](cache, slot)
    holds(cache, slot, min(PREFIX, cache.length(slot)))


@pytest.mark.parametrize("first", FIRST)
def test_every_call_refused_once(cache, first):
    cache.free(shared(cache))
    for nth in count():
        cache.pool.wait_idle()
        slot = cache.alloc(tokens=TOKENS, deferred=True)
        length = cache.length(slot)
        assert length == PREFIX and not mapped(cache, slot)
        with testing.fail_after(cache.pool, nth) as refused:
            try:
                FIRST[first](cache, slot)
            except vtensor.DriverError:
                assert cache.length(slot) == length
        made = not refused
        if cache.lengths[slot] != 0:
            cache.wait(slot)
            holds(cache, slot, min(PREFIX, cache.length(slot)))
        for held in range(cache.max_batch):
            with suppress(vtensor.InvalidArgument):  # it is free
                cache.free(held)
        with suppress(vtensor.DriverError):  # of the mapper's, looking ahead
            cache.pool.wait_idle()
        testing.check_invariants(cache.pool)
        if made:
            return


def test_one_that_is_freed_first_maps_nothing(cache):
    slot = shared(cache)
    assert not mapping_calls(cache, lambda: cache.free(slot))
    cache.pool.wait_idle()
    again = cache.alloc(tokens=TOKENS)
    holds(cache, again)


def test_a_prefix_that_a_slot_is_to_have_is_not_evicted(pool_factory, kind):
    pool = pool_factory(kind, 4 * RANGES, prefetch=1 << 20)
    with make_cache(pool, lookahead=UNIT) as cache:
        slot = shared(cache)
        other = cache.alloc()
        assert not grown(cache, other, PREFIX)
        assert grown(cache, other, UNIT)
        assert cache.stats().prefix_evictions == 0
        cache.wait(slot)
        holds(cache, slot)


def test_without_look_ahead_alloc_maps_it(pool_factory, kind):
    with make_cache(pool_factory(kind, 40 * RANGES)) as cache:
        cache.publish(filled(cache, PREFIX), TOKENS[:PREFIX])
        slot = cache.alloc(tokens=TOKENS, deferred=True)
        holds(cache, slot)


# --- what is published stays as it was


def rewritten(cache, slot: int, start: int) -> None:
    cache.unshare(slot, start, PREFIX)
    write(cache, slot, start, [100] * (PREFIX - start))


def written(cache, slot: int, start: int) -> None:
    for layer in range(len(cache)):
        cache.write(layer, slot, start, *expected(cache, layer, [100] * (PREFIX - start)))


def cut_and_rewritten(cache, slot: int, start: int) -> None:
    cache.truncate(slot, start)
    assert grown(cache, slot, PREFIX)
    write(cache, slot, start, [100] * (PREFIX - start))


@pytest.mark.parametrize("change", [rewritten, written, cut_and_rewritten])
@pytest.mark.parametrize(
    "start, away", [(0, False), (1, False), (UNIT, False), (PREFIX - 1, False), (1, True)]
)
@pytest.mark.parametrize("sharer_first", [False, True])
def test_the_publisher_writes_to_what_it_published(cache, change, start, sharer_first, away):
    publisher = published(cache)
    if away:
        cache.swap_out(publisher)
        assert cache.swap_in(publisher)
        cache.wait(publisher)
    slot = cache.alloc(tokens=TOKENS, deferred=True) if sharer_first else None
    change(cache, publisher, start)
    if slot is None:
        slot = cache.alloc(tokens=TOKENS)
    assert cache.length(slot) == PREFIX
    cache.wait(slot)
    holds(cache, slot)
    check_contents(cache, publisher, [*TOKENS[:start], *[100] * (PREFIX - start)])
