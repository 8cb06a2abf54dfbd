"""NVIDIA's own Python over the simulated libcuda: rules of another author, and work beside vtensor.

Each test runs in a process of its own, which finds the simulated libcuda where it looks for the real one.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from cuda_support import needs_simcuda, with_libcuda
from support import run_process

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytestmark = needs_simcuda

BEGIN = """
import ctypes, os, sys
sys.path.append(sys.argv[1])
from cuda.core import Device
from cuda_support import mapping_at
from support import simcuda_leaks

library = os.environ["VTENSOR_SIMCUDA"]
PAGE = 2 << 20
device = Device(0)
assert device.name == "simulated libcuda (test double)"
"""


def over_simulation(tmp_path: Path, code: str) -> None:
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(code), Path(__file__).parent]
    assert run_process(*command, env=with_libcuda(tmp_path)).check().out == "over\n"


def test_a_virtual_memory_resource_allocates_grows_and_frees(tmp_path):
    over_simulation(
        tmp_path,
        """
        from cuda.core import VirtualMemoryResource

        device.set_current()
        memory = VirtualMemoryResource(device)
        buffer = memory.allocate(PAGE - 5)
        assert buffer.size == PAGE
        ctypes.memset(int(buffer.handle), 7, PAGE)
        first = mapping_at(int(buffer.handle))
        grown = memory.modify_allocation(buffer, 3 * PAGE)
        assert grown.size == 3 * PAGE and buffer.is_closed
        ctypes.memset(int(grown.handle) + PAGE, 8, 2 * PAGE)
        assert ctypes.string_at(int(grown.handle), PAGE) == bytes([7]) * PAGE
        mappings = [mapping_at(int(grown.handle) + i * PAGE) for i in range(3)]
        assert mappings[0] == first and mappings[1] == mappings[2] != first
        assert [access for _, access in mappings] == [3, 3, 3]
        grown.close()
        left = simcuda_leaks()
        assert (left.mappings, left.ranges) == (0, 0)
        # It gives back the references that it retained, not those that it created: by the reference, and
        # in the simulation, the memory of its two handles stays.
        assert left.handles <= 2
        print("over")
        """,
    )


def test_vtensor_and_cuda_core_side_by_side(tmp_path):
    over_simulation(
        tmp_path,
        """
        import torch, vtensor
        from cuda.bindings import driver
        from cuda.core.utils import StridedMemoryView
        from stream_support import SimulatedDevice
        from vtensor import testing

        device.set_current()
        context = driver.cuCtxGetCurrent()[1]
        pool = testing.simulated_cuda_pool(library, page_size=PAGE, budget=64 * PAGE)
        t = vtensor.empty(1024, 1024, grow_dim=0, capacity=8192, dtype=torch.float32, pool=pool).fill_(1)
        primary = driver.cuDevicePrimaryCtxRetain(0)[1]
        assert int(primary) == int(context) == int(driver.cuCtxGetCurrent()[1])

        view = StridedMemoryView.from_any_interface(t, stream_ptr=-1)
        assert (view.ptr, view.shape, view.strides) == (t.data_ptr(), (1024, 1024), (1024, 1))
        assert view.exporting_obj is t and not view.readonly
        t.extend(2048)
        assert view.shape == (1024, 1024) and t.data_ptr() == view.ptr

        # A kernel in a stream of cuda.core's: what it needs stays mapped until it is over.
        simulated = SimulatedDevice()
        stream = device.create_stream()
        simulated.hold(int(stream.handle))
        with vtensor.lease(t, stream=stream):
            simulated.kernel(int(stream.handle), t, 1024, 1536, writes=5)
        address = t.data_ptr()
        t.shrink(3072 - 512)
        assert mapping_at(address + 2 * PAGE)[0] != 0
        simulated.release(int(stream.handle))
        stream.sync()
        pool.wait_idle()
        assert mapping_at(address + 2 * PAGE)[0] == 0 != mapping_at(address)[0]
        assert bool((t == 1).all())
        del view
        t.close()
        pool.close()
        stream.close()
        assert simulated.end() == 0
        print("over")
        """,
    )
