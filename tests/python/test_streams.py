"""How streams may be named, and streams of several devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import vtensor
from cuda_support import device, needs_simcuda
from support import eventually, filled, run_snippet, within
from vtensor._base.streams import stream_handle


class Handle:
    """As cuda.bindings has them: an object that is an integer when asked."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


class WithProtocol:
    def __init__(self, value: int) -> None:
        self.value = value

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


STREAMS = {
    "integer": lambda value: value,
    "torch": lambda value: SimpleNamespace(cuda_stream=value),
    "cuda.core": WithProtocol,
    "cuda.core handle": lambda value: SimpleNamespace(handle=Handle(value)),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("value", [0, 1, 7, 2**64 - 1])
def test_a_stream_is_known_by_its_value(name, value):
    assert stream_handle("x", STREAMS[name](value)) == value


def test_no_stream_is_torchs_current_one():
    assert stream_handle("x", None) is None


def test_streams_mean_nothing_on_the_host(host):
    """There is no work behind the callers' backs: pages go at once."""
    t = filled(host, 16)
    with vtensor.lease(t, stream=12345):
        t.truncate(8, stream=12345)
        assert host.stats().pages_pinned == 2  # the lease
    assert host.stats().pages_pinned == 0
    t.record_stream(99)
    t.fork(stream=7).close(stream=7)
    t.close(stream=12345)
    assert host.stats().pages_mapped == 0


@pytest.mark.parametrize(
    ("operation", "name"),
    [("truncate", name) for name in STREAMS]
    + [(operation, "torch") for operation in ("shrink", "close", "lease", "record_stream")],
)
def test_pages_wait_for_the_named_stream(sim, stream_pool, operation, name):
    pool = stream_pool()
    stream = sim.stream(held=True)
    named = STREAMS[name](stream)
    t = filled(pool, 16)
    sim.kernel(stream, t)
    if operation == "lease":
        with vtensor.lease(t, stream=named):
            pass
    elif operation == "record_stream":
        t.record_stream(named)
    if operation == "shrink":
        t.shrink(12, stream=named)
    elif operation == "close":
        t.close(stream=named)
    else:
        t.truncate(4, stream=named if operation == "truncate" else None)
    held = 4 if operation == "close" else 3
    assert pool.stats().pages_pinned == held
    sim.release(stream)
    pool.wait_idle()
    assert pool.stats().pages_pinned == 0


@pytest.mark.parametrize(
    "operation", ["truncate", "truncate nothing", "reorder", "free", "close", "record_stream"]
)
def test_pages_of_a_slot_wait_for_the_named_stream(sim, stream_pool, operation):
    pool = stream_pool()
    stream = sim.stream(held=True)
    cache = vtensor.KVCache(1, 1, 64, max_batch=1, max_len=256, dtype=torch.uint8, tile=1, pool=pool)
    slot = cache.alloc()
    assert cache.step([256])
    for rows in cache[0]:
        sim.kernel(stream, rows[slot])
    if operation == "free":
        cache.free(slot, stream=stream)
        pool.trim()  # of what the slot keeps for the next request
    elif operation == "close":
        cache.close(stream=stream)
    elif operation == "truncate":
        cache.truncate(slot, 0, stream=stream)
    elif operation == "truncate nothing":  # as where all drafts were right
        cache.truncate(slot, 256, stream=stream)
        cache.truncate(slot, 0)
    elif operation == "reorder":  # of a beam that stays
        assert cache.reorder([slot], [slot], stream=stream) == [slot]
        cache.truncate(slot, 0)
    else:
        cache.record_stream(stream)
        cache.truncate(slot, 0)
    assert pool.stats().pages_pinned == 8
    sim.release(stream)
    pool.wait_idle()
    assert pool.stats().pages_pinned == 0


@pytest.mark.parametrize(
    "operation", ["shrink", "truncate", "fork", "close", "lease", "record_stream", "free", "KVCache.close"]
)
def test_a_stream_of_another_context_is_refused(sim, stream_pool, operation):
    """Events are recorded in streams of their own context only: what waits for it could never go."""
    pool = stream_pool()
    t = filled(pool, 16, 3)
    cache = vtensor.KVCache(1, 1, 64, max_batch=2, max_len=64, dtype=torch.uint8, pool=pool)
    slot = cache.alloc()
    assert cache.step([16, 0])
    stream = sim.foreign_stream()
    calls = {
        "shrink": lambda: t.shrink(1, stream=stream),
        "truncate": lambda: t.truncate(1, stream=stream),
        "fork": lambda: t.fork(stream=stream),
        "close": lambda: t.close(stream=stream),
        "lease": lambda: vtensor.lease(t, stream=stream).__enter__(),
        "record_stream": lambda: t.record_stream(stream),
        "free": lambda: cache.free(slot, stream=stream),
        "KVCache.close": lambda: cache.close(stream=stream),
    }
    refusal = rf"{operation}\] stream {stream} is of another context"
    with pytest.raises(vtensor.InvalidArgument, match=refusal):
        calls[operation]()
    assert t.length == 16 and t.eq(3).all()
    assert cache.step([32, 0])


def test_growth_beside_another_current_context_is_refused(sim, stream_pool):
    """Its default stream is another than the one that the pool would wait for."""
    pool = stream_pool()
    t = filled(pool, 8)
    with sim.other_context():
        with pytest.raises(vtensor.InvalidArgument, match=r"\[VTensor.extend\] stream 0 is of another"):
            t.extend(8)
        lease = vtensor.lease(t).__enter__()
        with pytest.raises(vtensor.InvalidArgument, match=r"\[lease\] stream 0 is of another context"):
            lease.__exit__(None, None, None)
    lease.__exit__(None, None, None)
    t.extend(8)


def test_a_forked_slot_is_used_by_a_stream_that_is_recorded_again(sim, stream_pool):
    """I7: the fork has waited for the stream so far, and nothing has noted it for later."""
    pool = stream_pool()
    cache = vtensor.KVCache(1, 1, 64, max_batch=2, max_len=256, dtype=torch.uint8, tile=1, pool=pool)
    slot = cache.alloc()
    assert cache.step([256, 0])
    stream = sim.stream()
    cache.record_stream(stream)
    (fork,) = cache.fork(slot, 1, stream=stream)
    cache.record_stream(stream)
    sim.hold(stream)
    for rows in cache[0]:
        sim.kernel(stream, rows[fork])
    cache.free(slot, stream=sim.stream())
    cache.free(fork, stream=sim.stream())
    pool.trim()
    assert pool.stats().pages_pinned == 16  # 8 pages, mapped in both
    sim.release(stream)
    pool.wait_idle()
    assert pool.stats().pages_pinned == 0


def test_a_fork_lets_the_named_stream_go(sim, stream_pool):
    """It is waited for once; what numbers a stream that is gone is not asked again."""
    pool = stream_pool()
    t = filled(pool, 16, 3)
    stream = sim.stream()
    f = t.fork(stream=stream)
    sim.destroy(stream)
    f.shrink(8)
    t.shrink(8)
    pool.wait_idle()
    assert pool.stats().pages_pinned == 0 and f.eq(3).all()


@needs_simcuda
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_several_pools_and_devices(sim, stream_pool, ahead):
    """Each device has its own streams, the default one included: none waits for another's."""
    with device(devices=3):
        pools = [stream_pool(device=n, prefetch=ahead) for n in (0, 1, 1, 2)]
        streams = [sim.stream(device=n) for n in (0, 1, 1, 2)]
        tensors = [filled(pool, 16, n + 1) for n, pool in enumerate(pools)]
        for n in range(4):
            sim.hold(streams[n])
            sim.kernel(streams[n], tensors[n], writes=n + 1)
        for n in range(4):
            tensors[n].truncate(0, stream=streams[n])
        for n in (2, 0, 3, 1):
            assert not within(0.02, lambda n=n: pools[n].stats().pages_pinned == 0)
            sim.release(streams[n])
            eventually(lambda n=n: pools[n].stats().pages_pinned == 0)
        with vtensor.lease(*tensors):
            pass  # of all of them at once, in each device's current stream
        for pool in pools:
            pool.close()


_STREAM_IS_GONE = """
from stream_support import SimulatedDevice
pool = open_pool("simcuda", patience=0.5)
sim = SimulatedDevice()
t = filled(pool, 16)
stream = sim.stream()
t.record_stream(stream)
sim.destroy(stream)
t.close()
assert pool.stats().pages_pinned == 4
try:
    pool.wait_idle()
except vtensor.DriverError as error:
    assert "INVALID_HANDLE" in str(error), error
else:
    raise AssertionError("no call was refused")
assert pool.stats().pages_pinned == pool.stats().pages_used == 4
with filled(pool, 16, 9) as u:
    assert u.eq(9).all()
pool.close()
"""


@needs_simcuda
def test_a_stream_that_is_gone_cannot_be_waited_for():
    """The fence is refused: the call raises, the pages stay for good, and the pool keeps working."""
    run_snippet(_STREAM_IS_GONE, finalize=True).check()


@needs_simcuda
def test_a_stream_that_is_gone_is_refused(sim, stream_pool):
    """Before anything changes."""
    with stream_pool() as pool, filled(pool, 16, 9) as t:
        stream = sim.stream()
        sim.destroy(stream)
        for call in (lambda: t.truncate(0, stream=stream), lambda: t.close(stream=stream)):
            with pytest.raises(vtensor.DriverError, match="INVALID_HANDLE"):
                call()
        assert t.length == 16 and t.eq(9).all()
