"""Fences: what is given back is unmapped, zeroed or handed on only once no launched work can touch it.

The kernels are those of the simulated libcuda: one that is executed after its memory was unmapped or
replaced is an illegal access, which fails the test (see the fixture `sim`).
"""

from __future__ import annotations

import gc
import threading
import time

import pytest

import vtensor
from cuda_support import needs_simcuda
from kv_support import UNIT, make_cache
from kv_support import filled as filled_slot
from stream_support import NEVER
from support import (
    beside,
    calls,
    calls_since,
    check_endings,
    eventually,
    filled,
    quarter,
    run_snippet,
    simcuda_disarm,
)
from vtensor import testing
from vtensor.testing.kv_model import check_contents

AHEAD = 16 * 4096
WORKERS = pytest.mark.parametrize("ahead", [0, AHEAD], ids=["caller", "mapper"])


def stays_held(pool, pages: int) -> bool:
    time.sleep(0.02)
    return pool.stats().pages_pinned == pages


# -- what waits


def moved(t, sim) -> None:
    threading.Timer(0.1, sim.release, [0]).start()
    with t.reallocate(64) as left:
        assert left.eq(4).all()
        sim.hold(0)
        sim.kernel(0, left)


GIVES_BACK = {
    "truncate": lambda t, sim: t.truncate(0),
    "shrink": lambda t, sim: t.shrink(16),
    "front": lambda t, sim: t.shrink(16, front=True),
    "close": lambda t, sim: t.close(),
    "drop": lambda t, sim: None,
    "reallocate": moved,
}


@WORKERS
@pytest.mark.parametrize("give_back", GIVES_BACK)
def test_pages_outlive_the_work_of_the_current_stream(sim, stream_pool, ahead, give_back):
    """I3: the stream that is current at the call is waited for, whatever gives the pages back."""
    pool = stream_pool(prefetch=ahead, cache=0)
    t = filled(pool, 16, 1)
    sim.hold(0)
    sim.kernel(0, t, writes=4)
    GIVES_BACK[give_back](t, sim)
    if give_back == "drop":
        del t
    assert stays_held(pool, 4)
    assert pool.stats().pages_used == 4
    sim.release(0)
    eventually(lambda: pool.stats().pages_mapped == 0)
    assert pool.stats().pages_used == 0


@WORKERS
def test_views_are_waited_for_too(sim, stream_pool, ahead):
    """The fence is made when the last view goes, not when the tensor shrank."""
    pool = stream_pool(prefetch=ahead, cache=0)
    t = filled(pool, 16, 1)
    view = t[8:]
    t.truncate(0)
    assert stays_held(pool, 4)
    sim.hold(0)
    sim._done("simcuda_launch", 0, view.data_ptr(), view.numel(), 3)
    del view
    gc.collect()
    assert stays_held(pool, 4)
    sim.release(0)
    eventually(lambda: pool.stats().pages_pinned == 0)


@WORKERS
def test_out_of_order(sim, stream_pool, ahead):
    """Each tensor's pages go when its own work has passed, the last one's first."""
    pool = stream_pool(prefetch=ahead, cache=0)
    streams = [sim.stream(held=True) for _ in range(4)]
    tensors = [filled(pool, 4 * (n + 1), n + 1) for n in range(4)]
    for t, stream in zip(tensors, streams, strict=True):
        sim.kernel(stream, t)
        t.close(stream=stream)
    left = 10
    for n in (3, 1, 2, 0):
        assert stays_held(pool, left)
        sim.release(streams[n])
        left -= n + 1
        eventually(lambda left=left: pool.stats().pages_pinned == left)


@WORKERS
@pytest.mark.parametrize("queries, milliseconds", [(5, 0), (0, 30), (3, 20)])
def test_events_that_pass_late(sim, stream_pool, ahead, queries, milliseconds):
    pool = stream_pool(prefetch=ahead, cache=0)
    t = filled(pool, 32, 1)
    sim.late_events(queries, milliseconds)
    for length in (24, 12, 0):
        sim.kernel(0, t)  # runs behind the event of the last one, over pages that wait for its own
        t.truncate(length)
    t.close()
    pool.wait_idle()
    assert pool.stats().pages_mapped == 0


