"""Allocations of any size in a pool, by the C functions that torch calls, called as torch calls them."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest
import torch

import vtensor
from support import beside, calls, calls_since, filled, quarter, run_snippet
from vtensor import _core, testing
from vtensor._torch.memory import entered

PAGE = 4096
SMALL, LARGE = 1000, 5 * PAGE + 700

_library = ctypes.CDLL(_core.__file__)
_library.vtensor_allocate.restype = ctypes.c_void_p
_library.vtensor_allocate.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_library.vtensor_free.restype = None
_library.vtensor_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


def allocate(nbytes: int, stream: int = 0, device: int = 0) -> int | None:
    return _library.vtensor_allocate(nbytes, device, stream)


def free(address: int | None, nbytes: int = 0, stream: int = 0) -> None:
    _library.vtensor_free(address, nbytes, 0, stream)


def fill(address: int, nbytes: int, byte: int) -> None:
    ctypes.memset(address, byte, nbytes)


def content(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def caching(pool_factory, kind: str, pages: int = 64, **options) -> vtensor.Pool:
    """With a mapper; what is freed stays mapped."""
    options = {"prefetch": 8 * PAGE, "cache": pages * PAGE} | options
    return pool_factory(kind, pages, **options)


@contextlib.contextmanager
def inside(pool: vtensor.Pool, tag: str = "memory"):
    heap = pool._heap("memory", tag)
    with entered(heap):
        yield heap.core


def empty(pool: vtensor.Pool, *cores) -> None:
    """Nothing of these heaps is left, in use or cached (I14)."""
    for core in cores:
        core.trim()
    pool.trim()
    pool.wait_idle()
    testing.check_invariants(pool)
    for core in cores:
        core.trim()  # the addresses too
        counts = core.counts()
        assert counts.allocations == counts.allocated == counts.reserved == 0
    assert pool.stats().pages_used == 0


# --- sizes ------------------------------------------------------------------------------------------------


def test_sizes_from_none_to_more_than_there_is(pool):
    with inside(pool) as core:
        none, one = allocate(0), allocate(1)
        assert none and one and none != one
        assert none % 512 == one % 512 == 0
        for nbytes in (2**60, 2**64 - 1, 2**64 - 512, 2**46, 65 * PAGE):
            assert allocate(nbytes) is None
            assert "[memory]" in _core.take_heap_refusal()
        assert _core.take_heap_refusal() == ""
        whole = allocate(62 * PAGE)  # beside the page of the small ones
        assert whole
        free(whole), free(none), free(one)
        empty(pool, core)


# --- calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["heap", "other heap", "tensor", "arena"])
def test_memory_is_found_in_what_others_keep(pool_factory, kind, owner):
    """The cached pages of other sizes, other heaps, freed tensors and arenas, however they lie."""
    pool = caching(pool_factory, kind, 32)
    arena = vtensor.Arena(32 * PAGE, pool=pool) if owner == "arena" else None
    with inside(pool) as core, inside(pool, "other") as other:
        if owner in ("heap", "other heap"):
            with inside(pool, "memory" if owner == "heap" else "other"):
                made = [allocate(PAGE) for _ in range(32)]
                for address in made:
                    fill(address, PAGE, 77)
                for address in made[::2] + made[1::2]:
                    free(address)
        elif arena is not None:
            arena.map([(0, 32 * PAGE)])
            arena.tensor.fill_(77)
            arena.unmap([(0, 32 * PAGE)])
        else:
            filled(pool, 128, 77, capacity=128).close()
        assert pool.stats().pages_cached == 32
        with inside(pool):
            address = allocate(32 * PAGE)
        assert address, _core.take_heap_refusal()
        if owner != "heap":  # whose own bytes it may see
            assert content(address, 32 * PAGE) == bytes(32 * PAGE)
        assert pool.stats().pages_active == 32
        free(address)
        if arena is not None:
            arena.close()
        empty(pool, core, other)


def test_scattered_memory_is_mapped_not_made_anew(pool_factory):
    """On the host, where other ranges grow through neighbouring handles of their own."""
    pool = caching(pool_factory, "host", 32)
    with inside(pool) as core:
        for _ in range(3):
            made = [allocate(PAGE) for _ in range(32)]
            for address in made[::2]:
                free(address)
            pool.wait_idle()
            before = calls(pool)
            whole = allocate(16 * PAGE)
            assert whole, _core.take_heap_refusal()
            assert "fallocate" not in calls_since(pool, before)  # no memory was given back
            for address in [whole, *made[1::2]]:
                free(address)
        empty(pool, core)


@pytest.mark.parametrize("wants", ["tensor", "arena", "smaller budget"])
def test_others_find_memory_in_what_a_heap_keeps(pool_factory, kind, wants):
    pool = caching(pool_factory, kind, 32)
    with inside(pool) as core:
        kept = allocate(PAGE)
        fill(kept, PAGE, 5)
        made = [allocate(3 * PAGE) for _ in range(10)]
        for address in made:
            fill(address, 3 * PAGE, 77)
            free(address)
        assert pool.stats().pages_cached >= 3
        if wants == "tensor":
            t = quarter(pool, 124, capacity=124, make=vtensor.zeros)
            assert not t.any()
            t.close()
        elif wants == "arena":
            with vtensor.Arena(31 * PAGE, pool=pool) as arena:
                arena.map([(0, 31 * PAGE)])
                assert not arena.tensor.any()
        else:
            pool.budget = 2 * PAGE
        assert content(kept, PAGE) == bytes([5]) * PAGE
        free(kept)
        empty(pool, core)


# --- threads and ends -------------------------------------------------------------------------------------


def test_threads_outside_are_refused(pool):
    with inside(pool):
        _, refused = beside(lambda: (allocate(1), _core.take_heap_refusal())).result(30)
    assert allocate(1) is None
    for refusal in (refused, _core.take_heap_refusal()):
        assert "not inside vtensor.memory" in refusal


def test_what_lives_when_its_pool_closes(pool_factory, kind):
    pool = caching(pool_factory, kind)
    with inside(pool):
        address = allocate(LARGE)
        fill(address, LARGE, 7)
        pool.close()
        assert allocate(1) is None
        assert "closed" in _core.take_heap_refusal()
        assert content(address, LARGE) == bytes([7]) * LARGE
    with pytest.raises(vtensor.Closed):
        pool._heap("memory", "memory")
    free(address)
    pool.close()  # gives back what is free by now
    assert pool.stats().pages_used == 0


def test_unknown_addresses_are_ignored(pool):
    with inside(pool) as core:
        address = allocate(LARGE)
        for unknown in (0, 1, address + 512, address - 4096, 2**63):
            free(unknown)
        assert core.counts().allocations == 1
        free(address)
        free(address)  # twice
        with pytest.raises(vtensor.InvalidArgument, match="nothing was allocated"):
            core.free(address)
        empty(pool, core)


def test_a_forked_child_neither_allocates_nor_frees(host):
    with inside(host) as core:
        address = allocate(LARGE)
        fill(address, LARGE, 7)
        child = os.fork()
        if child == 0:
            wrong = allocate(1) is not None or "forked" not in _core.take_heap_refusal()
            free(address)
            os._exit(int(wrong))
        assert os.waitpid(child, 0)[1] == 0
        assert content(address, LARGE) == bytes([7]) * LARGE
        free(address)
        empty(host, core)


# --- streams and captures ---------------------------------------------------------------------------------


def test_pages_leave_behind_their_streams_work(sim, stream_pool):
    pool = stream_pool(32, patience=0.1, prefetch=8 * PAGE, cache=32 * PAGE)
    first, second = sim.stream(), sim.stream()
    with inside(pool) as core:
        address = allocate(20 * PAGE, first)
        sim.hold(first)
        sim._done("simcuda_launch", first, address, 20 * PAGE, 1)
        free(address, stream=first)
        assert allocate(20 * PAGE, first) == address  # in its own stream, at once
        free(address, stream=first)
        assert allocate(20 * PAGE, second) is None
        sim.release(first)
        other = allocate(20 * PAGE, second)
        assert other
        free(other, stream=second)
        empty(pool, core)


@pytest.mark.parametrize("prefetch", [0, 8 * PAGE])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE, 40 * PAGE])
def test_captures(sim, stream_pool, nbytes, prefetch):
    """Cached pages are given with no call; missing ones the mapper maps, and none of that is captured."""
    pool = stream_pool(64, prefetch=prefetch, cache=64 * PAGE)
    stream, other = sim.stream(), sim.stream()
    with inside(pool) as core:
        elsewhere = allocate(60 * PAGE, other)
        fill(elsewhere, 60 * PAGE, 77)
        free(elsewhere, stream=other)
        sim.begin_capture(stream)
        address = allocate(nbytes, stream)  # by what the other stream has cached
        assert address, _core.take_heap_refusal()
        free(address, stream=stream)
        before = calls(pool)
        assert allocate(nbytes, stream) == address
        if prefetch:
            assert calls_since(pool, before) == {}
        sim._done("simcuda_launch", stream, address, nbytes, 5)
        graph = sim.end_capture(stream)  # answers 901 where the capture was invalidated
        executable = sim.instantiate(graph)
        sim.replay(executable, stream)
        assert sim.pending(stream) == 0
        assert content(address, nbytes) == bytes([5]) * nbytes
        sim.destroy_graph(graph), sim.destroy_executable(executable)
        free(address, stream=stream)
        empty(pool, core)


def test_a_capture_survives_a_refusal(sim, stream_pool):
    pool = stream_pool(32, patience=0.1, prefetch=8 * PAGE, cache=32 * PAGE)
    stream = sim.stream()
    with inside(pool) as core:
        held = allocate(30 * PAGE, stream)
        sim.begin_capture(stream)
        assert allocate(10 * PAGE, stream) is None
        assert "need 10 pages" in _core.take_heap_refusal()
        sim.fail("cuMemMap", 0, 1)
        refused = allocate(PAGE, stream)
        message = _core.take_heap_refusal()
        assert refused or "cuMemMap" in message
        again = allocate(PAGE, stream)
        assert again, _core.take_heap_refusal()
        sim.destroy_graph(sim.end_capture(stream))
        for address in (held, refused, again):
            free(address, stream=stream)
        empty(pool, core)


# --- vtensor.memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_without_a_device(simcuda):
    for pool in (simcuda, None):
        with pytest.raises(vtensor.VTensorError, match="no CUDA device"), vtensor.memory(pool):
            pass


class FakeTorch:
    """What vtensor.memory uses of torch.cuda; its MemPool asks the C functions for 2 MiB at a time."""

    def __init__(self, monkeypatch) -> None:
        self.current: list[FakeTorch.MemPool] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "MemPool", self.MemPool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use)
        monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *pointers: pointers, raising=False)

    class MemPool:
        def __init__(self, allocator) -> None:
            self.allocate = ctypes.CFUNCTYPE(
                *[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
            )(allocator[0])

    @contextlib.contextmanager
    def use(self, pool, device=None):
        self.current.append(pool)
        try:
            yield
        finally:
            self.current.pop()

    def allocate(self, nbytes: int) -> int:
        address = self.current[-1].allocate(nbytes, 0, None)
        if not address:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return address


def test_memory_is_given_through_a_mem_pool(simcuda, monkeypatch):
    fake = FakeTorch(monkeypatch)
    with vtensor.memory(simcuda, tag="weights"):
        weights = fake.current[-1]
        made = [fake.allocate(PAGE)]
        with vtensor.memory(simcuda):
            assert fake.current[-1] is not weights
            made.append(fake.allocate(2 * PAGE))
        made.append(fake.allocate(PAGE))
    assert simcuda.stats().nbytes_by_tag == {"weights": 2 * PAGE, "memory": 2 * PAGE}
    with vtensor.memory(simcuda, tag="weights"):
        assert fake.current[-1] is weights  # one for a tag
        with pytest.raises(torch.OutOfMemoryError) as refused:
            with vtensor.memory(simcuda, tag="weights"):
                fake.allocate(64 * PAGE)
    assert "need 64 pages" in refused.value.__notes__[0]
    for address in made:
        free(address)
    assert not fake.current
    assert simcuda.stats().nbytes_by_tag == {"weights": 0, "memory": 0}
    simcuda.close()


def test_memory_whose_freeing_was_refused_can_be_freed_later():
    """In a process of its own, which has no memory left when torch frees."""
    run_snippet(
        """
        import resource
        from test_heap import allocate, free, inside
        pool = open_pool("host", 64)
        with inside(pool) as core:
            address = allocate(1000)
        libc = ctypes.CDLL(None)
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used, limits[1]))
        for nbytes in (1 << 20, 1 << 14, 256, 8):
            while libc.malloc(nbytes):
                pass
        free(address, 1000, stream=1)  # of a stream that is noted for the first time
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert core.counts().allocations == 1
        free(address, 1000, stream=1)
        assert core.counts().allocations == 0
        os._exit(0)  # the memory is still gone
        """
    ).check()
