"""Fences that the driver refuses, and every call around them: nothing is lost, and nothing goes too early."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

import vtensor
from support import beside, eventually, filled, quarter, simcuda_disarm, sometimes, within
from vtensor import testing

AHEAD = 16 * 4096
ILLEGAL_ADDRESS = 700  # a CUresult
ASKING = ["cuEventRecord", "cuEventQuery", "cuStreamIsCapturing"]
GIVING_BACK = ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
WORKERS = pytest.mark.parametrize("ahead", [0, AHEAD], ids=["caller", "mapper"])


@WORKERS
@pytest.mark.parametrize("call", ASKING + GIVING_BACK)
@pytest.mark.parametrize("refuse", [1, 5])
def test_giving_back_is_refused_and_tried_again(sim, stream_pool, ahead, call, refuse):
    """Shrinking and closing do not fail with the driver. The mapper, or else the next call, tries again."""
    pool = stream_pool(prefetch=ahead, cache=0)
    t, u = filled(pool, 32, 1), filled(pool, 8, 2)
    stream = sim.stream(held=True)
    sim.kernel(stream, t)
    with vtensor.lease(t, stream=stream):
        pass
    sim.fail(call, 0, refuse)
    t.truncate(8)
    u.close()
    sim.release(stream)
    t.truncate(4)
    eventually(lambda: pool.stats().pages_pinned == 0)
    testing.check_invariants(pool)
    assert t.eq(1).all()
    t.close()
    for _ in range(refuse + 1):  # I14
        with suppress(vtensor.DriverError):
            pool.wait_idle(5)
            pool.trim()
    assert pool.stats().pages_mapped == pool.stats().nbytes_reserved == 0


@WORKERS
def test_a_refused_question_loses_no_fence(sim, stream_pool, ahead):
    """The first fence has passed, the second cannot be asked about, the third has not passed."""
    pool = stream_pool(prefetch=ahead, cache=0)
    streams = [sim.stream(held=True) for _ in range(4)]
    t = filled(pool, 16, 1)
    for stream in streams:
        sim.kernel(stream, t)
        t.record_stream(stream)
    t.truncate(0)
    sim.fail("cuEventQuery", 1, 1)
    sim.release(streams[0])
    for stream in streams[1:]:
        assert not within(0.3 if ahead else 0.02, lambda: pool.stats().pages_pinned == 0)
        sim.release(stream)
    eventually(lambda: pool.stats().pages_pinned == 0)


def test_leases_leave_no_fences_behind(sim, stream_pool):
    """A named stream's fences go once they have passed, however many leases there were."""
    pool = stream_pool()
    stream = sim.stream()
    with filled(pool, 8) as t:
        for _ in range(50):
            with vtensor.lease(t, stream=stream):
                sim.kernel(stream, t)
        assert sim.calls("cuEventCreate") - sim.calls("cuEventDestroy") < 10


def test_a_cached_tensor_whose_fence_cannot_be_asked(sim, stream_pool):
    """I9: not even then does the mapper end the process."""
    pool = stream_pool(prefetch=AHEAD)
    stream = sim.stream(held=True)
    t = filled(pool, 16, 5)
    sim.kernel(stream, t)
    t.close(stream=stream)
    sim.fail("cuEventQuery", 1, 6)
    asked = sim.calls("cuEventQuery")  # after fail(), between which and this the mapper may ask too
    eventually(lambda: sim.calls("cuEventQuery") >= asked + 9)
    sim.slow("cuMemsetD8Async", 200_000)
    zeroed = sim.calls("cuMemsetD8Async")
    sim.release(stream)
    eventually(lambda: sim.calls("cuMemsetD8Async") > zeroed)
    pool.wait_idle()  # it asks again once the mapper, which is at work on the tensor, has ended
    sim.slow("cuMemsetD8Async", 0)
    with quarter(pool, 16) as t:
        assert not t.any()


def go_through(pool, sim, stream, n: int) -> str | None:
    """All that fences are for, with the n-th driver call from there on refused, of either thread."""
    t = filled(pool, 10, 1)
    parent = filled(pool, 10, 2)
    child = parent.fork()
    error = None
    lease = vtensor.lease(t, stream=stream)
    with testing.fail_after(pool, n):
        try:
            with lease:
                sim.kernel(stream, t)
                t.truncate(6)
            t.extend(18)
            child.extend(6)
            parent.unshare(0, 10)
            t.shrink(4, front=True, stream=stream)
            fork = t.fork(stream=stream)
            fork.close(stream=stream)
            t.prepare(8)
            t.extend(8)
        except vtensor.VTensorError as refused:
            error = str(refused)
        with suppress(vtensor.DriverError):
            pool.wait_idle()  # what the mapper still does is refused too
    lease.__exit__(None, None, None)  # again, where its end was refused
    testing.check_invariants(pool)
    assert t[: min(t.length, 2)].eq(1).all() and parent.eq(2).all() and child[:10].eq(2).all()
    for tensor in (t, parent, child):
        tensor.close()
    return error


