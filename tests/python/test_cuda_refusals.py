"""Calls of libcuda that are refused by name, over the simulated one (a test double)."""

from __future__ import annotations

import pytest

import vtensor
from cuda_support import needs_simcuda, tensor
from support import quarter, simcuda_disarm
from vtensor import testing

pytestmark = needs_simcuda


def test_pages_whose_making_was_refused_leave_their_room_in_the_budget(sim, stream_pool):
    """I5"""
    pool = stream_pool(pages=8)
    with quarter(pool, 0, capacity=64) as t:
        for _ in range(3):
            sim.fail("cuMemCreate")
            with pytest.raises(vtensor.DriverError, match="cuMemCreate"):
                t.extend(16)
        t.extend(32)
        assert pool.stats().pages_used == 8


def test_pages_that_came_and_cannot_go_are_used_for_nothing(sim, simcuda):
    """They came without access. Until they are unmapped nothing else is mapped there (I3, I8)."""
    t = tensor(simcuda, 1)
    used = simcuda.stats().pages_used
    sim.fail("cuMemSetAccess")
    sim.fail("cuMemUnmap", refuse=1_000)
    for _ in range(3):  # in the first, the refusal of the access comes before
        with pytest.raises(vtensor.DriverError, match="cuMemUnmap"):
            t.extend(20)
        stats = simcuda.stats()
        assert t.length == 1 and stats.pages_pinned == stats.pages_used - used > 0
        testing.check_invariants(simcuda)
    simcuda_disarm()
    assert not t.extend(20)[1:].any()
    assert simcuda.stats().pages_pinned == 0


@pytest.mark.parametrize(("code", "name"), [(999, "CUDA_ERROR_UNKNOWN"), (4711, "CUresult 4711")])
def test_a_refusal_names_the_call_and_the_answer(sim, simcuda, code, name):
    t = tensor(simcuda, 1)
    sim.fail("cuMemSetAccess", code=code)
    with pytest.raises(vtensor.DriverError, match=f"cuMemSetAccess.*{name}") as raised:
        t.extend(9)
    error = raised.value
    assert (error.call, error.code, error.name) == ("cuMemSetAccess", code, name)
