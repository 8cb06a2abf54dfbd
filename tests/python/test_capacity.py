"""How far a tensor can grow, and what it does where front shrinks have used that up: on both drivers."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import (
    calls,
    calls_since,
    filled,
    page_ids,
    quarter,
    ramp,
    same_bytes,
)


@pytest.mark.exact
def test_front_shrinks_then_move_where_the_tensor_was_asked_to(pool):
    t = filled(pool, 8, 1, rows=(2,), capacity=10, when_full="move")
    expected = ramp(t)
    t.copy_(expected)
    t.shrink(5, front=True)
    t.extend(2)
    ids = set(page_ids(t))
    before = calls(pool)
    t.extend(5)  # 10 positions in all: the capacity, but not behind what the front used up
    assert t.length == 10 and t.capacity == 10
    assert same_bytes(t[:, :3], expected[:, 5:])  # I2
    assert ids <= set(page_ids(t)), "pages were copied"
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync")
    with pytest.raises(vtensor.CapacityExceeded):
        t.extend(1)
    assert t.length == 10


@pytest.mark.exact
def test_a_sliding_window_runs_for_ever(pool):
    t = quarter(pool, capacity=12, when_full="move")
    window = []
    for step in range(100):
        x = torch.full((1, t.shape[1]), step % 251, dtype=t.dtype)
        t.append(x)
        window.append(step % 251)
        if len(window) > 6:
            t.shrink(1, front=True)
            window.pop(0)
        assert t[:, 0].tolist() == window and t[:, -1].tolist() == window
        assert pool.stats().pages_used <= 3


# --- reallocate -------------------------------------------------------------------------------------------


@pytest.mark.exact
def test_reallocate_keeps_the_pages(pool):
    t = quarter(pool, 10, rows=(2,), capacity=12)
    t.copy_(ramp(t))
    expected, ids, used = t.clone(), page_ids(t), pool.stats().pages_used
    before = calls(pool)
    bigger = t.reallocate(40)
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync") and not made.get("cuMemCreate")
    assert t.closed and not bigger.closed
    assert bigger.capacity == 40 and bigger.length == 10 and bigger.grow_dim == 1
    assert same_bytes(bigger, expected)  # I2
    assert page_ids(bigger) == ids and pool.stats().pages_used == used
    assert same_bytes(bigger.extend(30)[:, :10], expected)
