"""For tests of the CUDA path: settings of the simulated device, its view of mappings, known content."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

import vtensor
from support import quarter, ramp, simcuda_control, simcuda_library

needs_simcuda = pytest.mark.skipif(
    simcuda_library() is None, reason="libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)"
)

READ, READ_WRITE = 1, 3  # CUmemAccess_flags


@contextlib.contextmanager
def device(**settings: int):
    """The simulated device with other settings, for as long as it lasts."""
    control = simcuda_control()
    control.simcuda_configure.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
    usual = {"memory": 4 << 30, "devices": 1, "vmm": 1, "read_only": 1, "granularity": 4096}
    try:
        for name, value in settings.items():
            assert control.simcuda_configure(name.encode(), value) == 0
        yield
    finally:
        for name in settings:
            control.simcuda_configure(name.encode(), usual[name])


def mapping_at(address: int) -> tuple[int, int]:
    """(handle, access) of what the driver has mapped there; handle 0 where nothing is."""
    look = simcuda_control().simcuda_mapping_at
    look.argtypes, look.restype = (ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)), ctypes.c_uint64
    access = ctypes.c_int()
    return look(address, access), access.value


def free_memory() -> int:
    """Bytes of the simulated device that no allocation takes."""
    look = simcuda_control().simcuda_free_memory
    look.argtypes, look.restype = (ctypes.c_int,), ctypes.c_uint64
    return look(0)


def values(length: int, rows: tuple[int, ...] = ()) -> torch.Tensor:
    """Float32 data for `quarter(pool, dtype=torch.float32)`: a quarter of a 4 KiB page to a position."""
    return ramp(torch.empty((*rows, length, 256), dtype=torch.float32))


def tensor(pool, length: int, rows: tuple[int, ...] = (), **kw) -> vtensor.VTensor:
    t = quarter(pool, 0, rows=rows, dtype=torch.float32, **kw)
    return t.append(values(length, rows))


def assert_mapped_as_told(t) -> None:
    """The driver has mapped exactly what pages() says, read-only where shared."""
    for record in t.pages():
        handle, access = mapping_at(record.address)
        assert handle == record.page_id
        assert access == (READ if record.shared > 1 else READ_WRITE)