# -- coming into use again


@WORKERS
def test_growing_over_waiting_pages_revives_them(sim, stream_pool, ahead):
    """Without a driver call, and the fence that has not passed then unmaps nothing."""
    pool = stream_pool(prefetch=ahead, cache=0)
    stream = sim.stream(held=True)
    t = filled(pool, 32, 1, capacity=32)  # nothing else to look ahead to
    sim.kernel(stream, t)
    t.truncate(4, stream=stream)
    assert stays_held(pool, 7)
    before = calls(pool)
    t.extend(20)
    made = calls_since(pool, before)
    assert not {"cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemCreate", "cuMemsetD8Async"} & made.keys()
    stats = pool.stats()
    assert t.eq(1).all() and stats.pages_pinned + stats.pages_prefetched == 2
    sim.kernel(0, t, writes=8)
    sim.release(stream)
    eventually(lambda: pool.stats().pages_pinned == 0)
    testing.check_invariants(pool)
    assert t.length == 24 and t.eq(8).all()


def test_preparing_over_waiting_pages_revives_them(sim, stream_pool):
    """What is called ready is not unmapped by an older fence."""
    pool = stream_pool(prefetch=AHEAD, cache=0)
    stream = sim.stream(held=True)
    t = filled(pool, 40, 1)
    sim.kernel(stream, t)
    t.truncate(4, stream=stream)
    t.prepare(12)
    eventually(lambda: pool.stats().pages_prefetched == 3)
    sim.release(stream)
    eventually(lambda: pool.stats().pages_pinned == 0)
    testing.check_invariants(pool)
    assert pool.stats().pages_prefetched == 3
    t.extend(12)
    assert t.eq(1).all()


def test_a_second_shrink_waits_for_its_own_fence(sim, stream_pool):
    """Not for the first one's, which was made before the work that revived pages saw."""
    pool = stream_pool()
    first, second = sim.stream(held=True), sim.stream(held=True)
    t = filled(pool, 32, 1)
    sim.kernel(first, t)
    t.truncate(4, stream=first)
    t.extend(12)
    sim.kernel(second, t)
    t.truncate(4, stream=second)
    sim.release(first)
    assert stays_held(pool, 3)
    sim.release(second)
    pool.wait_idle()
    assert pool.stats().pages_pinned == 0


# -- order between the caller's stream and the side stream


def recycled(pool, pages: int) -> None:
    """Leaves free pages in the pool that hold bytes of a closed tensor."""
    filled(pool, 4 * pages, 255).close()
    pool.wait_idle()
    pool.trim()
    filled(pool, 4 * pages, 255).close()
    pool.wait_idle()


def being_zeroed(sim, stream_pool):
    """A page of a tensor, with three ahead whose zeroing has not run: all streams are held."""
    pool = stream_pool(prefetch=AHEAD, cache=0)
    recycled(pool, 8)
    t = quarter(pool, 4)
    sim.hold()
    t.prepare(12)
    eventually(lambda: pool.stats().pages_prefetched == 3)
    return t


@pytest.mark.parametrize("given_back", [False, True])
def test_growth_waits_on_the_device_for_the_zeroing(sim, stream_pool, given_back):
    """Prepared pages are zeroed on the side stream; the caller's kernels start behind that, also where the
    pages were given back and revived meanwhile."""
    t = being_zeroed(sim, stream_pool)
    if given_back:
        t.truncate(0)
    sim.release(0)
    t.extend(16 - t.length)
    sim.kernel(0, t, writes=7)
    assert sim.pending(0) > 0  # waits
    sim.release()
    assert t.eq(7).all()


def test_what_is_zeroed_needs_no_driver_call(sim, stream_pool):
    """Once the zeroing is known to have passed; so it may be grown into during a capture too."""
    pool = stream_pool(prefetch=AHEAD, cache=0)
    recycled(pool, 8)
    t, u = quarter(pool, 4), quarter(pool, 4)
    for tensor in (t, u):
        tensor.prepare(12)
    pool.wait_idle()
    before = calls(pool)
    t.extend(12)
    assert not calls_since(pool, before)
    stream = sim.stream()
    sim.begin_capture(stream)
    u.extend(12)
    sim.destroy_graph(sim.end_capture(stream))
    assert not t.any() and not u.any()


