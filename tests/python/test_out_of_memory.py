"""Memory that runs out: the order in which it is freed, what is raised, and that nothing changes."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch

import vtensor
from cuda_support import TorchOnTheDevice, free_memory
from kv_support import RANGES, UNIT, lengths_with, make_cache
from support import beside, eventually, filled, quarter, ramp, same_bytes
from vtensor import _core, testing
from vtensor._core import TensorCore, reindex

MEMORY = 4 << 30  # of the simulated device
AHEAD = 16 * 4096
PAGE = 4096
OUT_OF_MEMORY = 2  # a CUresult


@pytest.fixture
def emptied(monkeypatch):
    """How often torch was asked for its cache; `emptied.then` is what that sets free."""

    class Cache(list):
        then = staticmethod(lambda: None)

    cache = Cache()

    def empty_cache():
        cache.append(1)
        cache.then()

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    return cache


@pytest.fixture
def full(sim):
    """`full(n)`: the device has memory for n more pages. `full(None)`: as much as it ever had."""

    def leave(pages: int | None) -> None:
        nonlocal memory
        memory = MEMORY if pages is None else memory - free_memory() + pages * PAGE
        sim.configure("memory", memory)

    memory = MEMORY
    yield leave
    leave(None)


GROW = {
    "extend": lambda t, pool: t.extend(20),
    "append": lambda t, pool: t.append(torch.full((20, PAGE // 4), 9, dtype=torch.uint8)),
    "empty": lambda t, pool: quarter(pool, 20).close(),
    "from_tensor": lambda t, pool: vtensor.from_tensor(
        torch.ones(20, PAGE // 4, dtype=torch.uint8), 0, 64, pool=pool
    ).close(),
}


@pytest.mark.parametrize("name", GROW)
@pytest.mark.parametrize("ahead", [0, AHEAD], ids=["caller", "mapper"])
def test_a_device_without_memory(sim, stream_pool, emptied, full, name, ahead):
    """I9: torch is asked once, the call is tried once more, then OutOfPages says what there is."""
    pool = stream_pool(prefetch=ahead, cache=0)
    t = filled(pool, 8)
    t.copy_(ramp(t))
    data = t.clone()
    pool.wait_idle()
    before = pool.stats()
    full(0)
    with pytest.raises(vtensor.OutOfPages, match=r"need a page of 4096 bytes.*\d+ bytes free after torch"):
        GROW[name](t, pool)
    assert emptied == [1]
    after = pool.stats()
    assert (t.length, after.pages_active, after.tensors) == (8, before.pages_active, before.tensors)
    assert same_bytes(t, data)
    testing.check_invariants(pool)
    full(None)
    GROW[name](t, pool)  # the next call works
    assert emptied == [1] and same_bytes(t[:8], data)


@pytest.mark.parametrize("name", GROW)
def test_torch_gives_back_what_is_needed(sim, stream_pool, emptied, full, name):
    pool = stream_pool()
    t = filled(pool, 8)
    full(0)
    emptied.then = lambda: full(None)
    GROW[name](t, pool)
    assert emptied == [1]


def test_torch_that_cannot_give_back_its_cache(sim, stream_pool, emptied, full):
    """Its allocator raises an internal error while a graph is captured; memory is short all the same."""
    pool = stream_pool()
    t = filled(pool, 8)
    full(0)
    emptied.then = Mock(side_effect=RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED"))
    with pytest.raises(vtensor.OutOfPages, match=r"bytes free while torch cannot give back its cache"):
        t.extend(20)
    emptied.then = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        t.extend(20)
    assert t.length == 8
    full(None)
    t.extend(20)


def test_torch_beside_a_pool_that_takes_all(sim, stream_pool, emptied, full):
    """Results of its operations are memory of the device too; in-place operations take none."""
    pool = stream_pool()
    t = filled(pool, 16)
    full(TorchOnTheDevice.SEGMENT // PAGE + 4)
    with TorchOnTheDevice():
        assert (t == 1).all()  # in one segment
        t.extend(16)
        with pytest.raises(vtensor.OutOfPages):
            t.extend(16)
        t.add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(TorchOnTheDevice.SEGMENT, dtype=torch.uint8)
    full(None)


def test_a_device_without_memory_to_map_with(sim, stream_pool, emptied):
    """As without memory for a page: page tables take some too."""
    pool = stream_pool()
    t = filled(pool, 8)
    sim.fail("cuMemMap", refuse=2, code=OUT_OF_MEMORY)
    with pytest.raises(vtensor.OutOfPages, match=r"\[VTensor.extend\] .*\(CUDA_ERROR_OUT_OF_MEMORY\)"):
        t.extend(20)
    assert emptied == [1] and t.length == 8
    testing.check_invariants(pool)
    sim.fail("cuMemMap", skip=1, code=OUT_OF_MEMORY)
    t.extend(20)  # torch gave back what was needed
    assert emptied == [1, 1] and not t[8:].any()


def test_a_batch_that_fails_in_its_middle(stream_pool, emptied, full):
    """Pages that were made stay with the pool, for the next call."""
    pool = stream_pool()
    t = filled(pool, 4, rows=(3,))
    full(2)
    with pytest.raises(vtensor.OutOfPages):
        t.extend(16)
    assert t.length == 4 and pool.stats().pages_used == 3 and pool.stats().pages_spare == 2
    full(None)
    t.extend(16)
    assert pool.stats().pages_used == 15


@pytest.mark.parametrize("cached", [False, True], ids=["spare", "cached"])
@pytest.mark.parametrize(
    "make", [make_cache, lambda pool: vtensor.Arena(PAGE, pool=pool, zeros=True)], ids=["cache", "arena"]
)
def test_the_page_of_zeros_takes_the_memory_of_a_spare_page(stream_pool, emptied, full, make, cached):
    pool = stream_pool(64, **({"prefetch": AHEAD, "cache": 64 * PAGE} if cached else {"prefetch": 0}))
    filled(pool, 60).close()
    pool.wait_idle()
    assert pool.stats().pages_cached == (15 if cached else 0)
    full(0)
    make(pool).close()


@pytest.mark.parametrize("reserve", [False, True])
def test_no_more_goes_than_a_device_without_memory_lacks(sim, stream_pool, emptied, full, reserve):
    """What was freed last is kept for the next one, also where work still uses what was freed first."""
    pool = stream_pool(cache=16 * PAGE, device_reserve=(free_memory() - 8 * PAGE) * reserve)
    first, last, stream = filled(pool, 16), filled(pool, 16, capacity=32), sim.stream(held=True)
    first.record_stream(stream)
    first.close(), last.close()
    assert pool.stats().pages_cached == 8
    if not reserve:
        full(0)
    threading.Timer(0.01, sim.release, [stream]).start()
    t = filled(pool, 16, 7, capacity=128)
    assert t.eq(7).all() and not emptied
    assert pool.stats().pages_cached == 4


def test_a_refusal_that_is_not_for_want_of_memory_takes_nothing_that_is_ahead(sim, stream_pool):
    pool = stream_pool(prefetch=AHEAD)
    other = quarter(pool, 4, capacity=32)
    other.prepare(24)
    filled(pool, 16).close()
    pool.wait_idle()
    assert (pool.stats().pages_prefetched, pool.stats().pages_cached) == (6, 4)
    t = quarter(pool, 0, capacity=128)
    by_caller = pool.stats().driver_calls["caller"].get("cuMemUnmap", 0)
    sim.fail("cuMemMap")
    t.extend(4)  # at the second try, with the mappings gone
    assert pool.stats().driver_calls["caller"]["cuMemUnmap"] > by_caller
    pool.wait_idle()
    assert pool.stats().pages_cached == 0
    assert other.length == 4 and [r.state for r in other.pages()].count("prefetched") == 6


@contextlib.contextmanager
def growth_that_is_refused(sim, pool, pages):
    """For a moment another thread has the pool's last pages, for a growth that the driver then refuses."""
    t = quarter(pool, 0, capacity=pages * 4)
    before = sim.calls("cuMemMap")
    sim.slow("cuMemMap", 300_000)
    sim.fail("cuMemMap")
    growth = beside(t.extend, pages * 4)
    eventually(lambda: sim.calls("cuMemMap") > before)
    sim.slow("cuMemMap", 0)
    yield
    assert isinstance(growth.exception(60), vtensor.DriverError)
    t.close()


