"""For tests of the CUDA path: settings of the simulated device, its view of mappings, known content."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vtensor
from support import quarter, ramp, simcuda_control, simcuda_library

needs_simcuda = pytest.mark.skipif(
    simcuda_library() is None, reason="libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)"
)


def load_simulated_libcuda() -> None:
    """Has cuda-bindings take the simulated libcuda in this process, if it has not loaded another."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    pytest.importorskip(
        "cuda.bindings._internal.driver", reason="cuda-bindings before 13 loads libcuda alone"
    )
    from cuda.bindings import driver
    from cuda.bindings._internal import driver as loader

    library = ctypes.CDLL(str(simcuda_library()))
    loaded = SimpleNamespace(_handle_uint=library._handle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load_nvidia_dynamic_lib", lambda name: loaded)
        driver.cuInit(0)
    if b"simulated" not in driver.cuDeviceGetName(64, 0)[1]:
        pytest.skip("cuda-bindings has loaded the real libcuda in this process: run this file by itself")


def with_libcuda(folder: Path) -> dict[str, str]:
    """An environment in which new processes find the simulated libcuda, through a link in `folder`."""
    library = str(simcuda_library())
    (folder / "libcuda.so.1").symlink_to(Path(library).resolve())
    others = os.environ.get("LD_LIBRARY_PATH")
    path = f"{folder}:{others}" if others else str(folder)
    return {**os.environ, "LD_LIBRARY_PATH": path, "VTENSOR_SIMCUDA": library}


READ, READ_WRITE = 1, 3  # CUmemAccess_flags


@contextlib.contextmanager
def device(**settings: int):
    """The simulated device with other settings, for as long as it lasts."""
    control = simcuda_control()
    usual = {
        "memory": 4 << 30,
        "devices": 1,
        "vmm": 1,
        "read_only": 1,
        "granularity": 4096,
        "pointers": 1,
        "handle_types": 1,
        "imex": 1,
        "first_uuid": 1,
    }
    try:
        for name, value in settings.items():
            assert control.simcuda_configure(name.encode(), value) == 0
        yield
    finally:
        for name in settings:
            control.simcuda_configure(name.encode(), usual[name])


def mapping_at(address: int) -> tuple[int, int]:
    """(handle, access) of what the driver has mapped there; handle 0 where nothing is."""
    access = ctypes.c_int()
    return simcuda_control().simcuda_mapping_at(address, access), access.value


def free_memory() -> int:
    """Bytes of the simulated device that no allocation takes."""
    return simcuda_control().simcuda_free_memory(0)


class TorchOnTheDevice(TorchDispatchMode):
    """What torch's operations make takes memory of the simulated device, as on a GPU: in segments, which the
    allocator keeps. Without room for one they raise torch.OutOfMemoryError. At its end all is given back."""

    SEGMENT = 2 << 20

    def __init__(self) -> None:
        super().__init__()
        self.segments = self.room = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in given}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.allocate(made.untyped_storage().nbytes())
        return result

    def allocate(self, nbytes: int) -> None:
        while nbytes > self.room:
            if take_memory(self.SEGMENT) != 0:
                raise torch.OutOfMemoryError(
                    f"{nbytes} bytes asked for, the simulated device has {free_memory()}"
                )
            self.segments += 1
            self.room += self.SEGMENT
        self.room -= nbytes

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        assert take_memory(-self.segments * self.SEGMENT) == 0


def take_memory(nbytes: int) -> int:
    """Others take so many bytes of the device, or give them back, below 0. A CUresult."""
    return simcuda_control().simcuda_take_memory(0, nbytes)


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
        assert access == READ or record.shared == 1
