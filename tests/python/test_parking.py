"""Parking: a freed tensor stays mapped for the next of its shape, which never sees its bytes (I7, I15)."""

from __future__ import annotations

import gc

import pytest
import torch

import vtensor
from support import PER_PAGE, calls, calls_since, check_sums, eventually, filled, memfds, quarter
from vtensor import testing

PAGE = 4096
POLICIES = ["new_owner", "always"]


@pytest.fixture
def parking(pool_factory):
    """64 host pages, of which 32 may be parked; no look-ahead."""
    return pool_factory("host", park=32 * PAGE)


def freed(pool, length, value=7, **kw):
    """Makes, fills and closes a tensor."""
    filled(pool, length, value, **kw).close()


# --- adoption ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rested", [True, False])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_the_next_of_its_shape_makes_no_driver_call_and_sees_zeros(pool_factory, policy, rested, rows):
    """Whether the mapper had time to zero the pages or not."""
    pool = pool_factory("host", park=40 * PAGE, zero=policy)
    count = max(1, torch.Size(rows).numel())
    freed(pool, 40, rows=rows)
    stats = check_sums(pool)
    assert (stats.pages_parked, stats.tensors, stats.pages_used) == (10 * count, 0, 10 * count)
    for turn in range(20):
        if rested:
            pool.wait_idle(5)
        before = calls(pool)
        t = quarter(pool, 0, rows=rows)
        t.extend(17)
        assert not t.any()  # I7
        t.append(torch.full_like(t, turn + 1))
        t.extend(6)
        assert calls_since(pool, before) == {}
        assert t.length == 40 and not t.narrow(t.grow_dim, 34, 6).any()
        stats = check_sums(pool)
        assert (stats.pages_active, stats.pages_parked, stats.tensors) == (10 * count, 0, 1)
        testing.check_invariants(pool)
        t.fill_(9)
        t.close()
    assert pool.stats().tensors_adopted == 20 and pool.stats().tensors_fresh == 1


def test_without_zeroing_it_may_show_what_was_left(pool_factory):
    pool = pool_factory("host", park=32 * PAGE, zero="never")
    freed(pool, 20, 7)
    assert quarter(pool, 20).eq(7).all()
    pool.trim()
    freed(pool, 20, 7, make=vtensor.zeros)
    assert not quarter(pool, 20, make=vtensor.zeros).any()


@pytest.mark.parametrize("policy", ["new_owner", "always", "never"])
@pytest.mark.parametrize("rested", [True, False])
def test_zeros_stay_zeros_whatever_the_policy(pool_factory, policy, rested):
    pool = pool_factory("host", park=32 * PAGE, zero=policy)
    for _ in range(10):
        freed(pool, 40, 7, make=vtensor.zeros)
        if rested:
            pool.wait_idle(5)
        t = quarter(pool, 3, make=vtensor.zeros)
        assert not t.any()
        t.fill_(5)
        t.shrink(2).extend(30)
        assert t[0].eq(5).all() and not t[1:].any()
        t.close()
    assert pool.stats().tensors_adopted > 0


def test_zeros_and_empty_do_not_take_one_another_s_place(parking):
    freed(parking, 8, make=vtensor.zeros)
    t = quarter(parking, 8)
    stats = check_sums(parking)
    assert stats.tensors_adopted == 0 and stats.pages_parked == 2 and not t.any()


def test_a_shorter_request_has_the_rest_ahead_and_a_longer_one_maps_the_rest(parking):
    freed(parking, 40)
    parking.wait_idle(5)
    before = calls(parking)
    short = quarter(parking, 6)
    assert calls_since(parking, before) == {}
    stats = check_sums(parking)
    assert (stats.pages_active, stats.pages_prefetched, stats.pages_parked) == (2, 8, 0)
    short.fill_(3)
    short.close()
    long = quarter(parking, 60)
    assert not long.any() and check_sums(parking).pages_active == 15
    assert calls_since(parking, before).keys() <= {"mmap", "madvise"}
    assert parking.stats().tensors_adopted == 2


def test_another_shape_or_dtype_or_capacity_is_another_tensor(parking):
    freed(parking, 8)
    others = [quarter(parking, 8, capacity=60), quarter(parking, 8, rows=(2,))]
    assert parking.stats().tensors_adopted == 0 and parking.stats().pages_parked == 2
    same_bytes = quarter(parking, 8, dtype=torch.int16)  # positions of as many bytes
    assert parking.stats().tensors_adopted == 1 and not same_bytes.any()
    assert all(not t.any() for t in others)


def test_what_the_adopted_owner_grows_into_is_zeroed_as_it_comes(parking):
    """Step by step into pages that the mapper may be zeroing at the moment."""
    for turn in range(30):
        freed(parking, 100 if turn % 2 else 128, 7, capacity=128)
        t = quarter(parking, 0, capacity=128)
        for _ in range(32):
            t.extend(4)
            assert not t[-4:].any()
            t[-4:].fill_(3)
        assert t.eq(3).all()
        t.shrink(64)
        t.extend(64)
        assert t[:64].eq(3).all() and set(t.numpy().tobytes()) <= {0, 3}
        t.close()


def test_what_is_on_its_way_out_is_not_adopted(pool_factory):
    """Behind what is parked the owner had shared pages: the next must not grow into them (I6, I7)."""
    pool = pool_factory("host", 512, ahead=16 * PAGE, park=256 * PAGE)
    for _ in range(300):
        t = filled(pool, 32, 7)
        f = t.fork()
        t.unshare(0, 8)
        t.close()
        u = quarter(pool, 32)
        assert not u.any()
        u.fill_(1)
        assert f.eq(7).all()
        u.close()
        f.close()


# --- what is not parked -----------------------------------------------------------------------------------


