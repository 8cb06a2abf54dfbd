"""Pools: their budget, statistics, zeroing policies and end."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import (
    PER_PAGE,
    bytes_of,
    filled,
    quarter,
)


def test_pool_properties_and_stats(pool):
    assert pool.budget == 64 * pool.page_size and not pool.closed
    stats = pool.stats()
    assert stats.page_size == pool.page_size and stats.budget == pool.budget
    assert (stats.pages_used, stats.pages_free, stats.pages_mapped, stats.tensors) == (0, 64, 0, 0)
    t = filled(pool, 9, rows=(2,))
    stats = pool.stats()
    assert (stats.pages_used, stats.pages_free, stats.pages_active, stats.tensors) == (6, 58, 6, 1)
    assert stats.nbytes_mapped == 6 * pool.page_size == t.nbytes_mapped
    assert (stats.pages_prefetched, stats.pages_cached, stats.pages_pinned, stats.pages_orphaned) == (
        0,
        0,
        0,
        0,
    )
    with pytest.raises(AttributeError):
        stats.pages_used = 0
    assert set(stats.driver_calls) == {"caller", "mapper"}
    assert all(isinstance(n, int) for n in stats.driver_calls["caller"].values())


def test_budget_is_a_limit_one_can_recover_from(pool):
    a, b = filled(pool, 64 * 3, 1, capacity=400), filled(pool, 40, 2)
    before = pool.stats()
    with pytest.raises(vtensor.OutOfPages, match=r"^\[VTensor\.extend\] .*7.*6.*64.*: .*budget") as caught:
        a.extend(7 * PER_PAGE)
    assert isinstance(caught.value, MemoryError)  # I9
    after = pool.stats()
    assert (after.pages_used, after.pages_mapped) == (before.pages_used, before.pages_mapped)  # I8
    assert a.length == 64 * 3 and a.eq(1).all() and b.eq(2).all()
    b.close()
    assert a.extend(7 * PER_PAGE)[: 64 * 3].eq(1).all()


def test_trim_gives_free_memory_back(pool):
    t = filled(pool, 4)
    t.close()
    pool.trim()
    assert pool.stats().pages_spare == 0
    assert not quarter(pool, 8).any()  # I7


def test_trim_leaves_live_pages_alone(pool):
    t = filled(pool, 30, 8)
    t.truncate(10)
    pool.trim()
    assert t.eq(8).all() and pool.stats().pages_used == 3


def test_wait_idle_returns_and_has_a_bound(pool):
    quarter(pool, 9)
    pool.wait_idle(timeout=1.0)
    stats = pool.stats()
    assert stats.pages_mapped == stats.pages_active  # I4


@pytest.mark.parametrize("kind", ["host", "simcuda"])
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


def test_pools_do_not_mix(host, pool_factory):
    other = pool_factory("host", page_size=8192)
    a, b = filled(host, 8, 1), filled(other, 8, 2)
    assert host.stats().pages_used == 2 and other.stats().pages_used == 2
    f = a.fork()
    assert f.pool is host
    a.close()
    f.close()
    assert host.stats().pages_used == 0 and b.eq(2).all()


def test_strict_holes_fault_and_views_keep_off_them(strict):
    """The tests' own tool: over strict holes a read past the mapped pages would end this process."""
    t = filled(strict, 5, 3, rows=(3,), capacity=40)
    assert bytes_of(t).eq(3).all() and bytes_of(t[:, 2:]).eq(3).all()
    assert bytes_of(t.extend(10)[:, :5]).eq(3).all()


def test_holes_of_a_host_pool_read_as_zeros(host):
    t = filled(host, 5, 3, rows=(2,), capacity=40)
    whole = torch.empty(0, dtype=torch.uint8).set_(t[:, :].untyped_storage())
    assert whole.numel() > 2 * 2 * host.page_size
    row = t.stride(0)
    assert whole[: 5 * 1024].eq(3).all() and not whole[2 * host.page_size : row].any()  # I3
    assert whole[row : row + 5 * 1024].eq(3).all()