def test_zeroing_that_never_ends_delays_and_does_not_wipe(sim, stream_pool):
    """The tensor closes while the side stream still zeroes ahead of it: nothing is unmapped under that."""
    t = being_zeroed(sim, stream_pool)
    sim.release(0)
    t.close()
    assert stays_held(t.pool, 4)
    sim.release()
    eventually(lambda: t.pool.stats().pages_mapped == 0)


# -- cached pages


def cached(sim, pool, stream, value=5, writes=6):
    """A closed tensor of 16 positions whose last owner's kernel in `stream` has not run."""
    t = filled(pool, 16, value)
    sim.kernel(stream, t, writes=writes)
    t.close(stream=stream)
    assert pool.stats().pages_cached == 4


def test_a_reused_tensor_starts_behind_its_last_owner(sim, stream_pool):
    """I7: the kernel of the last owner writes first, then the zeroing, then the new owner."""
    pool = stream_pool(prefetch=AHEAD)
    stream = sim.stream(held=True)
    cached(sim, pool, stream)
    t = quarter(pool)
    assert pool.stats().tensors_reused == 1
    t.extend(16)
    sim.kernel(0, t, writes=9)
    assert sim.pending(0) > 0
    sim.release(stream)
    assert t.eq(9).all()


@pytest.mark.parametrize("zero", ["never", "new_owner", "always"])
def test_a_reused_tensor_that_ends_unused(sim, stream_pool, zero):
    """Its pages are the last owner's until that one's work has passed, whatever the new one's stream does."""
    pool = stream_pool(prefetch=AHEAD, zero=zero)
    stream, other = sim.stream(held=True), sim.stream()
    cached(sim, pool, stream)
    quarter(pool).close(stream=other)
    pool.trim()
    assert pool.stats().pages_mapped == 4
    sim.release(stream)
    eventually(lambda: pool.trim() or pool.stats().pages_mapped == 0)


def test_cached_pages_are_zeroed_behind_the_last_owner(sim, stream_pool):
    """By the mapper, once that one's work has passed; then they are ready without a driver call."""
    pool = stream_pool(prefetch=AHEAD)
    stream = sim.stream(held=True)
    cached(sim, pool, stream)
    time.sleep(0.02)
    assert "cuMemsetD8Async" not in pool.stats().driver_calls["mapper"]
    sim.release(stream)
    pool.wait_idle()
    before = calls(pool)
    t = quarter(pool, 16)
    assert not calls_since(pool, before)
    assert not t.any()


def test_what_was_given_up_of_a_reused_tensor_is_not_shown(sim, stream_pool):
    """I7: pages that memory pressure took from what was ahead, and growth got back before they were gone."""
    pool = stream_pool(pages=8, prefetch=AHEAD, cache=8 * 4096, patience=0.1)
    stream = sim.stream(held=True)
    cached(sim, pool, stream, value=255, writes=254)
    t = quarter(pool)
    assert pool.stats().tensors_reused == 1
    with pytest.raises(vtensor.OutOfPages):
        quarter(pool, 20)  # 5 pages of the 4 that are left: takes what t has ahead
    t.extend(16)
    sim.release(stream)
    assert not t.any()


# -- sharing


@WORKERS
@pytest.mark.parametrize("ends", [False, True], ids=["never ends", "ends"])
@pytest.mark.parametrize("operation", ["fork", "unshare", "extend", "reallocate"])
def test_remapping_waits_for_running_work(sim, stream_pool, ahead, operation, ends):
    """I12: no page is protected, copied or remapped under a kernel; if that never ends, nothing changes."""
    pool = stream_pool(prefetch=ahead, cache=0, patience=20 if ends else 0.2)
    t = filled(pool, 10, 1)
    child = t.fork() if operation in ("unshare", "extend") else None
    target = child if child is not None else t
    act = {
        "fork": lambda: target.fork(),
        "unshare": lambda: target.unshare(0, 10),
        "extend": lambda: target.extend(4),
        "reallocate": lambda: target.reallocate(80),
    }[operation]
    sim.hold(0)
    sim.kernel(0, target, writes=0 if child is not None else 3)
    if ends:
        threading.Timer(0.05, sim.release, [0]).start()
    else:
        before = (pool.stats().pages_mapped, pool.stats().pages_used, target.length)
        with pytest.raises(vtensor.TimedOut, match=rf"\[VTensor.{operation}\] timed out after 0.2 s: work"):
            act()
        assert (pool.stats().pages_mapped, pool.stats().pages_used, target.length) == before
        testing.check_invariants(pool)
        sim.release(0)
    result = act()
    assert result[:10].eq(1 if child is not None else 3).all()


