"""The defects that reading vAttention's code (arXiv 2405.04437) shows, each as a test of ours.

Its worker tells that it runs from inside its thread, so that a wait right after the start waits for nothing;
pages that several requests share are unmapped once for each; a refused driver call ends the process. And
looks at a cache beside its steps and its close."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import vtensor
from kv_support import grown
from support import calls, calls_since
from vtensor import testing
from vtensor.errors import Closed

TOKENS = 16  # to a page: 2 heads of 32 float32
ROWS = 4  # K and V of 2 layers


@pytest.fixture
def pool(pool_factory, kind):
    return pool_factory(kind, pages=400)


def make(pool, **options):
    options = {"max_batch": 6, "max_len": 10 * TOKENS, **options}
    return vtensor.KVCache(2, 2, 32, dtype=torch.float32, device=pool.device, tile=1, pool=pool, **options)


def write(cache, slot, start, stop, value):
    for layer in range(len(cache)):
        for tensor in cache[layer]:
            tensor[slot, start:stop] = value


def holds(cache, slot, start, stop, value):
    return all(
        bool((tensor[slot, start:stop] == value).all()) for layer in range(2) for tensor in cache[layer]
    )


def test_a_wait_right_after_the_worker_was_asked_waits_for_it(pool_factory, kind):
    """A pool's mapper starts with its first request here: a mapper that has not begun must not count as
    finished."""
    for _ in range(30):
        with pool_factory(kind, pages=400) as pool, make(pool, lookahead=3 * TOKENS) as cache:
            slot = cache.alloc()
            assert grown(cache, slot, 1)
            pool.wait_idle()
            assert cache.stats().pages_mapped == 4 * ROWS
            before = calls(pool)
            assert grown(cache, slot, 3 * TOKENS)
            assert not {"mmap", "cuMemMap", "cuMemSetAccess"} & set(calls_since(pool, before))
            write(cache, slot, 0, 3 * TOKENS, 7.0)


def test_steps_never_hand_out_what_the_worker_still_maps(pool_factory, kind):
    """The worker is asked for the very pages that the next step needs, without a wait in between."""
    pool = pool_factory(kind, pages=400)
    with make(pool, lookahead=2 * TOKENS) as cache:
        for turn in range(40):
            slot = cache.alloc()
            for length in range(TOKENS // 2, 10 * TOKENS, TOKENS // 2):
                assert grown(cache, slot, length)
                write(cache, slot, length - TOKENS // 2, length, float(turn))  # faults where it is not mapped
            assert holds(cache, slot, 0, 10 * TOKENS - TOKENS // 2, float(turn))
            cache.free(slot)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::3])
def test_shared_pages_are_unmapped_once_and_by_the_last(pool, order):
    with make(pool) as cache:
        slot = cache.alloc()
        assert grown(cache, slot, 3 * TOKENS + 4)
        write(cache, slot, 0, 3 * TOKENS + 4, 1.0)
        cache.publish(slot, list(range(3 * TOKENS)))
        family = [slot, *cache.fork(slot, 3)]
        assert cache.stats().pages_used == 4 * ROWS
        left = [family[i] for i in order]
        while left:
            cache.free(left.pop())
            testing.check_invariants(pool)
            for one in left:
                assert holds(cache, one, 0, 3 * TOKENS + 4, 1.0)
        again = cache.alloc([*range(3 * TOKENS), 99])
        assert cache.length(again) == 3 * TOKENS
        assert holds(cache, again, 0, 3 * TOKENS, 1.0)
        cache.free(again)
    pool.trim()
    assert pool.stats().pages_used == 0
    testing.check_invariants(pool)


def test_looks_beside_steps_and_a_close(pool_factory, kind):
    """lengths, states and counts are read by other threads while one steps, and then closes."""
    for turn in range(10):
        pool = pool_factory(kind, pages=400)
        cache = make(pool, lookahead=TOKENS)
        slots = [cache.alloc() for _ in range(6)]
        errors = []
        looked = threading.Event()
        looks = [0]

        def look(cache=cache, slots=slots, errors=errors, looked=looked, looks=looks):
            try:
                while True:
                    assert all(0 <= n <= 10 * TOKENS for n in cache.lengths)
                    assert cache.stats().slots_used in (6, 0)
                    cache.length(slots[0])
                    repr(cache)
                    looks[0] += 1
                    looked.set()
            except Closed:
                pass
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for length in range(1, 10 * TOKENS, 1 + turn):
            assert cache.step([length] * 6)
        assert looked.wait(20)
        cache.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not errors
        pool.close()
