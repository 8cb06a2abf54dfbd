"""What the mapper does in one go: batches of driver calls. No caller waits for all of it (I12)."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import pytest

import vtensor
from support import (
    PER_PAGE,
    eventually,
    filled,
    mapper_calls,
    quarter,
    run_snippet,
    simcuda_disarm,
    sometimes,
)

PAGE = 2 << 20  # of a GPU


@pytest.mark.parametrize(("count", "pages"), [(1, 8), (16, 2)])
def test_pages_that_lie_side_by_side_are_opened_in_one_call(pool_factory, count, pages):
    """One for each tensor."""
    pool = pool_factory("simcuda", page_size=PAGE)
    tensors = [quarter(pool, capacity=64 * PER_PAGE) for _ in range(count)]
    before = Counter(mapper_calls(pool))
    for t in tensors:
        t.prepare(pages * PER_PAGE)
    pool.wait_idle()
    made = Counter(mapper_calls(pool)) - before
    assert made["cuMemMap"] == count * pages
    assert made["cuMemSetAccess"] == made["cuMemsetD8Async"] == count


def test_unmapping_goes_in_steps(pool_factory):
    """So that growth beside it waits for one of them."""
    pages = 16000
    pool = pool_factory("host", pages=pages, prefetch=4096, cache=0)
    t = quarter(pool, pages * PER_PAGE, capacity=pages * PER_PAGE)
    with vtensor.trace.record() as recording:
        t.shrink((pages - 1) * PER_PAGE)
        eventually(lambda: pool.stats().pages_mapped <= 2)
    unmapped = [e.nbytes for e in recording.events() if e.what == "unmap" and e.role == "mapper"]
    assert len(unmapped) > 1 and max(unmapped) <= 16 << 20


@pytest.mark.parametrize("n", [1, 16])
def test_unmapping_is_bounded_by_time(sim, stream_pool, n):
    """Each call may wait for the device, so a tensor that grows meanwhile waits for the call that is under
    way: not for those of its other rows, nor of other tensors."""
    pool = stream_pool(patience=20, prefetch=PAGE, cache=0)
    rows = 16 // n

    def comes_between():
        tensors = [filled(pool, 8, rows=(rows,)) for _ in range(n)]
        stream = sim.stream(held=True)
        for t in tensors:
            t.record_stream(stream)
            t.truncate(0)
        made = sim.calls("cuMemUnmap")
        sim.slow("cuMemUnmap", 20_000)
        sim.release(stream)
        eventually(lambda: sim.calls("cuMemUnmap") > made)
        tensors[-1].extend(1)
        made = sim.calls("cuMemUnmap") - made
        sim.slow("cuMemUnmap", 0)
        pool.wait_idle()
        assert pool.stats().pages_active == rows and pool.stats().pages_pinned == 0
        for t in tensors:
            t.close()
        return made < n * rows

    assert sometimes(comes_between)


# 512 MiB, which take the mapper some tenths of a second.
BACKLOG = """
pages = 8192
pool = open_pool("host", pages, page_size=64 << 10)
def comes_between():
    with quarter(pool, capacity=pages * PER_PAGE) as t:
        t.prepare(pages * PER_PAGE)
        eventually(lambda: pool.stats().pages_prefetched)
        {what}
        ready = pool.stats().pages_prefetched
        pool.wait_idle()
        assert pool.stats().pages_prefetched == pages
    pool.trim()  # so that the next one takes as long
    return ready < pages * 0.8
assert sometimes(comes_between)
"""


@pytest.mark.parametrize("what", ["pool.trim()", "testing.check_invariants(pool)"])
def test_who_needs_quiet_waits_for_one_step(what):
    run_snippet(BACKLOG.format(what=what)).check()


def test_a_tensor_dropped_while_somebody_waits_calls_the_mapper(pool_factory):
    """The deleter finds the lock taken. The waiting thread drains what it left, and wakes the mapper."""
    pool = pool_factory("host", prefetch=16 * 4096, cache=16 * 4096)
    go, gone = threading.Event(), threading.Event()
    until = time.monotonic() + 1.0
    box: list[vtensor.VTensor] = []

    def drop():
        while go.wait() and box:
            go.clear()
            box.clear()
            gone.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    dropper = threading.Thread(target=drop)
    dropper.start()
    try:
        while time.monotonic() < until:
            box.append(quarter(pool, 4))
            pool.wait_idle()
            gone.clear()
            go.set()
            while not gone.is_set():
                pool.wait_idle()
    finally:
        box.clear()
        go.set()
        dropper.join()
        sys.setswitchinterval(interval)


def test_what_keeps_the_mapper_from_working_is_raised(sim, stream_pool):
    """It is tried again at the next operation, not all the time."""
    pool = stream_pool()
    t = filled(pool, 1)
    sim.fail("cuThreadExchangeStreamCaptureMode", 0, 10**6)
    tried = sim.calls("cuThreadExchangeStreamCaptureMode")
    t.prepare(2 * PER_PAGE)
    with pytest.raises(vtensor.DriverError, match="cuThreadExchangeStreamCaptureMode"):
        pool.wait_idle()
    time.sleep(0.1)
    assert sim.calls("cuThreadExchangeStreamCaptureMode") - tried <= 4
    simcuda_disarm()
    pool.wait_idle()
    assert pool.stats().pages_prefetched == 2
