"""Pools: budget, spare memory, reserve, counts, zeroing and holes."""

from __future__ import annotations

import os

import pytest
import torch

import vtensor
from support import (
    PER_PAGE,
    beside,
    calls,
    calls_since,
    check_sums,
    eventually,
    filled,
    leave_spare,
    mapper_calls,
    quarter,
    run_snippet,
)
from vtensor import testing

PAGE = 4096


# --- budget -----------------------------------------------------------------------------------------------


def test_the_budget_is_raised_and_lowered_in_use(host):
    t = filled(host, 60 * PER_PAGE, 5, capacity=800)
    with pytest.raises(vtensor.OutOfPages):
        t.extend(10 * PER_PAGE)
    host.budget = 100 * PAGE
    assert host.budget == 100 * PAGE and check_sums(host).pages_free == 40
    t.extend(10 * PER_PAGE)
    t.shrink(20 * PER_PAGE)
    host.budget = 50 * PAGE + 5  # whole pages
    assert host.budget == 50 * PAGE and check_sums(host).pages_free == 0
    testing.check_invariants(host)  # I5: nor is memory kept beside them
    with pytest.raises(vtensor.OutOfPages):
        t.extend(1)
    host.budget = 51 * PAGE
    assert t.extend(1)[: 50 * PER_PAGE].eq(5).all()


def test_a_budget_below_what_is_in_use_is_refused_and_changes_nothing(host):
    t = filled(host, 10 * PER_PAGE)
    for nbytes in (9 * PAGE, 1):
        with pytest.raises(vtensor.OutOfPages, match=r"\[Pool.budget\] need .* at least 40960 bytes"):
            host.budget = nbytes
    assert host.budget == 64 * PAGE and t.eq(1).all()
    host.budget = 10 * PAGE


def test_a_budget_counts_what_a_growth_under_way_was_promised(sim, stream_pool):
    """Between the page that it maps and the one that it unshares it lets the lock go."""
    pool = stream_pool(16)
    t = filled(pool, 6)
    f = t.fork()
    leave_spare(pool, 4)
    asked, used = sim.calls("cuMemMap"), pool.stats().pages_used
    sim.slow("cuMemMap", 200_000)
    growth = beside(t.extend, PER_PAGE)
    eventually(lambda: sim.calls("cuMemMap") > asked)
    with pytest.raises(vtensor.OutOfPages):
        pool.budget = (used + 1) * PAGE
    growth.result(30)
    sim.slow("cuMemMap", 0)
    assert check_sums(pool).pages_free >= 0
    testing.check_invariants(pool)
    t.close(), f.close()


def test_a_smaller_budget_gives_free_memory_back(host):
    filled(host, 40 * PER_PAGE, capacity=400).close()
    assert host.stats().pages_spare == 40
    host.budget = 16 * PAGE
    stats = check_sums(host)
    assert stats.pages_spare == 16 and stats.driver_calls["caller"]["fallocate"] >= 1


def test_a_smaller_budget_takes_back_what_is_ahead(pool_factory):
    pool = pool_factory("host", prefetch=32 * PAGE, cache=0)
    t = quarter(pool, 4, capacity=400)
    t.prepare(20 * PER_PAGE)
    pool.wait_idle()
    assert pool.stats().pages_prefetched == 20
    pool.budget = PAGE
    assert check_sums(pool).pages_mapped == 1


# --- the counters -----------------------------------------------------------------------------------------


def test_growth_finds_spare_memory(pool_factory, kind):
    pool = pool_factory(kind)
    leave_spare(pool, 10)
    stats = check_sums(pool)
    assert (stats.pages_spare, stats.pages_used, stats.pages_free) == (10, 0, 64)
    assert (stats.pages_fresh, stats.pages_recycled) == (10, 0)
    before = calls(pool)
    t = quarter(pool, 12 * PER_PAGE)
    made = calls_since(pool, before)
    assert made.get("cuMemCreate", 0) == (2 if kind == "simcuda" else 0) and "fallocate" not in made
    stats = check_sums(pool)
    assert (stats.pages_fresh, stats.pages_recycled) == (12, 10)
    t.close()
    for turn in range(1, 30):  # and goes on finding it
        filled(pool, 12 * PER_PAGE).close()
        assert (pool.stats().pages_fresh, pool.stats().pages_recycled) == (12, 10 + 12 * turn)
    assert calls_since(pool, before).get("cuMemCreate", 0) == made.get("cuMemCreate", 0)


def test_growths_and_tensors_are_counted(pool_factory):
    pool = pool_factory("host", cache=32 * PAGE)
    t = quarter(pool, 2)
    t.prepare(PER_PAGE)
    pool.wait_idle()
    t.extend(1)
    t.extend(PER_PAGE - 1)  # into what was prepared
    t.extend(PER_PAGE)
    t.close()
    quarter(pool, 1)
    stats = pool.stats()
    assert (stats.growths_mapped, stats.growths_ready) == (2, 2)  # a reused page is a ready one
    assert (stats.tensors_fresh, stats.tensors_reused) == (1, 1)