def test_views_keep_their_pages_and_park_them_when_they_end(parking):
    t = filled(parking, 20, 7)
    view = t[4:8]
    t.close()
    stats = check_sums(parking)
    assert (stats.pages_parked, stats.pages_pinned, stats.pages_orphaned) == (0, 5, 5)
    u = quarter(parking, 20)
    u.fill_(1)
    assert view.eq(7).all() and parking.stats().tensors_adopted == 0
    view.fill_(8)
    assert u.eq(1).all()
    del view
    stats = check_sums(parking)
    assert (stats.pages_parked, stats.pages_pinned) == (5, 0)
    assert not quarter(parking, 20).any()
    assert parking.stats().tensors_adopted == 1


def test_forks_are_not_parked(parking):
    t = filled(parking, 20, 7)
    f = t.fork()
    f.close()
    t.close()
    stats = check_sums(parking)
    assert stats.pages_parked == 0 and stats.pages_used == 0


def test_a_tensor_whose_first_page_is_gone_is_not_parked(parking):
    t = filled(parking, 20, 7)
    t.shrink(8, front=True)
    t.close()
    assert check_sums(parking).pages_mapped == 0
    empty = quarter(parking)
    empty.close()
    assert check_sums(parking).nbytes_reserved == 0


def test_without_look_ahead_nothing_is_parked_unless_asked_for(pool_factory):
    pool = pool_factory("host")
    freed(pool, 20)
    assert pool.stats().pages_mapped == 0
    with_default = pool_factory("host", ahead=None)
    freed(with_default, 4 * 16)
    assert with_default.stats().pages_parked == 16  # a quarter of the budget
    freed(with_default, 4 * 17, capacity=70)
    eventually(lambda: with_default.stats().pages_parked == 16 and with_default.stats().pages_mapped == 16)


# --- limits -----------------------------------------------------------------------------------------------


def test_the_oldest_makes_room_within_the_limit(parking):
    for capacity in (64, 65, 66):
        freed(parking, 48, capacity=capacity)  # 12 pages
    assert check_sums(parking).pages_parked == 24
    quarter(parking, 1, capacity=65).close()
    quarter(parking, 1, capacity=66).close()
    assert parking.stats().tensors_adopted == 2
    quarter(parking, 1, capacity=64).close()  # the oldest, that had to go
    assert parking.stats().tensors_adopted == 2
    freed(parking, 33 * PER_PAGE, capacity=200)  # more than all that may be parked
    assert parking.stats().pages_parked <= 32


def test_trim_gives_it_back(parking):
    freed(parking, 40)
    parking.wait_idle(5)  # what the mapper is zeroing at the moment goes when it is done
    assert parking.trim() == 10 * PAGE
    stats = check_sums(parking)
    assert (stats.pages_parked, stats.pages_mapped, stats.pages_cached, stats.nbytes_reserved) == (0, 0, 0, 0)


def test_a_smaller_budget_takes_it_back(parking):
    freed(parking, 40)
    parking.budget = 8 * PAGE
    stats = check_sums(parking)
    assert stats.pages_parked == 0 and stats.pages_free == 8


def test_need_takes_it_back(parking):
    freed(parking, 40, capacity=64)
    freed(parking, 40, capacity=65)
    t = filled(parking, 60 * PER_PAGE, 1, capacity=400)
    stats = check_sums(parking)
    assert (stats.pages_active, stats.pages_parked) == (60, 0)
    assert t.eq(1).all()


def test_an_adopted_tensor_gives_way_with_what_it_does_not_use(parking):
    """And what comes back to it later is not what was there (I7)."""
    freed(parking, 30 * PER_PAGE, 7, capacity=400)
    t = filled(parking, 4, 3, capacity=400)
    filled(parking, 60 * PER_PAGE, 1, capacity=300).close()
    assert check_sums(parking).pages_prefetched == 0
    parking.trim()
    t.extend(20 * PER_PAGE)
    assert t[:4].eq(3).all() and not t[4:].any()


# --- the end ----------------------------------------------------------------------------------------------


def test_a_pool_that_is_dropped_without_close_leaves_nothing(parking):
    del parking
    before = memfds()
    for _ in range(5):
        pool = testing.host_pool(page_size=PAGE, budget=64 * PAGE, park=32 * PAGE, strict_holes=False)
        freed(pool, 40)
        t = filled(pool, 40, 1)
        view = t[:4]
        freed(pool, 20, capacity=30)
        del pool, t
        gc.collect()
        assert view.eq(1).all()
        del view
    eventually(lambda: memfds() == before)


def test_close_gives_it_back(pool_factory):
    before = memfds()
    pool = pool_factory("host", ahead=None)
    freed(pool, 40)
    pool.close()
    assert memfds() == before and pool.stats().pages_mapped == 0


# --- refusals ---------------------------------------------------------------------------------------------


def test_every_refusal_in_turn_around_adoption(parking):
    """I8: whatever is refused, no byte of the last owner's shows, and nothing is lost."""
    for skip in range(12):
        for refuse in (1, 3):
            freed(parking, 40)
            with testing.fail_after(parking, skip, refuse):
                try:
                    t = quarter(parking, 8)
                    t.extend(40)
                except vtensor.VTensorError:
                    t = None
                freed_quietly(parking)
            if t is not None:
                assert not t.any()
                t.close()
            parking.trim()
            parking.wait_idle(5)
            testing.check_invariants(parking)
            stats = check_sums(parking)
            assert stats.pages_mapped == 0 and stats.pages_used == stats.pages_quarantined
            if stats.pages_quarantined:
                return  # a call and its undoing were refused: what is left is for good


def freed_quietly(pool):
    try:
        freed(pool, 20, capacity=50)
    except vtensor.VTensorError:
        pass
