"""Several tensors, and states beside them, changed together: all or none."""

from __future__ import annotations

import pytest
import torch

import vtensor
from support import filled
from vtensor import testing, together


def rows(pool, n=3, length=1500):
    t = vtensor.empty(n, 0, grow_dim=1, capacity=4096, dtype=torch.int32, pool=pool)
    return t.append(torch.arange(n * length, dtype=torch.int32).reshape(n, length).to(t.device))


def test_each_by_its_own_index_and_states_with_them(pool):
    a, b = rows(pool), rows(pool, 2)
    before = a.clone(), b.clone()
    state = {"kept": 1, "other": 2}
    together.reindex([a, b], [[2, 2, -3], [1]], [(state, {"kept": 3})])
    assert torch.equal(a, before[0][[2, 2, 0]]) and torch.equal(b, before[1][[1]])
    assert state == {"kept": 3, "other": 2}
    together.reindex([], [], [(state, {"kept": 4})])
    assert state["kept"] == 4
    testing.check_invariants(pool)


def test_refused_for_one_changes_none(pool):
    """I8."""
    a, b, closed = rows(pool), rows(pool), rows(pool)
    closed.close()
    before, state = a.clone(), {}
    for others, index, says in (
        ([b], [3], "out of range"),
        ([b], [], "empty"),
        ([closed], [0], "closed"),
        ([a], [0], "named twice"),
    ):
        with pytest.raises(vtensor.VTensorError, match=says):
            together.reindex([a, *others], [[1, 0, 0], *[index for _ in others]], [(state, {"x": 1})])
        assert torch.equal(a, before) and not state


def test_tensors_of_several_pools(pool_factory):
    """I8: a driver call refused in one of them changes the other neither."""
    pools = [pool_factory("host") for _ in range(2)]
    a, b = map(rows, pools)
    before = a.clone(), b.clone()
    refused = 0
    for skip in range(100):
        try:
            with testing.fail_after(pools[1], skip):
                together.reindex([a, b], [[1, 1, 0]] * 2)
        except vtensor.DriverError:
            refused += 1
            assert torch.equal(a, before[0]) and torch.equal(b, before[1])
        else:
            break
    assert refused
    assert torch.equal(a, before[0][[1, 1, 0]]) and torch.equal(b, before[1][[1, 1, 0]])


def test_reserve_moves_in_place(pool):
    """I2; and with views alive, I3."""
    t = rows(pool, 2, 1000)
    before, view = t.clone(), t.alias()
    assert together.reserve(t, 100_000) is None
    assert t.capacity == 100_000 and torch.equal(t, before) and torch.equal(view, before)
    t.append(before)
    assert torch.equal(t, torch.cat([before, before], 1)) and torch.equal(view, before)
    del view
    together.reserve(t, 2000)
    with pytest.raises(vtensor.CapacityExceeded):
        t.extend(1)
    with pytest.raises(vtensor.CapacityExceeded, match="raise it"):
        together.reserve(t, 1999)
    assert torch.equal(t, torch.cat([before, before], 1)) and t.capacity == 2000
    testing.check_invariants(pool)


def test_what_one_has_ahead_goes_for_another(pool_factory):  # I9
    pool = pool_factory("host", 16, prefetch=8 * 4096)
    tensors = [filled(pool, 8, value, rows=(2,)) for value in (1, 2)]
    for ahead in tensors:  # the first in the order of the core, and the last
        forks = [t.fork() for t in tensors]
        ahead.prepare(8)
        pool.wait_idle()
        assert (pool.stats().pages_prefetched, pool.stats().pages_free) == (4, 4)
        for t in tensors:
            t.alias()[0] = 3  # the kernel copies pages
            t.alias()[1] = 4
        together.reindex(tensors, [[1, 0], [1, 0]])
        for t, fork in zip(tensors, forks, strict=True):
            assert t[0].eq(4).all() and t[1].eq(3).all()
            fork.close()
    for t in tensors:
        t.close()