@pytest.mark.parametrize("freed", [False, True])
def test_a_published_prefix_waits_for_its_publishers_work(sim, stream_pool, freed):
    """I6, I12: pages that were published while they could be written are mapped in another slot only after
    work that uses them, also that of a slot that is gone."""
    pool = stream_pool(pages=160, prefetch=1 << 20, patience=0.2)
    with make_cache(pool, lookahead=UNIT) as cache:
        tokens = list(range(4 * UNIT))
        slot = filled_slot(cache, len(tokens))
        pool.wait_idle()
        if not freed:
            cache.publish(slot, tokens)
        sim.hold(0)
        sim.kernel(0, cache[0][0][slot, : len(tokens)])
        if freed:
            cache.publish(slot, tokens)
            cache.free(slot)
        with pytest.raises(vtensor.TimedOut, match="work launched on the device"):
            cache.alloc([*tokens, 0])
        testing.check_invariants(pool)
        sim.release(0)
        check_contents(cache, cache.alloc([*tokens, 0]), tokens)


def test_a_prefix_waits_for_pages_that_leave_where_it_goes(sim, stream_pool):
    """I3: the only free slot has pages that a kernel of its last request still reads."""
    pool = stream_pool(pages=160, cache=0, patience=0.2)
    with make_cache(pool, max_batch=2) as cache:
        tokens = list(range(4 * UNIT))
        cache.publish(filled_slot(cache, len(tokens)), tokens)
        last = filled_slot(cache, len(tokens))
        stream = sim.stream(held=True)
        sim.kernel(stream, cache[0][0][last, : len(tokens)])
        cache.free(last, stream=stream)
        with pytest.raises(vtensor.TimedOut, match="the pages of a freed slot"):
            cache.alloc([*tokens, 0])
        testing.check_invariants(pool)
        sim.release(stream)
        check_contents(cache, cache.alloc([*tokens, 0]), tokens)


def test_a_group_comes_back_only_where_its_pages_have_left(sim, stream_pool):
    """I3, I8: the second slot has pages that the driver refuses to unmap, where the first one's are to go."""
    with make_cache(stream_pool(pages=160)) as cache:
        group = [filled_slot(cache, 4 * UNIT)]
        group += cache.fork(*group)
        sim.fail("cuMemUnmap", refuse=10**6)
        cache.swap_out(group)
        with pytest.raises(vtensor.DriverError, match="cuMemUnmap"):
            cache.swap_in(group)
        simcuda_disarm()
        testing.check_invariants(cache.pool)
        assert cache.swap_in(group)
        for slot in group:
            cache.wait(slot)
            check_contents(cache, slot, range(4 * UNIT))


def test_a_copy_that_never_ends(sim, stream_pool):
    """I12: bounded, says on what, changes nothing; and what was to be copied is never unmapped under it."""
    pool = stream_pool(patience=0.2)
    t = filled(pool, 10, 1)
    child = t.fork()
    sim.hold()
    sim.release(0)
    with pytest.raises(vtensor.TimedOut, match=r"\[driver.copy_pages\] 1 pages were to be copied"):
        child.extend(4)
    assert child.length == 10 and child.eq(1).all() and t.eq(1).all()
    testing.check_invariants(pool)
    sim.release()
    child.extend(4)
    assert child[:10].eq(1).all()


@pytest.mark.parametrize("closed", [False, True])
def test_a_late_copy_harms_no_tensor(sim, stream_pool, closed):
    """The page that it writes to goes to no other tensor (I7), and those that it reads stay mapped."""
    pool = stream_pool(pages=8, patience=0.2)
    t = filled(pool, 10, 1)
    child = t.fork()
    sim.hold()
    sim.release(0)
    with pytest.raises(vtensor.TimedOut):
        child.extend(4)
    if closed:
        t.close(), child.close()
    other = filled(pool, 12, 9)  # all that are left
    sim.release()
    pool.wait_idle()
    assert other.eq(9).all()
    other.close(), t.close(), child.close()
    pool.wait_idle()
    assert pool.stats().pages_used == 0  # I14


