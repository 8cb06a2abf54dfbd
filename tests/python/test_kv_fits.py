"""KVCache.fits: whether a step would be granted, asked without a change; groups that swap in brings back."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing

import pytest
import torch

import vtensor
from cuda_support import free_memory, needs_simcuda
from kv_support import MAX_BATCH, PAGE, RANGES, UNIT, filled, grown, lengths_with, make_cache, used
from support import draws, received, run_snippet
from vtensor import testing
from vtensor.testing.kv_model import check_contents


def lengths(*first: int) -> list[int]:
    return [*first, *[0] * (MAX_BATCH - len(first))]


def fits_and_steps(cache, wanted) -> bool:
    """What a step says, which the question before it said too."""
    before = (cache.lengths, cache.pool.stats().pages_used, cache.stats().prefix_tokens)
    answer = cache.fits(wanted)
    assert (cache.lengths, cache.pool.stats().pages_used, cache.stats().prefix_tokens) == before
    assert cache.step(wanted) == answer
    return answer


@pytest.fixture(params=["host", "simcuda", pytest.param("reserve", marks=needs_simcuda)])
def limited(request, pool_factory):
    """Makes pools with so many pages by their budget, or because the device has no more beside a reserve."""
    if request.param != "reserve":
        return lambda pages: pool_factory(request.param, pages)
    return lambda pages: pool_factory("simcuda", device_reserve=free_memory() - (pages + 1) * PAGE)


@pytest.mark.exact
def test_a_step_may_take_the_pages_that_replace_what_the_kernel_copied(pool_factory):
    pool = pool_factory("host", 2 * RANGES)
    with make_cache(pool) as cache:
        slot = filled(cache, UNIT - 1)
        (fork,) = cache.fork(slot)
        for layer in range(cache.num_layers):
            for rows in cache[layer]:
                rows[fork, 0] = 2
        stats = pool.stats()
        assert (stats.pages_used, stats.pages_free) == (2 * RANGES, 0)
        assert not cache.fits(lengths_with(cache, fork, UNIT + 1))
        assert fits_and_steps(cache, lengths_with(cache, fork, UNIT))


def test_prefixes_that_no_request_uses_make_room_for_all_that_the_pool_has(limited):
    pool = limited(6 * RANGES)
    tokens = list(range(4 * UNIT))
    with make_cache(pool) as cache, make_cache(pool) as other:
        for one in (cache, other):
            slot = one.alloc()
            assert not one.fits(lengths_with(one, slot, 7 * UNIT))
            assert fits_and_steps(one, lengths_with(one, slot, len(tokens)))
            one.publish(slot, tokens)
            one.free(slot)
        assert (cache.stats().prefix_tokens, other.stats().prefix_tokens) == (0, len(tokens))
        vtensor.empty(6 * RANGES, PAGE, grow_dim=0, capacity=100, dtype=torch.uint8, pool=pool).close()
        assert other.stats().prefix_tokens == 0


def test_cached_pages_that_a_reader_keeps_do_not_count(pool_factory):
    pool = pool_factory("host", 4 * RANGES, prefetch=8 * PAGE, cache=4 * RANGES * PAGE, shareable=True)
    with make_cache(pool) as cache:
        a, b = cache.alloc(), cache.alloc()
        assert grown(cache, a, 3 * UNIT)
        reader = received(cache)
        cache.free(a)
        pool.wait_idle()
        assert pool.stats().pages_cached == 3 * RANGES
        wanted = lengths_with(cache, b, 2 * UNIT)
        assert cache.fits(lengths_with(cache, b, UNIT))
        assert not cache.fits(wanted) and not cache.step(wanted)
        assert reader.sync() is True
        assert cache.fits(wanted) and cache.step(wanted)
        reader.close()


@pytest.mark.exact
def test_prefixes_that_would_be_given_up_count_and_stay(limited):
    with make_cache(limited(4 * RANGES)) as cache:
        slot = cache.alloc()
        grown(cache, slot, 3 * UNIT)
        cache.publish(slot, range(3 * UNIT))
        cache.free(slot)
        slot = cache.alloc()
        assert cache.fits(lengths(4 * UNIT))
        assert not cache.fits(lengths(4 * UNIT + 1))
        assert cache.stats().prefix_tokens == 3 * UNIT and cache.stats().prefix_evictions == 0
        assert grown(cache, slot, 4 * UNIT) and cache.stats().prefix_evictions == 3


@pytest.mark.exact
def test_pages_that_a_write_would_unshare(pool_factory, kind):
    with make_cache(pool_factory(kind, 2 * RANGES)) as cache:
        parent = cache.alloc()
        grown(cache, parent, UNIT - 1)
        forks = cache.fork(parent, 2)
        grows = [UNIT if at in (parent, *forks) else 0 for at in range(MAX_BATCH)]
        assert not cache.fits(grows)  # the last to unshare a page keeps it: two more are needed
        cache.free(forks[1])
        grows[forks[1]] = 0
        assert fits_and_steps(cache, grows)


def test_pages_of_other_tensors_that_are_kept_for_the_next(pool_factory):
    pool = pool_factory("host", 4 * RANGES, cache=1 << 20, prefetch=1 << 20)
    with make_cache(pool) as cache:
        cache.alloc()
        t = vtensor.zeros(4 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool)
        wanted = lengths(4 * UNIT)
        assert not cache.fits(wanted)
        t.close()
        assert cache.fits(wanted) and cache.step(wanted)


@pytest.mark.exact
def test_pages_that_work_still_uses_are_waited_for_if_asked(sim, stream_pool):
    """A request with nothing beside it is refused only once nothing more leaves."""
    with make_cache(stream_pool(4 * RANGES, cache=0)) as cache:
        stream = sim.stream(held=True)
        slot, other = cache.alloc(), cache.alloc()
        assert grown(cache, slot, 2 * UNIT) and grown(cache, other, 1)
        # Pages that the slot shares are not counted before they have left: the index may keep them.
        cache.publish(slot, range(UNIT))
        cache.record_stream(stream)
        cache.free(slot)
        wanted = [4 * UNIT if at == other else 0 for at in range(MAX_BATCH)]
        assert not cache.fits(wanted)
        threading.Timer(0.05, sim.release, [stream]).start()
        assert cache.fits(wanted, wait=True)
        begun = time.monotonic()
        wanted[other] += 1
        assert not cache.fits(wanted, wait=1)  # nothing leaves
        assert time.monotonic() - begun < 10


@pytest.mark.exact
def test_a_page_that_the_other_slot_truncates_needs_no_copy_once_it_has_left(sim, stream_pool):
    """It is copied while both have it, for which there is no page."""
    with make_cache(stream_pool(2 * RANGES)) as cache:
        slot = filled(cache, UNIT + 1)
        (fork,) = cache.fork(slot)
        stream = sim.stream(held=True)
        cache.truncate(slot, UNIT, stream)
        threading.Timer(0.05, sim.release, [stream]).start()
        assert grown(cache, fork, UNIT + 2) and used(cache) == 2 * RANGES
        check_contents(cache, fork, range(UNIT + 1))


def test_a_truncated_slot_asks_for_no_page_that_another_has(sim, stream_pool):
    """Nothing is ahead of need that would have to be copied (I4): the other slot keeps it alone."""
    with make_cache(stream_pool(2 * RANGES, prefetch=1 << 20), lookahead=UNIT) as cache:
        slot = filled(cache, UNIT + 1)
        (fork,) = cache.fork(slot)
        stream = sim.stream(held=True)
        cache.truncate(slot, UNIT - 1, stream)
        testing.check_invariants(cache.pool)
        sim.release(stream)
        cache.pool.wait_idle()
        assert fits_and_steps(cache, lengths_with(cache, fork, UNIT + 2))


@pytest.mark.exact
def test_slots_that_unshare_together_what_readers_may_see_take_a_page_each(pool_factory, kind):
    """None of them keeps the page: it stays for the readers (I5)."""
    with make_cache(pool_factory(kind, 2 * RANGES, shareable=True)) as cache:
        slot = filled(cache, UNIT // 2)
        cache.fork(slot)
        with closing(cache._core.open_for_readers()):
            assert not fits_and_steps(cache, [length and length + 1 for length in cache.lengths])
        testing.check_invariants(cache.pool)


@pytest.mark.exact
def test_pages_on_their_way_out_that_others_have_are_no_room_for_what_comes_back(sim, stream_pool):
    """A swapped slot comes back to pages of its own. Those that it shared leave it, and nothing gets them."""
    prompt = range(2 * UNIT + 1)
    with make_cache(stream_pool(4 * RANGES, cache=0)) as cache:
        slot = cache.alloc()
        assert grown(cache, slot, 3 * UNIT) and cache.publish(slot, prompt) == 2 * UNIT
        other = cache.alloc(prompt, salt="")
        assert grown(cache, other, 3 * UNIT) and used(cache) == 4 * RANGES
        stream = sim.stream(held=True)
        cache.record_stream(stream)
        cache.swap_out(slot)
        assert not cache.fits(lengths(3 * UNIT, 3 * UNIT))
        sim.release(stream)
        cache.wait(slot)
        assert not cache.fits(lengths(3 * UNIT, 3 * UNIT), wait=True)
        assert not cache.swap_in(slot)
        cache.free(other)
        assert cache.fits(lengths(3 * UNIT), wait=True) and cache.swap_in(slot)


@pytest.mark.exact
@pytest.mark.parametrize("seed", range(draws(12)))
def test_what_fits_once_all_has_left_comes_back(sim, stream_pool, seed):
    """Slots that share prefixes with each other and with the index, one of them on its way out."""
    chosen = random.Random(seed)
    for _ in range(60):
        # Some of them wait in vain for what the held stream keeps.
        pool = stream_pool(chosen.choice([8, 10, 12]) * RANGES, cache=chosen.choice([0, 1 << 20]), patience=1)
        with make_cache(pool) as cache:
            slots = []
            for _ in range(chosen.randint(2, 4)):
                prompt = range(first := chosen.choice([0, 1000]), first + 4 * UNIT)
                slot = cache.alloc(prompt, salt="")
                length = max(chosen.randint(1, 4) * UNIT, cache.lengths[slot])
                if not grown(cache, slot, length):
                    cache.free(slot)
                    continue
                slots.append(slot)
                if chosen.random() < 0.7:
                    cache.publish(slot, prompt[:length])
            away = chosen.choice(slots)
            length = cache.lengths[away]
            stream = sim.stream(held=True)
            cache.record_stream(stream)
            cache.swap_out(away)
            other = chosen.choice([slot for slot in slots if slot != away] or [None])
            if other is not None:
                grown(cache, other, cache.lengths[other] + UNIT)
            back = lengths_with(cache, away, length)
            at_once = cache.fits(back)
            sim.release(stream)
            at_last = cache.fits(back, wait=True)
            assert at_last or not at_once
            assert cache.swap_in(away) or not at_last


# --- swapping in


def group_of(cache, n: int, length: int) -> list[int]:
    parent = filled(cache, length)
    return [parent, *cache.fork(parent, n - 1)]


def away(cache, slots) -> None:
    cache.swap_out(slots)
    for slot in slots:
        cache.wait(slot)


@pytest.mark.exact
def test_a_group_comes_back_whole_or_not_at_all(pool_factory, kind):
    """I8, and what it shared is still shared: brought back one by one, it would have taken four times as
    many pages."""
    length = 4 * UNIT
    with make_cache(pool_factory(kind, 6 * RANGES)) as cache:
        group = group_of(cache, 4, length)
        single = cache.alloc()
        assert used(cache) == 4 * RANGES
        away(cache, group)
        assert grown(cache, single, 3 * UNIT)
        back = [length if at in group else 3 * UNIT if at == single else 0 for at in range(MAX_BATCH)]
        for _ in range(3):
            assert not cache.fits(back) and not cache.swap_in(group)
            assert cache.stats().slots_swapped == 4 and cache.lengths[single] == 3 * UNIT
            cache.pool.wait_idle()
            assert used(cache) == 3 * RANGES
        cache.truncate(single, UNIT)
        back[single] = UNIT
        assert cache.fits(back) and cache.swap_in(group)
        for slot in group:
            cache.wait(slot)
            check_contents(cache, slot, range(length))
        assert used(cache) == 5 * RANGES and cache.stats().nbytes_swapped == 0
        testing.check_invariants(cache.pool)


@pytest.mark.exact
def test_a_group_that_does_not_fit_leaves_no_pages_with_a_reader(pool_factory):
    """Its pages are found before the first of them is mapped."""
    pool = pool_factory("host", 6 * RANGES, shareable=True)
    with make_cache(pool) as cache:
        a, b = cache.alloc(), cache.alloc()
        assert cache.step(lengths(3 * UNIT, 3 * UNIT))
        cache.swap_out([a, b])
        pool.wait_idle()
        reader = received(cache)
        other = vtensor.empty(PAGE, grow_dim=0, capacity=PAGE, dtype=torch.uint8, pool=pool)
        assert not cache.swap_in([a, b]) and pool.stats().pages_held_by_readers == 0
        assert cache.swap_in([a])
        reader.close(), other.close()


@pytest.mark.exact
def test_a_group_of_which_some_are_back(pool_factory, kind):
    length = 2 * UNIT + 3
    with make_cache(pool_factory(kind, 400)) as cache:
        group = group_of(cache, 4, length)
        away(cache, group)
        assert cache.swap_in(group[2]) and cache.swap_in([group[3], group[0]]) and cache.swap_in((group[1],))
        for slot in group:
            cache.wait(slot)
            check_contents(cache, slot, range(length))
        assert used(cache) == (2 + 4) * RANGES  # the last, half-full pages are each slot's own


def test_wait_idle_waits_for_what_is_swapped():
    """Nothing is left to do after it: pages of a swapped slot are free, and copies have ended."""
    run_snippet(
        """
        for prefetch in (0, 1 << 20):
            pool = vtensor.Pool("cpu", page_size=4096, budget=256 << 20, prefetch=prefetch)
            cache = vtensor.KVCache(4, 4, 64, 4, 16384, torch.float32, pool=pool)
            slot = cache.alloc()
            for _ in range(3):
                assert cache.step([16384, 0, 0, 0])
                cache.swap_out(slot)
                pool.wait_idle()
                stats = pool.stats()
                assert stats.pages_used == stats.pages_mapped == 0, stats
                assert cache.swap_in(slot)
                pool.wait_idle()
                with vtensor.trace.record() as recording:
                    cache.wait(slot)
                assert not [event for event in recording.events() if event.what == "wait"]
            cache.close()
            pool.close()
        """
    ).check()
