"""Prompts that the mapper maps one iteration before they begin: the caller makes no driver call for them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import vtensor
from serving_support import HEAD_DIM, HEADS, LAYERS, PAGE, PAGE_TOKENS
from vtensor import testing
from vtensor.serving import Request, Scheduler, Status

MAX_LEN, LOOKAHEAD = 256, 2 * PAGE_TOKENS


def calls(cache) -> int:
    return sum(n for name, n in cache.stats().driver_calls["caller"].items() if name != "pagemap")


def iterate(scheduler):
    """One iteration, during which the mapper gets its work done."""
    plan = scheduler.plan()
    scheduler.cache.pool.wait_idle()
    scheduler.complete(plan)
    testing.check_invariants(scheduler.cache.pool)
    return plan


@pytest.fixture
def begun(pool_factory, kind):
    """Makes a scheduler whose first request decodes, over a cache of so many pages. Alone it begins at
    once."""
    with ExitStack() as stack:

        def make(pages, prompt, new):
            pool = pool_factory(kind, pages, prefetch=None)
            sizes = (LAYERS, HEADS, HEAD_DIM, 4, MAX_LEN, torch.float32, pool.device)
            options = {"layer_group": LAYERS, "tile": 1, "lookahead": LOOKAHEAD, "pool": pool}
            cache = stack.enter_context(vtensor.KVCache(*sizes, **options))
            scheduler = Scheduler(cache, token_budget=64)
            scheduler.add(Request("first", prompt, new))
            assert len(iterate(scheduler).admitted) == 1
            return scheduler

        yield make


def test_no_driver_call_for_a_prompt_beside_others(begun):
    scheduler = begun(1000, 8, 200)
    iterate(scheduler)
    before = calls(scheduler.cache)
    scheduler.add(Request("long", 150, 20))
    announced = iterate(scheduler)
    assert announced.admitted == [] and len(scheduler.waiting) == 1
    assert [group.request.id for group in iterate(scheduler).admitted] == ["long"]
    for _ in range(20):
        iterate(scheduler)
    assert calls(scheduler.cache) == before, "the caller mapped what was announced"


def test_no_mapping_call_for_prompts_with_a_common_beginning(begun):
    common = list(range(4 * PAGE_TOKENS))
    scheduler = begun(1000, 8, 200)
    cache = scheduler.cache

    def mapping_calls():
        names = ("mmap", "munmap", "cuMemMap", "cuMemUnmap", "cuMemSetAccess")
        made = cache.stats().driver_calls["caller"]
        return sum(made.get(name, 0) for name in names)

    scheduler.add(Request(0, [*common, 1000], 1))
    while len(scheduler.running) + len(scheduler.waiting) > 1:
        iterate(scheduler)
    iterate(scheduler)  # its pages are unmapped
    for i in range(1, 4):
        scheduler.add(Request(i, [*common, 1000 + i], 5))
        for _ in range(10):
            before = mapping_calls()
            scheduler.complete(scheduler.plan())
            assert mapping_calls() == before
            cache.pool.wait_idle()
    assert scheduler.stats.reused_tokens == 3 * len(common)


def test_the_next_tokens_are_announced_beside_a_prompt_that_does_not_fit(begun, monkeypatch):
    """Where there is no room for both, those that decode make no driver call all the same."""
    scheduler, asked = begun(1000, 8, 60), []
    prepare = scheduler.cache.prepare
    monkeypatch.setattr(scheduler.cache, "prepare", lambda n: asked.append(list(n)) or prepare(n))
    scheduler.add(Request("long", 150, 20))
    iterate(scheduler)
    alone, beside = asked[-2:]
    assert sum(alone) < 20 and sum(beside) == sum(alone) + 150


def test_announced_requests_begin_in_their_order(begun):
    scheduler = begun(1000, 8, 100)
    for i in range(3):
        scheduler.add(Request(i, 4 + 20 * (i == 0), 8))
    assert iterate(scheduler).admitted == []
    assert [group.request.id for group in iterate(scheduler).admitted] == [0, 1, 2]


@pytest.mark.parametrize("end", ["cancel", "abandon", "close"])
def test_an_announced_request_that_never_begins(begun, end):
    """Its slot, and the pages that were mapped for it, are free for others."""
    scheduler = begun(1000, 8, 6)
    cache = scheduler.cache
    scheduler.add(Request("long", 150, 4))
    plan = scheduler.plan()
    assert cache.stats().slots_used == 2
    if end == "close":
        return
    if end == "abandon":
        scheduler.abandon(plan)
    else:
        scheduler.complete(plan)
    scheduler.cancel("long")
    assert cache.stats().slots_used == 1
    while scheduler.unfinished:
        iterate(scheduler)
    assert cache.stats().slots_free == 4


def test_one_that_finds_no_room_holds_no_slot(begun):
    """A prompt whose pages cannot be had is found out before it is planned."""
    pages = 2 * (100 // PAGE_TOKENS)
    scheduler = begun(pages, 40, 30)
    scheduler.add(Request("large", 90, 4))
    for _ in range(5):
        plan = iterate(scheduler)
        assert plan.preempted == [] and scheduler.cache.stats().slots_used == 1
    done = []
    while scheduler.unfinished:
        done += [group.request.id for group in iterate(scheduler).ended]
    assert done == ["first", "large"]
    assert scheduler.cache.stats().nbytes_mapped <= pages * PAGE


def test_memory_that_goes_elsewhere_meanwhile(begun):
    """What was mapped ahead is given up for those that decode; the request waits, and comes later."""
    scheduler = begun(2 * 40, 8, 120)
    scheduler.add(Request("long", 100, 4))
    statuses = set()
    while scheduler.unfinished:
        statuses |= {group.status for group in iterate(scheduler).ended}
    assert statuses == {Status.FINISHED}
