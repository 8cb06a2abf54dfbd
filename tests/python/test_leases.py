"""Leases: pages stay for as long as launched work, or a captured graph, may touch them."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

import vtensor
from cuda_support import needs_simcuda
from support import beside, eventually, filled, quarter, run_snippet, within
from vtensor import testing

AHEAD = 1 << 20


@pytest.fixture(params=[0, AHEAD], ids=["caller", "mapper"])
def pool(request, stream_pool):
    """A pool whose caller unmaps, or whose mapper does."""
    return stream_pool(prefetch=request.param, cache=0)


def held(pool) -> int:
    return pool.stats().pages_pinned


def go_with(sim, pool, stream) -> None:
    """What is held stays until the stream's work has passed, and goes then."""
    assert not within(0.02, lambda: held(pool) == 0)
    sim.release(stream)
    eventually(lambda: held(pool) == 0)


def test_what_is_given_back_meanwhile_waits_for_the_lease(sim, pool):
    """From within it, by this thread and by others, until its work has passed."""
    stream = sim.stream(held=True)
    t = filled(pool, 32, 1)
    with vtensor.lease(t, stream=stream):
        t.truncate(16)
        beside(t.truncate, 4).result(30)
        assert held(pool) == 7
        sim.kernel(stream, t)
        assert t.pages()[-1].state == "pinned"
    assert held(pool) == 7
    go_with(sim, pool, stream)
    assert t.eq(1).all()


def test_the_extent_of_the_beginning_is_held(sim, pool):
    """Kernels launched in the lease run over pages that were given back before the launch; here in the
    current stream, which is meant where none is named."""
    t = filled(pool, 32, 1)
    address, nbytes = t.data_ptr(), t.numel()
    with vtensor.lease(t):
        t.truncate(0)
        sim.hold(0)
        sim._done("simcuda_launch", 0, address, nbytes, 5)
    go_with(sim, pool, 0)


def test_streams_of_several_leases(sim, pool):
    """Passing out of order: the last one counts."""
    streams = [sim.stream(held=True) for _ in range(3)]
    t = filled(pool, 16)
    for stream in streams:
        with vtensor.lease(t, stream=stream):
            sim.kernel(stream, t)
    t.close()
    for stream in (streams[1], streams[2]):
        sim.release(stream)
        assert not within(0.02, lambda: held(pool) == 0)
    sim.release(streams[0])
    eventually(lambda: held(pool) == 0)


def test_a_stream_may_end_after_its_lease(sim, pool):
    """What runs in it runs on; its number may mean another stream by then."""
    stream = sim.stream(held=True)
    t = filled(pool, 16)
    with vtensor.lease(t, stream=stream):
        sim.kernel(stream, t)
    sim.destroy(stream)
    t.close()
    assert not within(0.02, lambda: held(pool) == 0)
    sim.release()  # a stream that is gone has no name
    eventually(lambda: held(pool) == 0)


@pytest.mark.parametrize("ahead", [0, AHEAD])
@pytest.mark.parametrize("ends", [False, True], ids=["never ends", "ends"])
def test_fork_waits_for_an_open_lease(sim, stream_pool, ahead, ends):
    """A kernel of it may still write: protecting its pages would stop it, or share what it writes (I6)."""
    pool = stream_pool(prefetch=ahead, cache=0, patience=20 if ends else 0.2)
    stream = sim.stream(held=True)
    t = filled(pool, 8, 1)
    with vtensor.lease(t, stream=stream):
        sim.kernel(stream, t, writes=9)
        if ends:
            threading.Timer(0.1, sim.release, [stream]).start()
        else:
            with pytest.raises(vtensor.TimedOut, match=r"\[VTensor.fork\].*nothing was changed"):
                t.fork()
            sim.release(stream)
        child = t.fork()
    assert child.eq(9).all() and t.eq(9).all()


@pytest.mark.parametrize("closed", ["tensor", "pool"])
def test_what_is_closed_in_a_lease(sim, pool, closed):
    stream = sim.stream(held=True)
    t = filled(pool, 16)
    with vtensor.lease(t, stream=stream):
        sim.kernel(stream, t)
        (t if closed == "tensor" else pool).close()
        assert t.closed and pool.stats().pages_orphaned == 4
    stats = pool.stats()
    assert (stats.pages_used, stats.pages_pinned) == (4, 4)
    go_with(sim, pool, stream)
    eventually(lambda: pool.stats().pages_used == 0)