def test_pages_of_a_growth_under_way_are_waited_for(sim, stream_pool, emptied):
    """It may be refused."""
    pool = stream_pool(8, patience=20)
    with growth_that_is_refused(sim, pool, 8), quarter(pool, 0, capacity=32) as t:
        assert t.extend(32).length == 32


def test_a_cache_that_waits_to_fit_waits_for_a_growth_under_way(sim, stream_pool, emptied):
    """It may be refused."""
    pool = stream_pool(2 * RANGES, patience=20)
    with make_cache(pool) as cache, growth_that_is_refused(sim, pool, 2 * RANGES):
        wanted = lengths_with(cache, cache.alloc(), UNIT)
        assert cache.fits(wanted, wait=True)


BOUNDS = [("budget", "host"), ("budget", "simcuda"), ("device", "simcuda"), ("reserve", "simcuda")]


@pytest.mark.parametrize(("bound", "kind"), BOUNDS, ids="-".join)
def test_what_is_spare_comes_first(sim, pool_factory, emptied, full, bound, kind):
    """What freed tensors left, and what is ahead of others. Then torch is asked, for memory of the device."""
    options = {"device_reserve": free_memory() - 12 * PAGE} if bound == "reserve" else {}
    pages = 12 if bound == "budget" else 64
    pool = pool_factory(kind, pages, prefetch=AHEAD, cache=4 * PAGE, **options)
    filled(pool, 16).close()
    other = quarter(pool, 4, capacity=32)
    other.prepare(24)
    pool.wait_idle()
    assert (pool.stats().pages_cached, pool.stats().pages_prefetched) == (4, 6)
    if bound == "device":
        full(1)
    t = filled(pool, 44, 7, capacity=44)  # 11 pages
    assert t.eq(7).all() and pool.stats().pages_used == 12 and not emptied
    assert pool.stats().pages_prefetched == pool.stats().pages_cached == 0
    words = {"budget": "need 1 pages.* has 0 of 12 free", "reserve": "need 1 pages.*the pool leaves"}
    with pytest.raises(vtensor.OutOfPages, match=rf"\[VTensor.extend\] {words.get(bound, 'need a page of')}"):
        other.extend(1)
    assert emptied == ([] if bound == "budget" else [1]) and other.length == 4
    testing.check_invariants(pool)
    t.truncate(20)
    other.extend(4)