@WORKERS
@pytest.mark.parametrize("cache", [0, None], ids=["no reuse", "reuse"])
def test_every_driver_call_refused(sim, stream_pool, ahead, cache):
    """I8, of either thread: an error or none, contents are whole, and in the end nothing is held or lost."""
    pool = stream_pool(prefetch=ahead, cache=cache)
    stream = sim.stream()
    seen = set()
    for n in range(160):
        error = go_through(pool, sim, stream, n)
        seen.add(error is None)
        try:
            pool.wait_idle()
        except vtensor.DriverError:  # what the mapper met, raised once
            pool.wait_idle()
        pool.trim()
        stats = pool.stats()
        assert (stats.pages_pinned, stats.pages_mapped, pool.broken) == (0, 0, None), (n, error)
        assert stats.nbytes_reserved == 0, (n, error)
    assert seen == {True, False}


def test_stale_positions_zeroed_on_the_device_are_not_unmapped_under_it(sim, stream_pool):
    """Unsharing is undone because a later zeroing is refused: only once the earlier one has run."""
    pool = stream_pool()
    t = filled(pool, 10, 1, rows=(2,))
    child = t.fork()
    child.truncate(5)
    sim.fail("cuMemsetD8Async", 1, 1)
    copies = sim.calls("cuMemcpyDtoDAsync")

    def hold_for_a_while():
        with sim.calls_held("cuMemcpyDtoDAsync"):  # after the wait for the stream, before the zeroing
            begun.set()
            eventually(lambda: sim.calls("cuMemcpyDtoDAsync") != copies)
            sim.hold(0)
        time.sleep(0.6)
        sim.release(0)

    begun = threading.Event()
    holding = beside(hold_for_a_while)
    begun.wait()
    with pytest.raises(vtensor.DriverError, match="cuMemsetD8Async"):
        child.extend(2)
    assert sim.pending(0) == 0  # waited for what was zeroed
    holding.result(30)
    assert child.length == 5 and child.eq(1).all() and t.eq(1).all()
    testing.check_invariants(pool)
    child.extend(2)
    assert not child[:, 5:].any()


def test_pages_whose_zeroing_was_refused_are_not_for_the_next_owner(sim, stream_pool):
    """I7"""
    pool = stream_pool(prefetch=AHEAD)
    t = filled(pool, 16, 7)
    sim.fail("cuMemsetD8Async")
    t.close()
    pool.wait_idle()
    with quarter(pool, 16) as u:
        assert u.ne(7).all()


def test_pages_whose_zeroing_no_fence_follows_leave_behind_it(sim, stream_pool):
    pool = stream_pool(prefetch=AHEAD)
    t = filled(pool, 16, 7)
    zeroed = sim.calls("cuMemsetD8Async")
    with sim.calls_held("cuMemsetD8Async"):
        t.close()
        eventually(lambda: sim.calls("cuMemsetD8Async") > zeroed)
        sim.hold()
        sim.release(0)  # where the tensor's own work is
        sim.fail("cuEventRecord")
    assert not within(0.1, lambda: pool.stats().pages_mapped == 0)
    sim.release()
    pool.wait_idle()
    assert pool.stats().pages_mapped == 0


def test_the_mapper_leaves_a_closed_pool_of_a_device_in_error_alone(sim, stream_pool):
    """The process may be ending, and libcuda with it. A second close() of the pool tries again."""
    pool = stream_pool(prefetch=AHEAD, cache=0)
    t = filled(pool, 16)
    sim.fail("*", refuse=10**9, code=ILLEGAL_ADDRESS)
    t.close()
    pool.close()

    def leaves_it_alone() -> bool:
        tried = sim.calls("*")
        time.sleep(0.6)  # twice as long as the mapper waits where the pool is open
        return sim.calls("*") == tried

    assert sometimes(leaves_it_alone, 2)  # it may have been at work
    simcuda_disarm()
    pool.close()
    assert pool.stats().pages_mapped == 0