def test_of_many_tensors(sim, pool):
    stream = sim.stream(held=True)
    tensors = [filled(pool, 8, n + 1) for n in range(5)]
    events = sim.calls("cuEventRecord")
    with vtensor.lease(*tensors, stream=stream):
        for t in tensors:
            sim.kernel(stream, t)
    assert sim.calls("cuEventRecord") - events == 1  # one fence for all
    for t in tensors:
        t.close()
    assert held(pool) == 10
    go_with(sim, pool, stream)


def test_of_nothing_and_of_an_empty_tensor(pool):
    with vtensor.lease():
        pass
    with quarter(pool) as t, vtensor.lease(t, t):
        t.extend(8)
    eventually(lambda: held(pool) == 0)


def test_one_lease_object_again_and_nested(pool):
    with filled(pool, 8) as t:
        lease = vtensor.lease(t)
        for _ in range(2):
            with lease:
                pass
        with lease, pytest.raises(vtensor.VTensorError, match="make one for each"):
            lease.__enter__()
        lease.__exit__(None, None, None)  # ended already: nothing
        t.truncate(0)
        eventually(lambda: held(pool) == 0)


def test_ended_by_another_thread_and_by_an_error(sim, pool):
    stream = sim.stream(held=True)
    t = filled(pool, 16)
    lease = vtensor.lease(t, stream=stream)
    lease.__enter__()
    sim.kernel(stream, t)
    beside(lease.__exit__, None, None, None).result(30)
    with pytest.raises(ZeroDivisionError), vtensor.lease(t, stream=stream):
        sim.kernel(stream, t)
        raise ZeroDivisionError
    t.close()
    go_with(sim, pool, stream)


def test_a_lease_is_begun_and_ended_by_one_thread_at_a_time(sim, pool):
    stream = sim.stream()
    t = filled(pool, 16)
    lease = vtensor.lease(t, stream=stream)
    lease.__enter__()
    before = sim.calls("cuEventRecord")
    with sim.calls_held("cuEventRecord"):
        ended = beside(lease.__exit__, None, None, None)
        eventually(lambda: sim.calls("cuEventRecord") > before)
        with pytest.raises(vtensor.VTensorError, match="another thread begins or ends"):
            lease.__exit__(None, None, None)
        with pytest.raises(vtensor.VTensorError, match="make one for each"):
            lease.__enter__()
    ended.result(30)
    with lease:
        pass
    t.truncate(0)
    eventually(lambda: held(pool) == 0)


@pytest.mark.parametrize("error", [vtensor.Asleep, vtensor.Closed])
def test_a_refused_lease_leaves_no_tensor_with_its_stream(sim, pool, error):
    """The stream may end, as no work was launched for the lease."""
    stream = sim.stream()
    t, other = filled(pool, 16), filled(pool, 16, tag="other")
    lease = vtensor.lease(t, other, stream=stream)
    pool.sleep(contents="discard", tag="other") if error is vtensor.Asleep else other.close()
    with pytest.raises(error, match=r"\[lease\]"):
        lease.__enter__()
    sim.destroy(stream)
    t.close(), other.close()
    eventually(lambda: pool.stats().pages_mapped == 0)
    pool.wait_idle()


@pytest.mark.parametrize("moves", [None, "reserve", "reallocate", "when_full"])
def test_record_stream_lasts_for_the_tensors_life(sim, pool, moves):
    """Wherever its pages are."""
    stream = sim.stream()
    t = filled(pool, 16, when_full="move")
    t.record_stream(stream)
    if moves == "reserve":
        vtensor.together.reserve(t, 2 * t.capacity)
    elif moves == "reallocate":
        t = t.reallocate(2 * t.capacity)
    elif moves == "when_full":
        t.shrink(1, front=True)
        t.extend(t.capacity - t.length)
        t.truncate(16)
        eventually(lambda: held(pool) == 0)
    for length in (12, 8):
        sim.hold(stream)
        sim.kernel(stream, t)
        t.truncate(length)
        go_with(sim, pool, stream)