# --- spare memory -----------------------------------------------------------------------------------------


def test_the_mapper_gives_back_what_is_not_to_be_kept(pool_factory, kind):
    pool = pool_factory(kind, spare=8 * PAGE, prefetch=PAGE, cache=0)
    release = "fallocate" if kind == "host" else "cuMemRelease"
    for turn in range(1, 20):
        before = calls(pool)
        filled(pool, 40 * PER_PAGE, capacity=400).close()
        assert release not in calls_since(pool, before)  # by the caller
        pool.wait_idle()
        assert check_sums(pool).pages_spare == 8
        assert mapper_calls(pool)[release] >= 32 * turn


def test_what_unsharing_takes_is_not_released_beside_it(pool_factory, sim):
    """I5: while the driver maps, the mapper does not give back what the growth takes next."""
    pool = pool_factory("simcuda", pages=3, spare=0, prefetch=0, cache=0)
    t = filled(pool, PER_PAGE // 2)
    fork = t.fork()
    before = sim.free_memory() + PAGE  # as without any page
    sim.slow("cuMemMap", 30_000)
    sim.slow("cuMemRelease", 60_000)
    growth = beside(t.extend, PER_PAGE)
    least = before
    while not growth.done():
        least = min(least, sim.free_memory())
    growth.result(30)
    sim.slow("cuMemMap", 0)
    sim.slow("cuMemRelease", 0)
    assert before - min(least, sim.free_memory()) == 3 * PAGE
    pool.wait_idle()
    assert pool.stats().pages_spare == 0
    assert t[: PER_PAGE // 2].eq(fork[...]).all()


def test_idle_waits_for_no_memory_that_the_system_refuses_to_take(pool_factory):
    pool = pool_factory("host", spare=0, prefetch=0)
    t = filled(pool, 4 * PER_PAGE)
    with testing.fail_after(pool, 1, 2**40) as refused:  # they are unmapped in one call
        t.shrink(4 * PER_PAGE)
        pool.wait_idle()
        assert pool.stats().pages_spare == 4 and refused
    eventually(lambda: pool.stats().pages_spare == 0)


# --- reserve ----------------------------------------------------------------------------------------------


def test_a_reserve_is_left_to_others(pool_factory):
    pool = pool_factory("host", device_reserve=2**50)
    t = quarter(pool)
    with pytest.raises(vtensor.OutOfPages, match="reserve"):
        t.extend(1)
    assert t.length == 0 and pool.stats().pages_used == 0
    modest = pool_factory("host", device_reserve=PAGE)
    assert filled(modest, 9).eq(1).all()


def test_memory_that_is_there_does_not_count_against_the_reserve(pool_factory):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pool = pool_factory("host", device_reserve=min(free // 4, 2**30))
    filled(pool, 30 * PER_PAGE, capacity=200).close()
    assert pool.stats().pages_spare == 30
    assert filled(pool, 30 * PER_PAGE, capacity=200).eq(1).all()


# --- default budgets --------------------------------------------------------------------------------------


def test_a_default_budget_leaves_what_other_pools_were_promised():
    # In a process of its own, whose default pool takes nothing.
    run_snippet(
        """
        with vtensor.Pool("cpu") as first, vtensor.Pool("cpu") as second:
            assert 0 < second.budget < first.budget / 2
            first.close()
            with vtensor.Pool("cpu") as third:
                assert third.budget > 2 * second.budget
        """
    ).check()


def test_a_pool_that_was_promised_all_memory_leaves_some_to_a_default_pool():
    with vtensor.Pool("cpu", budget=1 << 46), vtensor.Pool("cpu") as default:
        assert 1 << 20 < default.budget < 1 << 46


# --- zeros and holes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["new_owner", "always", "never"])
def test_zeroing_policies(pool_factory, kind, zero):
    pool = pool_factory(kind, zero=zero)
    filled(pool, 40, 255).close()
    fresh = quarter(pool, 40)
    if zero != "never":
        assert not fresh.any()  # I7
    assert not quarter(pool, 40, make=vtensor.zeros).any()  # zeros() means zeros under any policy


def test_own_pages_come_back_zeroed_where_always_zeroing(pool_factory, kind):
    pool = pool_factory(kind, zero="always")
    t = filled(pool, 12, 255)
    t.truncate(4).extend(8)
    assert t[:4].eq(255).all() and not t[4:].any()


def test_holes_of_a_host_pool_read_as_zeros(host):
    t = filled(host, 5, 3, rows=(2,), capacity=40)
    whole = torch.empty(0, dtype=torch.uint8).set_(t[:, :].untyped_storage())
    assert whole.numel() > 2 * 2 * host.page_size
    row = t.stride(0)
    assert whole[: 5 * 1024].eq(3).all() and not whole[2 * host.page_size : row].any()  # I3
    assert whole[row : row + 5 * 1024].eq(3).all()