# -- fences that never pass


@WORKERS
def test_a_fence_that_never_passes(sim, stream_pool, ahead):
    """I12: waits are bounded and say on what, the pages stay held, the next call works."""
    pool = stream_pool(pages=12, prefetch=ahead, cache=0, patience=0.2)
    t = filled(pool, 16, 1)
    sim.late_events(NEVER)
    t.truncate(0)
    begin = time.monotonic()
    with pytest.raises(vtensor.TimedOut, match=r"\[Pool.wait_idle\].* 1 tensors have pages that work"):
        pool.wait_idle(0.2)
    with pytest.raises(vtensor.OutOfPages, match="the pool has 8 of 12 free"):
        quarter(pool, 40)
    with pytest.raises(vtensor.TimedOut):
        t.fork()
    assert time.monotonic() - begin < 10  # 0.2 s each
    assert pool.stats().pages_pinned == 4 and pool.stats().pages_used == 4
    with filled(pool, 16, 2) as u:
        assert u.eq(2).all() and pool.stats().pages_used == 8
    testing.check_invariants(pool)
    t.close()
    sim.late_events()
    pool.wait_idle()
    assert pool.stats().pages_mapped == 0


_EXIT = """
import time
from stream_support import SimulatedDevice, NEVER
import vtensor.pool
vtensor.pool._CLOSE_SECONDS = 0.5
pool = open_pool("simcuda", prefetch={prefetch}, patience=0.5)
sim = SimulatedDevice()
t = filled(pool, 16, 3)
view = t[2:]
u = filled(pool, 16, 3)
sim.hold()
sim.kernel(0, t)
sim.kernel(0, u)
t.truncate(4)
u.close()
t.prepare(20)
{end}
"""


@needs_simcuda
@WORKERS
def test_the_process_ends_with_work_that_never_does(ahead):
    """I14: at exit nothing waits for ever, and nothing is unmapped under a kernel."""
    ends = {"live": "", "closed": "pool.close()", "dropped": "del view, t, u, pool; gc.collect()"}
    check_endings({name: _EXIT.format(prefetch=ahead, end=end) for name, end in ends.items()}, timeout=20)


_EXIT_OF_MANY = """
import time
from stream_support import SimulatedDevice
import vtensor.pool
vtensor.pool._CLOSE_SECONDS = 1.0
sim = SimulatedDevice()
sim.hold()
pools = [open_pool("simcuda", patience=0.5) for _ in range(20)]
tensors = [filled(pool, 16) for pool in pools]
for t in tensors:
    sim.kernel(0, t)
began = time.monotonic()
vtensor.pool._close_pools()
assert time.monotonic() - began < 10, "each pool waited its own time"
"""


@needs_simcuda
def test_all_pools_together_wait_no_longer_than_one():
    run_snippet(_EXIT_OF_MANY).check()


def test_a_capture_that_begins_beside_a_fence_stays_valid(sim, stream_pool):
    """Between asking whether a stream is captured and recording there, another thread begins a capture: the
    event is part of that then, and asking whether it has passed would invalidate it."""
    pool = stream_pool()
    stream = sim.stream()
    t = filled(pool, 8)
    lease = vtensor.lease(t, stream=stream)
    lease.__enter__()
    recorded = sim.calls("cuEventRecord")
    with sim.calls_held("cuEventRecord"):
        ended = beside(lease.__exit__)
        eventually(lambda: sim.calls("cuEventRecord") > recorded)
        sim.begin_capture(stream)
    refused = ended.exception(30)
    graph = sim.end_capture(stream)  # answers 901 where the capture was invalidated
    sim.destroy_graph(graph)
    assert isinstance(refused, vtensor.DriverError) and "is being captured" in str(refused)
    lease.__exit__()  # after the capture
    t.close()
    pool.wait_idle(10)
    assert pool.stats().pages_mapped == 0