@pytest.mark.parametrize("moves", [lambda t: t.reallocate(64), lambda t: vtensor.together.reserve(t, 64)])
def test_a_lease_waits_for_a_tensor_that_moves(sim, stream_pool, moves):
    """Else pages would be writable in two places (I6)."""
    pool = stream_pool()
    stream = sim.stream(held=True)
    t = filled(pool, 16)
    t.record_stream(stream)

    def lease():
        with suppress(vtensor.Closed), vtensor.lease(t, stream=stream):
            return t.address
        return 0

    moving = beside(moves, t)
    assert not within(0.05, moving.done)
    leasing = beside(lease)
    assert not within(0.05, leasing.done)
    sim.release(stream)
    moving.result(30)
    assert leasing.result(30) == t.address
    testing.check_invariants(pool)


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuCtxGetCurrent"])
def test_a_refused_fence_keeps_the_pages(sim, stream_pool, call):
    """The lease has not ended then: its end raises, and can be tried again."""
    pool = stream_pool()
    stream = sim.stream(held=True)
    t, u = filled(pool, 16), filled(pool, 8)
    lease = vtensor.lease(t, u, stream=stream)
    with pytest.raises(vtensor.DriverError, match=call):
        with lease:
            sim.kernel(stream, t)
            sim.fail(call, 0, 2)  # once a tensor
    t.close(), u.close()
    sim.release(stream)
    assert held(pool) == 6
    lease.__exit__(None, None, None)
    eventually(lambda: held(pool) == 0)


# -- captured graphs


def captured(sim, pool, t, stream, writes=7):
    """A graph of a kernel over t."""
    sim.begin_capture(stream)
    with vtensor.lease(t, stream=stream):
        sim.kernel(stream, t, writes=writes)
    return sim.end_capture(stream)


def test_a_captured_lease_lasts_for_the_graphs_life(sim, pool):
    """Until the graph and what was instantiated of it are gone, in whatever order."""
    stream = sim.stream()
    t = filled(pool, 16, 1)
    address = t.data_ptr()
    graph = captured(sim, pool, t, stream)
    executables = [sim.instantiate(graph) for _ in range(2)]
    t.truncate(4)
    assert not within(0.02, lambda: held(pool) == 0)
    sim.replay(executables[0], stream)
    assert t.eq(7).all()
    sim.destroy_graph(graph)
    sim.replay(executables[1], stream)
    sim.destroy_executable(executables[0])
    assert not within(0.02, lambda: held(pool) == 0)
    sim.destroy_executable(executables[1])
    eventually(lambda: held(pool) == 0)
    assert t.data_ptr() == address and t.eq(7).all()


def test_the_end_of_a_graph_makes_no_driver_call_in_its_thread(sim, stream_pool):
    """CUDA's callbacks may not: the simulated ones are refused there, which would show as held pages. The
    mapper unmaps, also in a pool that has none until then."""
    pool = stream_pool(prefetch=0)
    stream = sim.stream()
    t = filled(pool, 16)
    graph = captured(sim, pool, t, stream)
    t.close()
    before = pool.stats().driver_calls
    sim.destroy_graph(graph)
    eventually(lambda: pool._core.driver_calls()["mapper"].get("cuMemUnmap"))
    after = pool._core.driver_calls()
    assert after["caller"] == before["caller"]
    assert pool.stats().pages_mapped == 0


def test_a_graph_that_outlives_its_pool(sim, pool):
    """The last reference to the pool goes in the mapper's thread, not in CUDA's."""
    stream = sim.stream()
    t = filled(pool, 16)
    graph = captured(sim, pool, t, stream)
    executable = sim.instantiate(graph)
    sim.destroy_graph(graph)
    pool.close()
    assert pool.stats().pages_orphaned == 4
    sim.replay(executable, stream)
    sim.destroy_executable(executable)
    eventually(lambda: pool.stats().pages_used == 0)


