"""What these tests run on: the first GPU or, so that they cannot rot where there is none, the simulated
libcuda (tests/simcuda, a test double), whose tensors are CPU tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vtensor
from vtensor import testing

sys.path.append(str(Path(__file__).parents[1] / "python"))

from cuda_support import TorchOnTheDevice, free_memory, mapping_at  # noqa: E402
from cuda_support import device as settings  # noqa: E402
from stream_support import SimulatedDevice  # noqa: E402
from support import simcuda_library  # noqa: E402

PAGE = 2 << 20


class Bindings:
    """NVIDIA's own view of what the driver was asked for, through cuda-bindings."""

    def __init__(self) -> None:
        reason = "cuda-bindings is not installed"
        self._driver = pytest.importorskip("cuda.bindings.driver", reason=reason)

    @staticmethod
    def _asked(answer):
        """The value of an answer, whose first is the CUresult."""
        code, *rest = answer
        assert code.name == "CUDA_SUCCESS", code
        return rest[0] if rest else None

    def is_mapped(self, address: int) -> bool:
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        code, value = self._driver.cuPointerGetAttribute(attribute, address)
        return code.name == "CUDA_SUCCESS" and bool(value)

    def handle_at(self, address: int) -> int:
        handle = self._asked(self._driver.cuMemRetainAllocationHandle(address))
        self._asked(self._driver.cuMemRelease(handle))
        return int(handle)

    def access_at(self, address: int) -> int:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = torch.cuda.current_device()
        return int(self._asked(self._driver.cuMemGetAccess(location, address)))


class Gpu:
    torch_device = torch.device("cuda", 0)
    others_memory = 16 << 20  # bytes that CUDA and torch may take or return beside a test

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU: torch.cuda.is_available() is false")
        torch.cuda.init()

    def pool(self, prefetch: int = 0, **options) -> vtensor.Pool:
        return vtensor.Pool("cuda", prefetch=prefetch, **options)

    def free_memory(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    @contextlib.contextmanager
    def nearly_full(self, left: int) -> Iterator[None]:
        """Meanwhile the device has so many bytes left."""
        torch.cuda.empty_cache()
        filler = torch.empty(max(self.free_memory() - left, 0), dtype=torch.uint8, device=self.torch_device)
        yield
        del filler
        torch.cuda.empty_cache()

    def bindings(self) -> Bindings:
        return Bindings()

    def end(self) -> None:
        pass


class SimulatedBindings:
    """The simulated driver's own view."""

    def is_mapped(self, address: int) -> bool:
        return self.handle_at(address) != 0

    def handle_at(self, address: int) -> int:
        return mapping_at(address)[0]

    def access_at(self, address: int) -> int:
        return mapping_at(address)[1]


class Simulated:
    torch_device = torch.device("cpu")
    others_memory = 0

    def __init__(self) -> None:
        if simcuda_library() is None:
            pytest.skip("libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)")
        self._device = SimulatedDevice()
        self._device.configure("granularity", PAGE)
        # Events pass late here, as on a GPU. In tests/python they pass at once.
        self._device.unseen_events(20)

    def pool(self, prefetch: int = 0, **options) -> vtensor.Pool:
        return testing.simulated_cuda_pool(simcuda_library(), prefetch=prefetch, **options)

    def free_memory(self) -> int:
        return free_memory()

    @contextlib.contextmanager
    def nearly_full(self, left: int) -> Iterator[None]:
        used = (4 << 30) - free_memory()
        with settings(memory=used + left), TorchOnTheDevice():
            yield

    def bindings(self) -> SimulatedBindings:
        return SimulatedBindings()

    def end(self) -> None:
        assert self._device.end() == 0, "kernels found their memory unmapped or replaced"


DEVICES = {"gpu": Gpu, "simulated": Simulated}
