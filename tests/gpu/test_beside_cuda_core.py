"""vtensor beside NVIDIA's cuda.core on a real GPU: one context, views of a VTensor, kernels that cuda.core
launches. Over the simulated libcuda, which launches none: tests/python/test_cuda_core.py."""

from __future__ import annotations

import pytest
import torch

import vtensor
from devices import PAGE

ADD = """
extern "C" __global__ void add_slowly(float* values, size_t count, long long cycles) {
  for (long long start = clock64(); clock64() - start < cycles;) {}
  size_t step = gridDim.x * blockDim.x;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) values[i] += 1;
}
"""
CYCLES = 200_000_000  # about a tenth of a second


pytestmark = pytest.mark.parametrize("device", ["gpu"], indirect=True)


@pytest.fixture
def core(device):
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    if not hasattr(core, "Program"):
        pytest.skip("cuda-core is older than 0.5: its names are in cuda.core.experimental")
    torch.zeros(1, device="cuda")
    return core


def floats(pool, pages: int) -> vtensor.VTensor:
    per_page = PAGE // 4
    return vtensor.zeros(pages * per_page, grow_dim=0, capacity=16 * per_page, dtype=torch.float32, pool=pool)


def test_both_work_in_the_primary_context(core, pool):
    driver = pytest.importorskip("cuda.bindings.driver")
    before = driver.cuCtxGetCurrent()[1]
    t = floats(pool, 2)
    core.Device(torch.cuda.current_device()).set_current()
    assert int(driver.cuCtxGetCurrent()[1]) == int(before)
    assert not t.any()
    t.close()


def test_a_strided_memory_view_of_a_vtensor(core, pool):
    from cuda.core.utils import StridedMemoryView

    t = vtensor.zeros(4, 600, 8, grow_dim=1, capacity=1 << 20, dtype=torch.float32, pool=pool)
    view = StridedMemoryView.from_any_interface(t, stream_ptr=torch.cuda.current_stream().cuda_stream)
    assert (view.ptr, tuple(view.shape)) == (t.data_ptr(), (4, 600, 8))
    assert tuple(view.strides) == t.stride() and view.is_device_accessible
    assert view.device_id == torch.cuda.current_device()
    del view
    t.close()


def test_a_lease_around_a_kernel_of_cuda_core(core, pool, bindings):
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    options = core.ProgramOptions(arch=f"sm_{device.arch}")
    try:
        module = core.Program(ADD, "c++", options).compile("cubin")
    except Exception as error:
        pytest.skip(f"cuda.core cannot compile here: {error}")
    kernel = module.get_kernel("add_slowly")
    stream = device.create_stream()
    t = floats(pool, 4)
    torch.cuda.synchronize()
    with vtensor.lease(t, stream=stream):
        config = core.LaunchConfig(grid=64, block=256)
        core.launch(stream, config, kernel, t.data_ptr(), t.numel(), CYCLES)
    last_page = t.data_ptr() + 3 * PAGE
    t.shrink(PAGE // 4)
    assert bindings.is_mapped(last_page)  # the kernel still needs it
    stream.sync()
    pool.wait_idle()
    assert not bindings.is_mapped(last_page)
    assert bool((t == 1).all())
    t.close()
    stream.close()
