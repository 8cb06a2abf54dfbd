"""Deterministic counts of driver calls and kernel mappings: what a later change may not make worse."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import PER_PAGE, calls, calls_since, filled, mappings_within, quarter


def writable_mappings(t) -> int:
    """Kernel mappings that hold t's rows. Shared ones only: behind a front shrink `address` lies past the
    range's beginning, so what the process has behind its end is looked at too."""
    found = mappings_within(t.address, t.address + t.nbytes_reserved)
    return sum(permissions.startswith("rw-s") for _, _, permissions in found)


def test_extend_and_shrink_inside_a_page_make_no_driver_call(pool):
    t = filled(pool, 1, rows=(3,))
    before = calls(pool)
    for _ in range(PER_PAGE - 1):
        t.extend(1)
    t.shrink(1).shrink(1, front=True).extend(1).truncate(1)
    assert calls_since(pool, before) == {}


def test_append_makes_no_driver_call_until_the_page_is_full(pool):
    t = quarter(pool)
    x = torch.ones(1, t.shape[1], dtype=t.dtype)
    for i in range(4 * PER_PAGE):
        before = calls(pool)
        t.append(x)
        assert bool(calls_since(pool, before)) == (i % PER_PAGE == 0), i


def test_a_thousand_adjacent_pages_are_one_mmap(pool_factory):
    pool = pool_factory("host", pages=1100)
    t = quarter(pool, 1, capacity=1100 * PER_PAGE)
    before = calls(pool)
    t.extend(1000 * PER_PAGE)
    assert calls_since(pool, before) == {"mmap": 1}
    assert writable_mappings(t) == 1


def test_a_row_that_grows_in_order_stays_one_kernel_mapping(pool_factory):
    pool = pool_factory("host", pages=400)
    tensors = [quarter(pool, 0, rows=(2,), capacity=64 * PER_PAGE) for _ in range(3)]
    for _ in range(50):
        for t in tensors:
            t.extend(PER_PAGE)
    for t in tensors:
        assert writable_mappings(t) == 2  # one a row
    # Also when the pages were used before, by others and in another order.
    for t in tensors:
        t.close()
    again = [quarter(pool, 0, rows=(2,), capacity=64 * PER_PAGE) for _ in range(3)]
    for _ in range(50):
        for t in reversed(again):
            t.extend(PER_PAGE)
    assert [writable_mappings(t) for t in again] == [2, 2, 2]


def test_a_sliding_window_stays_in_few_kernel_mappings(pool_factory):
    pool = pool_factory("host", pages=200)
    t = quarter(pool, 0, capacity=4000, when_full="move")
    for _ in range(600):
        t.extend(PER_PAGE)
        if t.length > 8 * PER_PAGE:
            t.shrink(PER_PAGE, front=True)
        assert writable_mappings(t) <= 3


def test_one_shrink_is_few_calls(pool_factory):
    pool = pool_factory("host", pages=300)
    t = filled(pool, 200 * PER_PAGE, capacity=1000)
    before = calls(pool)
    t.shrink(100 * PER_PAGE)
    made = calls_since(pool, before)
    assert made.get("munmap", 0) + made.get("mmap", 0) == 1


# Calls that change or ask something of the calling thread alone; of a default stream, its context is that.
THREAD_STATE = {"cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuStreamGetCtx"}


@pytest.mark.parametrize("pages", [10, 200])
def test_a_fork_of_many_pages_is_few_calls(pool_factory, kind, pages):
    """On the host their number does not grow with the pages; on CUDA only the maps do."""
    pool = pool_factory(kind, pages=pages)
    t = quarter(pool, pages * PER_PAGE, capacity=pages * PER_PAGE)
    before = calls(pool)
    f = t.fork()
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync") and not made.get("cuMemCreate")
    per_page = made.pop("cuMemMap", 0)
    others = {call: n for call, n in made.items() if call not in THREAD_STATE}
    assert per_page in (0, pages) and sum(others.values()) <= 9, others
    assert pool.stats().pages_used == pages and f.length == t.length


def test_an_idle_tensor_costs_an_address_range_and_no_page(pool):
    before = calls(pool)
    t = quarter(pool, capacity=60 * PER_PAGE)
    made = calls_since(pool, before)
    assert pool.stats().pages_used == 0 and pool.stats().pages_mapped == 0
    assert set(made) - THREAD_STATE <= {"mmap", "munmap", "cuMemAddressReserve"}
    assert t.nbytes_reserved >= 60 * pool.page_size


def test_views_and_torch_operations_make_no_driver_call(pool):
    t = filled(pool, 9, dtype=torch.float32)
    before = calls(pool)
    total = t.sum() + t[2:5].sum() + (t * 2).sum()
    t[0] = 3
    t.alias()
    assert total > 0 and t.length == 9 and calls_since(pool, before) == {}


def test_vtensor_reserves_what_was_asked_and_no_more_than_a_page_a_row(pool):
    t = vtensor.empty(3, 0, 100, grow_dim=1, capacity=1000, dtype=torch.float32, pool=pool)
    needed = 3 * 1000 * 100 * 4
    assert needed <= t.nbytes_reserved <= needed + 4 * pool.page_size
