"""KVCache by its promises: counts of pages and calls, sharing, swapping, and its life."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

import vtensor
from kv_support import MAX_BATCH, MAX_LEN, RANGES, SHAPES, UNIT, filled, grown, make_cache, used
from support import calls, calls_since, open_pool, run_together
from vtensor import testing
from vtensor.testing.kv_model import check_contents, write

# -- vAttention's calls


def test_addresses_never_change(cache):
    before = [(k.data_ptr(), v.data_ptr()) for k, v in (cache[layer] for layer in range(len(cache)))]
    slots = [cache.alloc() for _ in range(MAX_BATCH)]
    cache.step([MAX_LEN] * MAX_BATCH)
    for slot in slots:
        cache.free(slot)
    assert before == [(k.data_ptr(), v.data_ptr()) for k, v in (cache[layer] for layer in range(len(cache)))]


@pytest.mark.exact
@pytest.mark.parametrize("slots", [1, MAX_BATCH])
def test_a_step_is_one_batch(pool_factory, slots):
    """All layers of all slots at once: on CUDA one set-access a row, maps by page, and no wait in between."""
    with make_cache(pool_factory("simcuda", 400)) as cache:
        for _ in range(slots):
            cache.alloc()
        lengths = [3 * UNIT if slot < slots else 0 for slot in range(MAX_BATCH)]
        before = calls(cache.pool)
        with vtensor.trace.record() as recorded:
            assert cache.step(lengths)
        made = calls_since(cache.pool, before)
        assert made["cuMemMap"] == 3 * RANGES * slots and made["cuMemSetAccess"] == RANGES * slots
        assert sum(event.what == "map" for event in recorded.events()) == 1


@pytest.mark.exact
@pytest.mark.parametrize("tile", [1, 12, 64])
def test_a_lookahead_is_mapped_exactly(pool_factory, kind, tile):
    pool = pool_factory(kind, 400)
    with make_cache(pool, lookahead=20, tile=tile) as cache:
        slot = cache.alloc()
        for length in (1, 12, 13, 28, 29, 80, 110, MAX_LEN):
            assert grown(cache, slot, length)
            pool.wait_idle(10)
            stats = cache.stats()
            wanted = -(-min(MAX_LEN, length + tile - 1 + 20) // UNIT) * RANGES
            assert stats.pages_mapped == wanted, length
            assert stats.pages_active + stats.pages_prefetched == wanted


@pytest.mark.exact
@pytest.mark.parametrize("tile", [1, 12, 64])
def test_steps_over_pages_ahead_make_no_call(pool_factory, kind, tile):
    """I15."""
    pool = pool_factory(kind, 800)
    with make_cache(pool, lookahead=20, tile=tile) as cache:
        slots = [cache.alloc() for _ in range(4)]
        lengths = [1 if slot in slots else 0 for slot in range(MAX_BATCH)]
        cache.step(lengths)
        pool.wait_idle(10)
        before = calls(pool)
        for _ in range(90):
            lengths = [n + 1 if n else 0 for n in lengths]
            assert cache.step(lengths)
            pool.wait_idle(10)
        ours = {"cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxSetCurrent"}
        assert not {call for call in calls_since(pool, before) if call not in ours}


@pytest.mark.exact
@pytest.mark.parametrize("tile", [12, 64, MAX_LEN + 1, 2**62])
def test_a_tile_behind_the_length_is_mapped_and_finite(pool_factory, kind, tile):
    with make_cache(pool_factory(kind, 400), tile=tile) as cache:
        slot = cache.alloc()
        for length in sorted({1, min(tile, 80), min(tile + 1, 81), 90}):
            grown(cache, slot, length)
            end = min(MAX_LEN, length + tile - 1)
            k, v = cache[1]
            assert k[slot, :end].isfinite().all() and v[slot, length:end].eq(0).all()
            assert cache.stats().pages_active == -(-end // UNIT) * RANGES


# -- freed slots


def test_a_request_gets_the_slot_that_fits_best(cache):
    slots = [cache.alloc() for _ in range(3)]
    for slot, length in zip(slots, (100, 20, 50), strict=True):
        grown(cache, slot, length)
    for slot in slots:
        cache.free(slot)
    assert cache.alloc(expect=40) == slots[2]
    assert cache.alloc(expect=40) == slots[0]
    assert cache.alloc(expect=10) == slots[1]


# -- sharing


@pytest.mark.exact
def test_a_fork_takes_the_slot_that_keeps_the_least(cache):
    parent = filled(cache, 2 * UNIT)
    for slot in [filled(cache, length) for length in (7 * UNIT, 3 * UNIT, 5 * UNIT, UNIT, UNIT)]:
        cache.free(slot)
    cache.pool.wait_idle(10)
    kept = cache.stats().pages_cached
    cache.fork(parent)
    cache.pool.wait_idle(10)
    assert kept - cache.stats().pages_cached == RANGES


@pytest.mark.exact
def test_own_parts_what_is_written(cache):
    parent = filled(cache, 40)
    (fork,) = cache.fork(parent)
    before = used(cache)
    cache.unshare(fork, 0, 17)
    assert used(cache) == before + 2 * RANGES
    write(cache, fork, 0, range(100, 117))
    check_contents(cache, parent, range(40))
    check_contents(cache, fork, [*range(100, 117), *range(17, 40)])


@pytest.mark.exact
def test_a_beam_step_copies_and_maps_nothing_for_survivors(cache):
    beams = [cache.alloc() for _ in range(3)]
    for beam in beams:
        grown(cache, beam, 20)
        write(cache, beam, 0, [beam * 100 + at for at in range(20)])
    a, b, c = beams
    result = cache.reorder(beams, [c, c, a])
    assert result[0] == c and result[2] == a and result[1] not in (a, c)
    for slot, source in zip(result, (c, c, a), strict=True):
        check_contents(cache, slot, [source * 100 + at for at in range(20)])
    assert cache.stats().slots_used == 3
    before = calls(cache.pool)
    assert cache.reorder(result, result) == result
    assert set(calls_since(cache.pool, before)) <= {"pagemap"}  # the counting's own


@pytest.mark.exact
def test_prefixes_are_shared_by_whole_units(cache):
    prompt = list(range(3 * UNIT + 5))
    slot = cache.alloc(tokens=prompt)
    assert cache.length(slot) == 0
    grown(cache, slot, len(prompt))
    write(cache, slot, 0, prompt)
    assert cache.publish(slot, prompt) == 3 * UNIT
    before = used(cache)
    same, whole, shorter, other = (
        cache.alloc(tokens=prompt),
        cache.alloc(tokens=prompt[: 3 * UNIT]),  # never all of them: the last one must be computed
        cache.alloc(tokens=[*prompt[: UNIT + 3], 9999, 9999]),
        cache.alloc(tokens=prompt, salt="tenant"),
    )
    assert [cache.length(one) for one in (same, whole, shorter, other)] == [3 * UNIT, 2 * UNIT, UNIT, 0]
    assert used(cache) == before
    check_contents(cache, same, prompt[: 3 * UNIT])
    stats = cache.stats()
    assert stats.prefix_tokens == 3 * UNIT and stats.prefix_hits == 6 * UNIT and stats.unit == UNIT


@pytest.mark.exact
def test_prefixes_outlive_their_request_and_go_least_recently_used_first(pool_factory, kind):
    with make_cache(pool_factory(kind, 7 * RANGES)) as cache:
        old, new = [1] * (2 * UNIT + 1), [2] * (2 * UNIT + 1)
        for prompt in (old, new):
            slot = cache.alloc(tokens=prompt)
            grown(cache, slot, len(prompt))
            write(cache, slot, 0, range(len(prompt)))
            cache.publish(slot, prompt)
            cache.free(slot)
        using = cache.alloc(tokens=old)
        assert cache.length(using) == 2 * UNIT  # in use now, and the last used
        slot = cache.alloc()
        assert grown(cache, slot, 4 * UNIT)
        assert cache.stats().prefix_evictions == 1  # the last unit of `new`
        assert cache.length(cache.alloc(tokens=new)) == UNIT
        assert not grown(cache, slot, 6 * UNIT)  # what is in use is never given up
        check_contents(cache, using, range(2 * UNIT))


# -- windows


@pytest.mark.exact
def test_pages_before_a_window_go_back(pool_factory, kind):
    """At the step that leaves them behind, whole pages of what the last token saw are there, and no more."""
    pool = pool_factory(kind, 400)
    with make_cache(pool, "windows") as cache:
        slot = cache.alloc()
        windows = [window or MAX_LEN for window in SHAPES["windows"]["windows"]]
        for length in range(1, MAX_LEN + 1):
            grown(cache, slot, length)
            write(cache, slot, length - 1, [length])
            check_contents(cache, slot, range(1, length + 1), SHAPES["windows"]["windows"])
            pool.wait_idle(10)
            begins = [max(0, length - window) // UNIT for window in windows]
            assert cache.stats().pages_mapped == sum(2 * (-(-length // UNIT) - begin) for begin in begins)


# -- life


def test_threads_take_turns(pool_factory, kind):
    """Requests of several threads in one cache: no tokens are mixed up, and nothing is lost."""
    with make_cache(pool_factory(kind, 800), max_batch=16) as cache:
        turn = threading.Lock()

        def work(number):
            for round in range(15):
                with turn:
                    slot = cache.alloc(expect=20)
                values = [number * 1000 + round * 50 + at for at in range(20)]
                for at, value in enumerate(values):
                    with turn:
                        assert grown(cache, slot, at + 1)
                    write(cache, slot, at, [value])
                check_contents(cache, slot, values)
                with turn:
                    cache.free(slot)

        run_together(*(partial(work, number) for number in range(4)))
        testing.check_invariants(cache.pool)


@pytest.mark.alone
def test_an_alloc_does_not_look_at_all_slots():
    """Four times the slots take four times as long, not sixteen times."""

    def fastest(slots: int) -> float:
        times = []
        for _ in range(3):
            with open_pool("host", 400) as pool, make_cache(pool, "latent", max_batch=slots) as cache:
                start = time.thread_time()
                taken = [cache.alloc() for _ in range(slots)]
                for slot in taken:
                    cache.free(slot)
                assert {cache.alloc() for _ in range(slots)} == set(taken)
                times.append(time.thread_time() - start)
        return min(times)

    assert fastest(8000) < 8 * fastest(2000)
