"""Pools: their budget, statistics, zeroing policies and end."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import (
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
