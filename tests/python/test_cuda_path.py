"""The whole CUDA path, from the tensor to the driver API, over the simulated libcuda: a test double that
keeps the rules of the real one (tests/simcuda), with host memory. No figure from it is a GPU's."""

from __future__ import annotations

import pytest

import vtensor
from cuda_support import READ_WRITE, device, mapping_at, needs_simcuda, tensor, values
from support import leave_spare, run_snippet, same_bytes, simcuda_disarm, simcuda_library
from vtensor import testing

pytestmark = needs_simcuda


# -- shared pages


def test_without_read_only_mappings_operations_still_part_pages(pool_factory):  # I6
    with device(read_only=0):
        pool = pool_factory("simcuda")
        parent = tensor(pool, 10)
        child = parent.fork()
        assert mapping_at(child.address) == (child.pages()[0].page_id, READ_WRITE)
        child.add_(1)
        child.append(values(1))
        assert same_bytes(parent, values(10))
        assert same_bytes(child[:10], values(10) + 1)
        parent.close()
        child.close()


# -- what the device has


def test_the_default_budget_is_nine_tenths_of_the_free_memory():
    with device(memory=100 << 20, granularity=4096):
        pool = testing.simulated_cuda_pool(str(simcuda_library()), page_size=4096)
        assert pool.budget == 90 << 20
        pool.close()


def test_a_default_budget_leaves_what_other_pools_have_not_taken():
    with device(memory=100 << 20, granularity=4096):
        first = testing.simulated_cuda_pool(str(simcuda_library()), page_size=4096, budget=20 << 20)
        kept = tensor(first, 4 << 10, capacity=4 << 10)
        leave_spare(first, 512)  # whose memory is taken, although the pool may use it again
        second = testing.simulated_cuda_pool(str(simcuda_library()), page_size=4096)
        assert second.budget >> 20 in (71, 72)  # nine tenths of 100 MiB less 20
        second.close()
        kept.close()
        first.close()


# -- the end of the process


def test_the_leak_report_sees_a_leak():
    finished = run_snippet(
        """
        os.environ["SIMCUDA_REPORT_LEAKS"] = "1"
        pool, range = open_pool("simcuda"), ctypes.c_uint64()
        simcuda_control().cuMemAddressReserve(ctypes.byref(range), *map(ctypes.c_size_t, (4096, 0, 0, 0)))
        """,
        finalize=True,
    ).check()
    assert "leaked 1 ranges " in finished.err


# -- refused calls


def test_pages_that_came_and_cannot_go_are_used_for_nothing(sim, simcuda):
    """They came without access. Until they are unmapped nothing else is mapped there (I3, I8)."""
    t = tensor(simcuda, 1)
    used = simcuda.stats().pages_used
    sim.fail("cuMemSetAccess")
    sim.fail("cuMemUnmap", refuse=1_000)
    for _ in range(3):  # in the first, the refusal of the access comes before
        with pytest.raises(vtensor.DriverError, match="cuMemUnmap"):
            t.extend(20)
        stats = simcuda.stats()
        assert t.length == 1 and stats.pages_pinned == stats.pages_used - used > 0
        testing.check_invariants(simcuda)
    simcuda_disarm()
    assert not t.extend(20)[1:].any()
    assert simcuda.stats().pages_pinned == 0


@pytest.mark.parametrize(("code", "name"), [(999, "CUDA_ERROR_UNKNOWN"), (4711, "CUresult 4711")])
def test_a_refusal_names_the_call_and_the_answer(sim, simcuda, code, name):
    t = tensor(simcuda, 1)
    sim.fail("cuMemSetAccess", code=code)
    with pytest.raises(vtensor.DriverError, match=f"cuMemSetAccess.*{name}") as raised:
        t.extend(9)
    error = raised.value
    assert (error.call, error.code, error.name) == ("cuMemSetAccess", code, name)
