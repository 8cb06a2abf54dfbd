"""Driver calls refused at every point of every operation, over the simulated libcuda (a test double)."""

from __future__ import annotations

import contextlib
import ctypes

import pytest

import vtensor
from cuda_support import needs_simcuda, tensor, values
from support import calls, same_bytes, simcuda_control
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


def append_to_fork(pool):
    t = tensor(pool, 6)
    f = t.fork()
    return [t, f], lambda: f.append(values(5))


def fork(pool):
    t = tensor(pool, 9, rows=(2,))
    return [t], lambda: t.fork()


def fork_of_fork(pool):
    t = tensor(pool, 9)
    f = t.fork().append(values(3))
    return [t, f], lambda: f.fork()


def unshare(pool):
    t = tensor(pool, 12)
    f = t.fork()
    return [t, f], lambda: f.unshare(0, 12)


def write_in_place(pool):
    t = tensor(pool, 7)
    f = t.fork()
    return [t, f], lambda: f.add_(0)


def reindex(pool):
    t = tensor(pool, 6, rows=(3,))
    t[1].add_(1)
    return [t], lambda: t.reindex([2, 0, 2])


def make(pool):
    t = tensor(pool, 3)
    return [t], lambda: vtensor.empty(2, 7, 256, grow_dim=1, capacity=64, pool=pool)


OPERATIONS = [grow, append_to_fork, fork, fork_of_fork, unshare, write_in_place, reindex, make]


def refuse_each(pool_factory, arrange, arm) -> None:
    """Runs the operation with its first, second, ... driver call refused until it needs no more: each time it
    happens whole or not at all (I8)."""
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
            for t, old in zip(tensors, before, strict=True):
                # What is mapped at a quarantined page is not known: it must not be read.
                if all(record.state != "quarantined" for record in t.pages()):
                    assert same_bytes(t, old)
            stats = pool.stats()
            assert stats.pages_quarantined or stats.pages_used == used
            result = None if stats.pages_quarantined else operate()  # and then it works
        for t in (result, *tensors):
            if t is not None and not t.closed:
                t.close()
        del t, tensors, operate, result
        testing.check_invariants(pool)
        pool.close()
        if not reached:
            return
    pytest.fail("200 driver calls")


@pytest.mark.seconds(300)
@pytest.mark.parametrize("arrange", OPERATIONS, ids=lambda f: f.__name__)
def test_an_operation_refused_at_any_call_happens_whole_or_not_at_all(pool_factory, arrange):
    refuse_each(pool_factory, arrange, testing.fail_after)


@pytest.mark.seconds(300)
@pytest.mark.parametrize("arrange", [grow, fork, unshare, reindex], ids=lambda f: f.__name__)
def test_when_the_undoing_is_refused_too_nothing_is_lost_but_pages(pool_factory, arrange):
    def arm(pool, skip):
        return testing.fail_after(pool, skip, refuse=1_000_000)

    refuse_each(pool_factory, arrange, arm)


def test_a_shared_page_is_quarantined_once(pool_factory):
    """By each tensor that cannot have its mapping back, and counted once."""
    for skip in range(200):
        pool = pool_factory("simcuda")
        t = tensor(pool, 3)
        sharing = [t, t.fork()]
        for each in sharing:
            with testing.fail_after(pool, skip, refuse=1_000_000), contextlib.suppress(vtensor.VTensorError):
                each.unshare(0, 3)
        lost = [all(record.state == "quarantined" for record in each.pages()) for each in sharing]
        for each in sharing:
            each.close()
        del t, sharing, each
        stats = pool.stats()
        testing.check_invariants(pool)
        assert stats.pages_used == stats.pages_quarantined
        pool.close()
        if all(lost):
            return
    pytest.fail("never both")


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


def test_a_refusal_names_the_call_and_the_answer(simcuda):
    t = tensor(simcuda, 1)
    refuse_in_library("cuMemSetAccess", 0, 1, UNKNOWN)
    with pytest.raises(vtensor.DriverError, match="cuMemSetAccess.*CUDA_ERROR_UNKNOWN") as raised:
        t.extend(9)
    error = raised.value
    assert (error.call, error.code, error.name) == ("cuMemSetAccess", UNKNOWN, "CUDA_ERROR_UNKNOWN")
    t.close()
