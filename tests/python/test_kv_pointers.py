"""On CUDA each layer of a KVCache begins at an address that kernels may be given. If nothing is mapped there,
one read-only page of zeros is, which counts for no slot."""

from __future__ import annotations

import ctypes

import pytest

import vtensor
from cuda_support import READ, READ_WRITE, device, mapping_at, needs_simcuda
from kv_support import MAX_BATCH, MAX_LEN, PAGE, SHAPES, grown, make_cache
from support import calls, calls_since
from vtensor import testing

pytestmark = needs_simcuda


def first_addresses(cache) -> list[int]:
    layers = [cache[layer] for layer in range(len(cache))]
    tensors = [t for layer in layers for t in (layer if isinstance(layer, tuple) else (layer,))]
    return sorted({t.data_ptr() for t in tensors if t is not None})


def mappings(cache) -> set[tuple[int, int]]:
    return {mapping_at(address) for address in first_addresses(cache)}


@pytest.mark.parametrize("rdma", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_begin_at_pointers_whatever_slot_0_holds(pool_factory, shape, rdma):  # I5, I7
    """No write reaches the zeros, also where shared pages are left writable."""
    with make_cache(pool_factory("simcuda", 2000, rdma=rdma), shape) as cache:
        (zeros,) = mappings(cache)
        assert zeros[0] != 0 and zeros[1] == READ
        for address in first_addresses(cache):
            assert not any(ctypes.string_at(address, PAGE - address % PAGE))
        assert cache.stats().pages_mapped == 0 and cache.pool.stats().pages_used == 0
        for _ in range(2):
            assert cache.alloc() == 0 and mappings(cache) == {zeros}
            assert grown(cache, 0, 5)
            assert zeros[0] not in {handle for handle, _ in mappings(cache)}
            assert {access for _, access in mappings(cache)} == {READ_WRITE}
            cache.free(0)
            cache.pool.trim()
            cache.pool.wait_idle()
            assert mappings(cache) == {zeros} and cache.stats().pages_mapped == 0


def test_a_window_that_has_passed_leaves_a_pointer(pool_factory):
    with make_cache(pool_factory("simcuda", 2000), "windows") as cache:
        (zeros,) = mappings(cache)
        cache.alloc()
        assert grown(cache, 0, 90) and grown(cache, 0, MAX_LEN)
        cache.pool.wait_idle()
        assert zeros in mappings(cache) and len(mappings(cache)) > 1


def test_other_slots_leave_it_alone(pool_factory):  # I15
    with make_cache(pool_factory("simcuda", 400)) as cache:
        slots = [cache.alloc() for _ in range(MAX_BATCH)]
        (zeros,) = mappings(cache)
        before = calls(cache.pool)
        for slot in slots[1:]:
            grown(cache, slot, MAX_LEN)
        assert "cuMemUnmap" not in calls_since(cache.pool, before) and mappings(cache) == {zeros}
        grown(cache, 0, 1)
        assert calls_since(cache.pool, before)["cuMemUnmap"] == 4  # one for each of its rows
        before = calls(cache.pool)
        grown(cache, 0, 16)
        assert calls_since(cache.pool, before) == {}


def test_where_kernels_are_given_holes_nothing_is_mapped(pool_factory):
    with device(pointers=3), make_cache(pool_factory("simcuda", 400)) as cache:
        assert mappings(cache) == {(0, 0)}
        cache.alloc()
        assert grown(cache, 0, 5)


def test_refused_steps_leave_it_there(pool_factory):  # I8
    with make_cache(pool_factory("simcuda", 400)) as cache:
        (zeros,) = mappings(cache)
        cache.alloc()
        refused = 0
        for n in range(40):
            try:
                with testing.fail_after(cache.pool, n):
                    grown(cache, 0, 5)
            except (vtensor.DriverError, vtensor.OutOfPages):
                refused += 1
                assert cache.lengths[0] == 0 and mappings(cache) == {zeros}
            else:
                assert zeros not in mappings(cache)
                cache.truncate(0, 0)
                cache.pool.trim()
                cache.pool.wait_idle()
                assert mappings(cache) == {zeros}
        assert refused > 0
