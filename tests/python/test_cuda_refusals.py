"""Driver calls refused at every point of every operation, over the simulated libcuda (a test double)."""

from __future__ import annotations

import contextlib
import ctypes

import pytest

import vtensor
from cuda_support import needs_simcuda, tensor
from support import calls, quarter, same_bytes, simcuda_control, simcuda_disarm
from vtensor import testing

pytestmark = needs_simcuda

UNKNOWN = 999  # CUresult


def refuse_in_library(call: str, skip: int, refuse: int, code: int) -> None:
    fail = simcuda_control().simcuda_fail
    fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    assert fail(call.encode(), skip, refuse, code) == 0


def grow(pool):
    t = tensor(pool, 5, rows=(2,))
    return [t], lambda: t.extend(9)


def fork(pool):
    t = tensor(pool, 9, rows=(2,))
    return [t], lambda: t.fork()


def unshare(pool):
    t = tensor(pool, 12)
    f = t.fork()
    return [t, f], lambda: f.unshare(0, 12)


def reindex(pool):
    t = tensor(pool, 6, rows=(3,))
    t[1].add_(1)
    return [t], lambda: t.reindex([2, 0, 2])


def refuse_each(pool_factory, arrange, arm) -> bool:
    """Runs the operation with its first, second, ... driver call refused until it needs no more: each time it
    happens whole or not at all (I8), or breaks the pool. Returns whether it ever did that."""
    broke = False
    for skip in range(200):
        pool = pool_factory("simcuda")
        tensors, operate = arrange(pool)
        before = [t.clone() for t in tensors]
        lengths = [t.length for t in tensors]
        used = pool.stats().pages_used
        made = sum(calls(pool).values())
        with arm(pool, skip):
            try:
                result = operate()
            except (vtensor.DriverError, vtensor.OutOfPages, vtensor.TimedOut) as error:
                result = error
        reached = sum(calls(pool).values()) - made > skip
        testing.check_invariants(pool)
        failed = isinstance(result, Exception)
        if failed:
            assert reached
            assert [t.length for t in tensors] == lengths
            if pool.broken is None:
                assert all(same_bytes(t, old) for t, old in zip(tensors, before, strict=True))
                # Copies that could not be waited for may still write to their pages.
                assert isinstance(result, vtensor.TimedOut) or pool.stats().pages_used == used
                result = operate()  # and then it works
            else:
                broke = True
                with pytest.raises(vtensor.DriverError, match="broken"):
                    operate()
                result = None
        for t in (result, *tensors):
            if t is not None and not t.closed:
                t.close()
        del t, tensors, operate, result
        testing.check_invariants(pool)
        pool.close()
        assert pool.stats().pages_used == 0
        if not reached:
            return broke
    pytest.fail("200 driver calls")


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


@pytest.mark.seconds(300)
@pytest.mark.parametrize("arrange", [grow, fork, unshare, reindex], ids=lambda f: f.__name__)
def test_when_the_undoing_is_refused_too_pages_go_later_or_the_pool_is_broken(pool_factory, arrange):
    def arm(pool, skip):
        return testing.fail_after(pool, skip, refuse=1_000_000)

    assert refuse_each(pool_factory, arrange, arm) == (arrange is unshare)  # the others replace no page


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_refused_giving_back_is_tried_again(simcuda, call):  # I14
    t = tensor(simcuda, 12)
    before = t.clone()
    refuse_in_library(call, 0, 1, UNKNOWN)
    with contextlib.suppress(vtensor.DriverError):
        t.shrink(5)
    assert same_bytes(t, before[: t.length])
    with contextlib.suppress(vtensor.DriverError):
        t.close()
        simcuda.trim()
    simcuda.wait_idle(timeout=10)
    simcuda.trim()
    assert simcuda.stats().pages_mapped == 0


def test_pages_that_came_and_cannot_go_are_used_for_nothing(simcuda):
    """They came without access. Until they are unmapped nothing else is mapped there (I3, I8)."""
    t = tensor(simcuda, 1)
    used = simcuda.stats().pages_used
    refuse_in_library("cuMemSetAccess", 0, 1, UNKNOWN)
    refuse_in_library("cuMemUnmap", 0, 1_000, UNKNOWN)
    for _ in range(3):  # in the first, the refusal of the access comes before
        with pytest.raises(vtensor.DriverError, match="cuMemUnmap"):
            t.extend(20)
        stats = simcuda.stats()
        assert t.length == 1 and stats.pages_pinned == stats.pages_used - used > 0
        testing.check_invariants(simcuda)
    simcuda_disarm()
    assert not t.extend(20)[1:].any()
    assert simcuda.stats().pages_pinned == 0


@pytest.mark.parametrize(("code", "name"), [(UNKNOWN, "CUDA_ERROR_UNKNOWN"), (4711, "CUresult 4711")])
def test_a_refusal_names_the_call_and_the_answer(simcuda, code, name):
    t = tensor(simcuda, 1)
    refuse_in_library("cuMemSetAccess", 0, 1, code)
    with pytest.raises(vtensor.DriverError, match=f"cuMemSetAccess.*{name}") as raised:
        t.extend(9)
    error = raised.value
    assert (error.call, error.code, error.name) == ("cuMemSetAccess", code, name)