def test_what_is_done_in_the_background_leaves_the_reserve_alone(sim, stream_pool, emptied):
    before = free_memory()
    reserve = before - 8 * PAGE
    pool = stream_pool(device_reserve=reserve, prefetch=AHEAD)
    t = quarter(pool, 4, capacity=200)
    t.prepare(160)
    pool.wait_idle()
    assert reserve <= free_memory() < before
    assert 0 < pool.stats().pages_prefetched < 8


def test_pages_that_cannot_suffice_are_not_waited_for(sim, stream_pool, emptied):
    pool = stream_pool(16, patience=20)
    kept, leaving = filled(pool, 40, capacity=80), filled(pool, 16)
    stream = sim.stream(held=True)
    sim.kernel(stream, leaving)
    leaving.record_stream(stream)
    leaving.truncate(4)
    assert (pool.stats().pages_pinned, pool.stats().pages_free) == (3, 2)
    began = time.monotonic()
    with pytest.raises(vtensor.OutOfPages):
        kept.extend(6 * 4)  # one more than comes free
    assert time.monotonic() - began < 5
    threading.Timer(0.1, sim.release, [stream]).start()
    assert kept.extend(5 * 4).length == 60


def test_pages_that_leave_what_falls_asleep_are_not_waited_for(sim, stream_pool, emptied):
    """They go with the rest of it. What is cached goes for the operation that asks."""
    pool = stream_pool(16, patience=20, cache=8 * PAGE)
    t, stream = filled(pool, 32), sim.stream(held=True)
    t.record_stream(stream)
    t.truncate(4)
    filled(pool, 32).close()
    assert (pool.stats().pages_pinned, pool.stats().pages_cached) == (7, 8)
    with _core.FallAsleep(pool._core) as falling, quarter(pool, 0, capacity=128) as other:
        falling.next_number()
        t._fall_asleep(falling, False)
        assert other.extend(28).length == 28
    sim.release(stream)


def test_a_reserve_that_torch_makes_room_for(sim, stream_pool, emptied):
    cache = stream_pool()  # in the place of torch's
    pool = stream_pool(device_reserve=free_memory() - 8 * PAGE)
    filled(cache, 16).close()
    t = filled(pool, 16)
    emptied.then = cache.trim
    t.extend(16)
    assert emptied == [1] and t.length == 32


