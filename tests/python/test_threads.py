"""Many threads: on tensors of their own over one pool, and on one tensor. Every wait is bounded."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from contextlib import suppress

import pytest
import torch

import vtensor
from kv_support import MAX_BATCH, MAX_LEN, UNIT, make_cache
from support import filled, quarter, run_together
from vtensor import testing

THREADS = 6


@pytest.fixture
def large(pool_factory, kind):
    return pool_factory(kind, pages=600)


@pytest.mark.exact
def test_tensors_of_one_pool(large):
    """Each thread grows, shrinks, shares and closes its own, and always sees its own number only."""

    def work(number):
        def body():
            for turn in range(25):
                t = filled(large, 3, number, rows=(2,), when_full="move")
                t.append(torch.full((2, 7, t.shape[2]), number, dtype=t.dtype))
                f = t.fork()
                f.fill_(number + 100)
                t.shrink(2, front=True).extend(5)[:, -5:].fill_(number)
                view = t[:, 1:4]
                r = t.reallocate(100)
                assert r.eq(number).all() and view.eq(number).all() and f.eq(number + 100).all()
                r.reindex([1, 0]).truncate(turn % 5)
                f.close()
                assert r.eq(number).all()

        return body

    run_together(*(work(i + 1) for i in range(THREADS)))
    testing.check_invariants(large)
    assert large.stats().pages_used == 0


def test_many_threads_append_to_one_tensor(large):
    t = quarter(large, capacity=2000)
    each = 60

    def work(number):
        def body():
            x = torch.full((2, t.shape[1]), number, dtype=torch.uint8)
            for _ in range(each):
                t.append(x)

        return body

    run_together(*(work(i + 1) for i in range(THREADS)))
    assert t.length == t.shape[0] == 2 * each * THREADS
    firsts = t[:, 0].tolist()
    assert t.eq(t[:, :1]).all(), "two appends wrote one position"
    for number in range(1, THREADS + 1):
        assert firsts.count(number) == 2 * each
    assert firsts[::2] == firsts[1::2], "an append was torn in two"


def test_aliases_beside_growth(large):
    """Readers take aliases: shape, address and contents always belong together."""
    t = vtensor.empty(2, 0, 64, grow_dim=1, capacity=4000, dtype=torch.int64, pool=large)
    done = threading.Event()
    seen = []

    def write():
        try:
            for i in range(1200):
                t.append(torch.full((2, 1, 64), i))
                if i % 100 == 99:
                    t.shrink(50)
                    for j in range(50):
                        t.append(torch.full((2, 1, 64), i - 49 + j))
        finally:
            done.set()

    def read():
        last = False
        while not last:
            last = done.is_set()
            s = t.alias()
            n = s.shape[1]
            assert s.shape == (2, n, 64) and type(s) is torch.Tensor
            if n > 60:  # the last fifty may be rewritten with what they held
                head = s[:, : n - 60]
                assert torch.equal(head, torch.arange(n - 60)[None, :, None].expand(2, -1, 64))
            seen.append(n)

    run_together(write, read, read)
    assert t.length == 1200 and max(seen) == 1200
    assert torch.equal(t, torch.arange(1200)[None, :, None].expand(2, -1, 64))


@pytest.mark.exact
def test_close_beside_growth(large):
    """Calls after the close raise Closed. Nothing crashes, and nothing is left."""
    for _ in range(20):
        t = filled(large, 3)
        x = torch.ones(1, t.shape[1], dtype=t.dtype)

        def grow(t=t, x=x):
            with suppress(vtensor.Closed):
                for _ in range(200):
                    t.append(x)
                    t.shrink(1)

        def close(t=t):
            time.sleep(0.001)
            t.close()

        run_together(grow, grow, close)
        assert t.closed
    del t, x, grow, close
    assert large.stats().pages_used == 0


@pytest.mark.exact
def test_pool_close_beside_everything(pool_factory, kind):
    """Torch's own work goes through aliases there: a kernel beside a close is its caller's race."""
    for _ in range(5):
        pool = pool_factory(kind, pages=600)

        def work(pool=pool):
            with suppress(vtensor.Closed):
                for i in range(300):
                    t = quarter(pool, 3)
                    s = t.alias()
                    s.fill_(i % 250)
                    f = t.extend(4).fork()
                    assert s.eq(i % 250).all() and f.alias()[:3].eq(i % 250).all()

        def close(pool=pool):
            time.sleep(0.01)
            pool.close()

        run_together(work, work, work, close)
        gc.collect()
        stats = pool.stats()
        assert pool.closed and (stats.pages_used, stats.tensors) == (0, 0)


def test_a_finalizer_of_the_tensor_inside_its_own_operation(pool):
    """One that calls an operation of the very tensor that is in one: an error, no deadlock."""
    t = filled(pool, 1, capacity=400)
    x = torch.ones(1, t.shape[1], dtype=t.dtype)
    outcomes = []

    class Node:
        def __init__(self):
            self.me = self

        def __del__(self):
            try:
                t.extend(0)
                outcomes.append("done")
            except vtensor.VTensorError:
                outcomes.append("refused")

    def work():
        for _ in range(100):
            Node()
            t.append(x)
            t.shrink(1)

    usual = gc.get_threshold()
    try:
        gc.set_threshold(1, 1, 1)
        run_together(work)
    finally:
        gc.set_threshold(*usual)
    gc.collect()
    assert outcomes and t.length == 1 and t.eq(1).all()


@pytest.mark.alone
def test_the_gil_is_free_while_pages_are_mapped(pool_factory):
    """A large map runs beside Python of another thread: that one is not stopped for half of it."""
    pool = pool_factory("host", pages=20000)
    ticks, maps = [], []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    def grow():
        try:
            for _ in range(5):
                t = vtensor.empty(400, 0, 4096, grow_dim=1, capacity=40, dtype=torch.uint8, pool=pool)
                begin = time.perf_counter()
                t.extend(40)
                maps.append((begin, time.perf_counter()))
                t.close()
        finally:
            done.set()

    def longest_stop(begin, end):
        within = [begin, *(tick for tick in ticks if begin < tick < end), end]
        return max(after - before for before, after in itertools.pairwise(within))

    run_together(grow, tick)
    # One is enough: others may stop the thread for longer, but each map would if it kept the GIL.
    assert any(longest_stop(begin, end) < (end - begin) / 2 for begin, end in maps)


def test_looks_at_a_cache_beside_its_steps_and_its_close(pool_factory, kind):
    """lengths, states and counts are read by other threads while one steps, and then closes."""
    for turn in range(10):
        pool = pool_factory(kind, pages=400)
        cache = make_cache(pool, lookahead=UNIT)
        slots = [cache.alloc() for _ in range(MAX_BATCH)]
        looked = threading.Event()

        def look(cache=cache, slots=slots, looked=looked):
            with pytest.raises(vtensor.Closed):
                while True:
                    assert all(0 <= n <= MAX_LEN for n in cache.lengths)
                    assert cache.stats().slots_used in (MAX_BATCH, 0)
                    cache.length(slots[0])
                    repr(cache)
                    looked.set()

        def step(cache=cache, looked=looked, turn=turn):
            try:
                for length in range(1, MAX_LEN, 1 + turn):
                    assert cache.step([length] * MAX_BATCH)
                assert looked.wait(20)
            finally:
                cache.close()

        run_together(look, look, step)
        pool.close()