def test_driver_work_in_a_capture_is_refused(sim, pool):
    """With an error, and nothing is changed. A shrink only takes its time: the capturing stream cannot be
    fenced, so its pages go later, by themselves where there is a mapper."""
    stream = sim.stream()
    t = filled(pool, 16, 1)
    parent = filled(pool, 4, 2)
    sim.begin_capture(stream)
    before = pool.stats().pages_used
    with pytest.raises(vtensor.VTensorError, match="captured into a CUDA graph"):
        parent.fork(stream=stream)
    assert pool.stats().pages_used == before and parent.eq(2).all()
    t.truncate(4, stream=stream)
    assert t.length == 4 and held(pool) == 3
    sim.destroy_graph(sim.end_capture(stream))
    child = parent.fork(stream=stream)
    assert child.eq(2).all()
    eventually(lambda: held(pool) == 0)


@pytest.mark.parametrize("call", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_a_graph_that_cannot_hold_a_lease(sim, stream_pool, call):
    """Then the life of the graph is unknown: the pages stay, and the end of the lease raises."""
    pool = stream_pool()
    stream = sim.stream()
    t = filled(pool, 16)
    lease = vtensor.lease(t, stream=stream)
    sim.begin_capture(stream)
    with pytest.raises(vtensor.DriverError, match=call), lease:
        sim.kernel(stream, t, writes=7)
        sim.fail(call)
    t.truncate(0)
    assert held(pool) == 4
    lease.__exit__(None, None, None)  # once more
    graph = sim.end_capture(stream)
    executable = sim.instantiate(graph)
    sim.replay(executable, stream)
    sim.destroy_graph(graph)
    sim.destroy_executable(executable)
    eventually(lambda: held(pool) == 0)


def test_a_refused_end_tried_again_ends_no_other_lease(sim, stream_pool):
    """Two leases in one stream, one of them captured: the other's work is waited for all the same."""
    pool = stream_pool(patience=0.05)
    stream = sim.stream()
    t = filled(pool, 16, 1)
    with vtensor.lease(t, stream=stream):
        inner = vtensor.lease(t, stream=stream)
        sim.begin_capture(stream)
        with pytest.raises(vtensor.DriverError), inner:
            sim.kernel(stream, t)
            sim.fail("cuGraphRetainUserObject")
        inner.__exit__(None, None, None)  # once more
        sim.destroy_graph(sim.end_capture(stream))
        sim.hold(stream)
        sim.kernel(stream, t)
        with pytest.raises(vtensor.TimedOut):
            t.fork()
        sim.release(stream)


def test_no_memory_sleeps_under_a_lease_whose_end_was_refused(sim, stream_pool):
    """No graph has taken the lease over, so its work may still be to come."""
    pool = stream_pool(patience=0.05)
    stream = sim.stream()
    t = filled(pool, 16)
    lease = vtensor.lease(t, stream=stream)
    sim.begin_capture(stream)
    with pytest.raises(vtensor.DriverError), lease:
        sim.kernel(stream, t)
        sim.fail("cuGraphRetainUserObject")
    sim.destroy_graph(sim.end_capture(stream))
    with pytest.raises(vtensor.TimedOut, match="the lease of a tensor"):
        pool.sleep(contents="discard")
    lease.__exit__(None, None, None)
    assert pool.sleep(contents="discard") == 4 * pool.page_size
    pool.wake(discard=True)


_NEVER_ENDED = """
from stream_support import SimulatedDevice
pool = open_pool("simcuda", patience=0.5, prefetch=1 << 20)
sim = SimulatedDevice()
t = filled(pool, 16, 3)
lease = vtensor.lease(t, stream=sim.stream(held=True))
lease.__enter__()
captured = filled(pool, 16, 3)
stream = sim.stream()
sim.begin_capture(stream)
with vtensor.lease(captured, stream=stream):
    sim.kernel(stream, captured)
graph = sim.end_capture(stream)
del lease
t.close()
captured.close()
gc.collect()
stats = pool.stats()
assert stats.pages_pinned + stats.pages_cached == stats.pages_orphaned == 8, stats
"""


@needs_simcuda
def test_leases_and_graphs_that_nobody_ends():
    """Their pages stay for good, and the process ends all the same (I14)."""
    finished = run_snippet(_NEVER_ENDED, finalize=True, timeout=30).check()
    assert not finished.err