def test_the_mapper_leaves_memory_to_those_who_need_it(sim, stream_pool, emptied, full):
    """Where there is none it stops quietly: looking ahead is no reason to ask or to raise."""
    pool = stream_pool(prefetch=AHEAD, cache=0)
    t = quarter(pool, 4)
    pool.wait_idle()
    full(0)
    t.prepare(20)
    pool.wait_idle()
    assert pool.stats().pages_prefetched == 0 and not emptied
    t.shrink(1)  # nothing is raised
    full(None)
    sim.fail("cuMemMap", skip=1, code=OUT_OF_MEMORY)  # by a device that can make pages, and not map them
    t.prepare(20)
    pool.wait_idle()
    t.shrink(1)
    assert not emptied
    t.prepare(20)
    eventually(lambda: pool.stats().pages_prefetched >= 5)


def test_a_fork_without_memory_for_its_first_write(sim, stream_pool, emptied, full):
    """Copying a page takes one: refused whole, the sharers unchanged."""
    pool = stream_pool()
    t = filled(pool, 6, 1)
    child = t.fork()
    full(0)
    with pytest.raises(vtensor.OutOfPages):
        child.unshare(0, 6)
    with pytest.raises(vtensor.OutOfPages):
        child.extend(1)
    assert len(emptied) == 2
    assert t.eq(1).all() and child.eq(1).all() and child.length == 6
    testing.check_invariants(pool)
    full(None)
    child.unshare(0, 6)
    child.fill_(2)
    assert t.eq(1).all() and child.eq(2).all()


def is_no_memory(error: Exception) -> bool:
    """Python's, torch's for the same, or nanobind's where the stable ABI has it copy an argument's list."""
    return not isinstance(error, TypeError) or "incompatible function arguments" in str(error)


class Refusing(torch.Tensor):
    """Torch's copy of it is interrupted."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


MADE = ([0, *[2] * 24], 0, 10, torch.uint8, torch.device("cpu"), 1, False, False)
# Of two tensors, and what is appended. The last three hand a buffer over, or move to other addresses.
OPERATIONS = {
    "make": lambda t, _, __: TensorCore(t.pool._core, *MADE),
    "extend": lambda t, _, __: TensorCore.extend(t._core, t, 40),
    "shrink": lambda t, _, __: TensorCore.shrink(t._core, t, 1, True),
    "truncate": lambda t, _, __: TensorCore.truncate(t._core, t, 1),
    "append": lambda t, _, source: TensorCore.append(t._core, t, source),
    "extend and move": lambda t, _, __: TensorCore.extend(t._core, t, 62),
    "reserve": lambda t, _, __: TensorCore.reserve(t._core, t, 100),
    "reindex": lambda t, u, _: reindex([t._core, u._core], [t, u], [[0, 1, 1]] * 2, []),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_python_has_no_memory_for_leaves_no_trace(name, pool_factory):
    allocator = pytest.importorskip("_testcapi")
    pool = pool_factory("host", 128)
    sizes = [2, 3, *[1] * 24, 1024]  # more than Python keeps tuples of
    options = {"grow_dim": 1, "capacity": 64, "when_full": "move", "dtype": torch.uint8, "pool": pool}
    source = torch.zeros(2, 40, *sizes[2:], dtype=torch.uint8)
    refused = 0
    for allocation in range(60):
        ts = [vtensor.empty(sizes, **options).fill_(number + 1) for number in range(2)]
        ts[0].shrink(1, front=True)
        done = False
        allocator.set_nomemory(allocation, allocation + 1)
        try:
            OPERATIONS[name](*ts, source)
            done = True
        except (MemoryError, RuntimeError, TypeError) as error:
            allocator.remove_mem_hooks()
            assert is_no_memory(error)
            refused += 1
        finally:
            allocator.remove_mem_hooks()
        testing.check_invariants(pool)
        assert pool.stats().tensors == 2
        for number, t in enumerate(ts):
            with suppress(vtensor.VTensorError):
                t.extend(0)  # puts back what torch lacks
            assert t[:, :2].eq(number + 1).all()
            if not done and name in ("extend", "shrink", "truncate", "append", "extend and move"):
                assert t.length == t.shape[1] == 3 - (number == 0)
            t.close()
        pool.trim()
        testing.check_invariants(pool)
        assert pool.stats().tensors == pool.stats().pages_used == 0
    assert refused != 0


def test_an_append_whose_copy_is_interrupted_adds_nothing(pool_factory):
    pool = pool_factory("host")
    t = filled(pool, 5)
    t.copy_(ramp(t))
    with pytest.raises(KeyboardInterrupt):
        t.append(torch.zeros(40, *t.shape[1:], dtype=t.dtype).as_subclass(Refusing))
    testing.check_invariants(pool)
    assert t.length == 5 and same_bytes(t, ramp(t))
