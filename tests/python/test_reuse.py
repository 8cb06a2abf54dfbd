"""Reuse: a freed tensor stays mapped for the next of its shape, which never sees its bytes (I7, I15)."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import PER_PAGE, calls, calls_since, check_sums, eventually, filled, quarter
from vtensor import testing, together

PAGE = 4096


@pytest.fixture
def pool(pool_factory):
    """64 host pages, of which 32 may be cached; no look-ahead."""
    return pool_factory("host", cache=32 * PAGE)


def freed(pool, length, value=7, **kw):
    """Makes, fills and closes a tensor."""
    filled(pool, length, value, **kw).close()


# --- reuse --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["new_owner", "always"])
@pytest.mark.parametrize("rested", [True, False])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_the_next_of_its_shape_makes_no_driver_call_and_sees_zeros(pool_factory, policy, rested, rows):
    """Whether the mapper had time to zero the pages or not."""
    pool = pool_factory("host", cache=40 * PAGE, zero=policy)
    count = max(1, torch.Size(rows).numel())
    freed(pool, 40, rows=rows)
    stats = check_sums(pool)
    assert (stats.pages_cached, stats.tensors, stats.pages_used) == (10 * count, 0, 10 * count)
    for turn in range(20):
        if rested:
            pool.wait_idle()
        before = calls(pool)
        t = quarter(pool, 0, rows=rows)
        t.extend(17)
        assert not t.any()  # I7
        t.append(torch.full_like(t, turn + 1))
        t.extend(6)
        assert calls_since(pool, before) == {}
        assert t.length == 40 and not t.narrow(t.grow_dim, 34, 6).any()
        stats = check_sums(pool)
        assert (stats.pages_active, stats.pages_cached, stats.tensors) == (10 * count, 0, 1)
        testing.check_invariants(pool)
        t.fill_(9)
        t.close()
    assert pool.stats().tensors_reused == 20 and pool.stats().tensors_fresh == 1


@pytest.mark.parametrize("prepared", [True, False])
def test_the_mapper_zeroes_what_it_had_not_by_the_time_of_the_next_owner(sim, stream_pool, prepared):
    """Where a kernel of the last owner had not ended: for `prepare`, and for growth that looks ahead."""
    pool = stream_pool(prefetch=1 << 20, cache=40 * PAGE)
    stream = sim.stream(held=True)
    last = filled(pool, 64)
    sim.kernel(stream, last)
    last.close(stream=stream)
    with quarter(pool, 0) as t:
        assert pool.stats().tensors_reused == 1
        sim.release(stream)
        if prepared:
            t.prepare(64)
        else:
            t.extend(PER_PAGE).extend(PER_PAGE)
        pool.wait_idle()
        before = calls(pool)
        while t.length < t.capacity:
            t.extend(PER_PAGE)
        assert calls_since(pool, before) == {}
        assert not t.any()  # I7


def test_without_zeroing_it_may_show_what_was_left(pool_factory):
    pool = pool_factory("host", cache=32 * PAGE, zero="never")
    freed(pool, 20, 7)
    assert quarter(pool, 20).eq(7).all()


@pytest.mark.parametrize("policy", ["new_owner", "always", "never"])
@pytest.mark.parametrize("rested", [True, False])
def test_zeros_stay_zeros_whatever_the_policy(pool_factory, policy, rested):
    pool = pool_factory("host", cache=32 * PAGE, zero=policy)
    for _ in range(10):
        freed(pool, 40, 7, make=vtensor.zeros)
        if rested:
            pool.wait_idle()
        t = quarter(pool, 3, make=vtensor.zeros)
        assert not t.any()
        t.fill_(5)
        t.shrink(2).extend(30)
        assert t[0].eq(5).all() and not t[1:].any()
        t.close()
    assert pool.stats().tensors_reused > 0


MOVES = {
    "same": lambda t: t,
    "front": lambda t: t.shrink(8, front=True),  # pages given back come again, at other slots
    "reallocate": lambda t: t.reallocate(64),
    "reserve": lambda t: together.reserve(t, 64) or t,
    "reindex": lambda t: t.reindex([1, 1, 0]),
    "fork": lambda t: t.fork(),
    "when full": lambda t: t.extend(40 - t.length).fill_(5).truncate(5),
}


@pytest.mark.parametrize("policy", ["new_owner", "always", "never"])
@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("move", MOVES)
def test_zeros_stay_zeros_where_they_move(pool_factory, kind, policy, cut, move):
    pool = pool_factory(kind, zero=policy)
    t = quarter(pool, 15, rows=(2,), capacity=40, make=vtensor.zeros, when_full="move")
    t.fill_(5).shrink(1, front=True)
    cut == "before" and t.truncate(13)
    moved = MOVES[move](t)
    cut == "after" and moved.truncate(moved.length - 1)
    length = moved.length
    moved.extend(12)
    assert moved[:, :length].eq(5).all() and not moved[:, length:].any()
    t.close(), moved.close()


def test_zeros_and_empty_do_not_take_one_another_s_place(pool):
    freed(pool, 8, make=vtensor.zeros)
    t = quarter(pool, 8)
    stats = check_sums(pool)
    assert stats.tensors_reused == 0 and stats.pages_cached == 2 and not t.any()


def test_a_shorter_request_has_the_rest_ahead_and_a_longer_one_maps_the_rest(pool):
    freed(pool, 40)
    pool.wait_idle()
    before = calls(pool)
    short = quarter(pool, 6)
    assert calls_since(pool, before) == {}
    stats = check_sums(pool)
    assert (stats.pages_active, stats.pages_prefetched, stats.pages_cached) == (2, 8, 0)
    short.fill_(3)
    short.close()
    long = quarter(pool, 60)
    assert not long.any() and check_sums(pool).pages_active == 15
    assert calls_since(pool, before).keys() <= {"mmap", "madvise"}
    assert pool.stats().tensors_reused == 2


def test_the_next_owner_is_looked_ahead_for_by_its_own_pace(pool_factory):
    pool = pool_factory("host", prefetch=16 * PAGE, cache=32 * PAGE)
    t = quarter(pool, 0, capacity=64 * PER_PAGE)
    for _ in range(8):
        t.extend(PER_PAGE)
    t.close()
    pool.wait_idle()
    again = quarter(pool, 0, capacity=64 * PER_PAGE)
    again.extend(40 * PER_PAGE)  # a first call says nothing of those to come
    pool.wait_idle()
    stats = pool.stats()
    assert (stats.tensors_reused, stats.pages_active, stats.pages_prefetched) == (1, 40, 0)
    again.extend(PER_PAGE)
    again.extend(PER_PAGE)
    pool.wait_idle()
    assert pool.stats().pages_prefetched != 0


def test_another_shape_or_dtype_or_capacity_is_another_tensor(pool):
    freed(pool, 8)
    others = [quarter(pool, 8, capacity=60), quarter(pool, 8, rows=(2,))]
    assert pool.stats().tensors_reused == 0 and pool.stats().pages_cached == 2
    same_bytes = quarter(pool, 8, dtype=torch.int16)  # positions of as many bytes
    assert pool.stats().tensors_reused == 1 and not same_bytes.any()
    assert all(not t.any() for t in others)


# --- what is not cached -----------------------------------------------------------------------------------


def test_views_keep_their_pages_and_cache_them_when_they_end(pool):
    t = filled(pool, 20, 7)
    view = t[4:8]
    t.close()
    stats = check_sums(pool)
    assert (stats.pages_cached, stats.pages_pinned, stats.pages_orphaned) == (0, 5, 5)
    u = quarter(pool, 20)
    u.fill_(1)
    assert view.eq(7).all() and pool.stats().tensors_reused == 0
    view.fill_(8)
    assert u.eq(1).all()
    del view
    stats = check_sums(pool)
    assert (stats.pages_cached, stats.pages_pinned) == (5, 0)
    assert not quarter(pool, 20).any()
    assert pool.stats().tensors_reused == 1


def test_a_tensor_whose_first_page_is_gone_is_not_cached(pool):
    t = filled(pool, 20, 7)
    t.shrink(8, front=True)
    t.close()
    assert check_sums(pool).pages_mapped == 0
    empty = quarter(pool)
    empty.close()
    assert check_sums(pool).nbytes_reserved == 0


def test_without_look_ahead_nothing_is_cached_unless_asked_for(pool_factory):
    pool = pool_factory("host")
    freed(pool, 20)
    assert pool.stats().pages_mapped == 0
    with_default = pool_factory("host", prefetch=None)
    freed(with_default, 4 * 16)
    assert with_default.stats().pages_cached == 16  # a quarter of the budget
    freed(with_default, 4 * 17, capacity=70)
    eventually(lambda: with_default.stats().pages_cached == 16 and with_default.stats().pages_mapped == 16)


# --- limits -----------------------------------------------------------------------------------------------


def test_the_oldest_makes_room_within_the_limit(pool):
    for capacity in (64, 65, 66):
        freed(pool, 48, capacity=capacity)  # 12 pages
    assert check_sums(pool).pages_cached == 24
    quarter(pool, 1, capacity=65).close()
    quarter(pool, 1, capacity=66).close()
    assert pool.stats().tensors_reused == 2
    quarter(pool, 1, capacity=64).close()  # the oldest, that had to go
    assert pool.stats().tensors_reused == 2
    freed(pool, 33 * PER_PAGE, capacity=200)  # more than all that may be cached
    assert pool.stats().pages_cached <= 32


def test_trim_gives_it_back(pool):
    freed(pool, 40)
    pool.wait_idle()  # what the mapper is zeroing at the moment goes when it is done
    assert pool.trim() == 10 * PAGE
    stats = check_sums(pool)
    assert (stats.pages_cached, stats.pages_mapped, stats.pages_spare, stats.nbytes_reserved) == (0, 0, 0, 0)
