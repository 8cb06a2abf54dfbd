"""libcuda's virtual memory management through ctypes: the real driver, or the simulated one of
``tests/simcuda``.

It needs no torch. Each call returns the driver's answer as it came, because the answers are what is asked
about; ``must`` raises on a refusal. The calls drop the GIL, as vtensor's own do.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

READ_ONLY, READ_WRITE, NO_ACCESS = 1, 3, 0  # CUmemAccess_flags
GRANULARITY_MINIMUM = 0
WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_PINNED, _ON_DEVICE = 1, 1
_RDMA_SUPPORTED = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class AccessDescription(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


# Documented name: (exported symbol, argument types). All return a CUresult.
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuInit": ("cuInit", (c_uint,)),
    "cuDeviceGetCount": ("cuDeviceGetCount", (POINTER(c_int),)),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", (POINTER(c_void_p), c_int)),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", (c_int,)),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", (c_void_p,)),
    "cuCtxGetCurrent": ("cuCtxGetCurrent", (POINTER(c_void_p),)),
    "cuCtxSynchronize": ("cuCtxSynchronize", ()),
    "cuMemGetInfo": ("cuMemGetInfo_v2", (POINTER(c_size_t), POINTER(c_size_t))),
    "cuMemGetAllocationGranularity": (
        "cuMemGetAllocationGranularity",
        (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    ),
    "cuMemAddressReserve": (
        "cuMemAddressReserve",
        (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    ),
    "cuMemAddressFree": ("cuMemAddressFree", (c_uint64, c_size_t)),
    "cuMemCreate": ("cuMemCreate", (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64)),
    "cuMemRelease": ("cuMemRelease", (c_uint64,)),
    "cuMemMap": ("cuMemMap", (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64)),
    "cuMemUnmap": ("cuMemUnmap", (c_uint64, c_size_t)),
    "cuMemSetAccess": ("cuMemSetAccess", (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t)),
    "cuMemsetD8": ("cuMemsetD8_v2", (c_uint64, c_ubyte, c_size_t)),
    "cuMemcpyDtoD": ("cuMemcpyDtoD_v2", (c_uint64, c_uint64, c_size_t)),
}
# Not in the simulated libcuda: looked up when first called.
REAL_ONLY: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuDriverGetVersion": ("cuDriverGetVersion", (POINTER(c_int),)),
    "cuStreamWaitValue32": ("cuStreamWaitValue32_v2", (c_void_p, c_uint64, c_uint32, c_uint)),
}


class Refused(Exception):
    """A driver call that had to succeed answered with an error."""


class Driver:
    """The VMM calls on one device. Handles, addresses and sizes are integers; sizes are in bytes."""

    def __init__(self, library: str = "libcuda.so.1", device: int = 0) -> None:
        self._loaded = ctypes.CDLL(library)
        for name, entry in CALLS.items():
            self._resolve(name, entry)
        self._error_name = self._loaded.cuGetErrorName
        self._error_name.argtypes, self._error_name.restype = (c_int, POINTER(c_char_p)), c_int
        self.device = device
        self._properties = AllocationProperties(type=_PINNED, location=Location(_ON_DEVICE, device))
        self.must(self.cuInit(0))
        rdma = c_int()
        self.must(self.cuDeviceGetAttribute(byref(rdma), _RDMA_SUPPORTED, device))
        size = c_size_t()
        self.must(
            self.cuMemGetAllocationGranularity(byref(size), byref(self._properties), GRANULARITY_MINIMUM)
        )
        self.granularity = size.value
        self.rdma = "not supported"
        if rdma.value:
            self.rdma = self._probe_rdma()

    def _probe_rdma(self) -> str:
        """Asks for GPUDirect RDMA from here on, as vtensor's own driver does, unless that is refused."""
        self._properties.allocFlags.gpuDirectRDMACapable = 1
        code, handle = self.create(self.granularity)
        if code != 0:
            self._properties.allocFlags.gpuDirectRDMACapable = 0
            return f"supported by its attribute, refused with {self.name_of(code)}"
        self.must(self.release(handle))
        return "asked for"

    def _resolve(self, name: str, entry: tuple[str, tuple[Any, ...]]) -> Any:
        function = getattr(self._loaded, entry[0])
        function.argtypes, function.restype = entry[1], c_int
        setattr(self, name, function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name in REAL_ONLY:
            return self._resolve(name, REAL_ONLY[name])
        raise AttributeError(name)

    def name_of(self, code: int) -> str:
        """ "CUDA_ERROR_INVALID_VALUE"; the number where libcuda has no name for it."""
        name = c_char_p()
        if self._error_name(code, byref(name)) == 0 and name.value:
            return name.value.decode()
        return str(code)

    def must(self, code: int) -> None:
        """Raises Refused unless `code` is CUDA_SUCCESS."""
        if code != 0:
            raise Refused(f"the driver answered {self.name_of(code)} ({code})")

    # The calls with plain arguments; those that make something return (code, what they made).

    def reserve(self, size: int, alignment: int = 0) -> tuple[int, int]:
        address = c_uint64()
        code = self.cuMemAddressReserve(byref(address), size, alignment, 0, 0)
        return code, address.value

    def free(self, address: int, size: int) -> int:
        code: int = self.cuMemAddressFree(address, size)
        return code

    def create(self, size: int) -> tuple[int, int]:
        handle = c_uint64()
        code = self.cuMemCreate(byref(handle), size, byref(self._properties), 0)
        return code, handle.value

    def create_without_rdma(self, size: int) -> tuple[int, int]:
        plain = AllocationProperties(type=_PINNED, location=Location(_ON_DEVICE, self.device))
        handle = c_uint64()
        code = self.cuMemCreate(byref(handle), size, byref(plain), 0)
        return code, handle.value

    def release(self, handle: int) -> int:
        code: int = self.cuMemRelease(handle)
        return code

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> int:
        code: int = self.cuMemMap(address, size, offset, handle, 0)
        return code

    def unmap(self, address: int, size: int) -> int:
        code: int = self.cuMemUnmap(address, size)
        return code

    def set_access(self, address: int, size: int, flags: int = READ_WRITE) -> int:
        wanted = AccessDescription(Location(_ON_DEVICE, self.device), flags)
        code: int = self.cuMemSetAccess(address, size, byref(wanted), 1)
        return code

    def memory(self) -> tuple[int, int, int]:
        """(code, free bytes, total bytes); needs a current context."""
        free, total = c_size_t(), c_size_t()
        return self.cuMemGetInfo(byref(free), byref(total)), free.value, total.value

    def retain_context(self) -> int:
        """Makes the device's primary context current in this thread."""
        context = c_void_p()
        code: int = self.cuDevicePrimaryCtxRetain(byref(context), self.device)
        return code or self.cuCtxSetCurrent(context)

    def release_context(self) -> None:
        self.must(self.cuCtxSetCurrent(None))
        self.must(self.cuDevicePrimaryCtxRelease(self.device))

    def version(self) -> int:
        """The CUDA version that the driver supports: 13000 for 13.0."""
        value = c_int()
        self.must(self.cuDriverGetVersion(byref(value)))
        return value.value


class Pages:
    """Mapped pages of a driver that go away with the `with`: a range of `slots` pages, `count` handles.

    Nothing is mapped at first. At the end whatever is still mapped is unmapped; wait for kernels before.
    """

    def __init__(self, driver: Driver, page_size: int, slots: int, count: int) -> None:
        self.driver, self.page_size, self.slots = driver, page_size, slots
        self.handles: list[int] = []
        self.mapped: set[int] = set()
        code, self.address = driver.reserve(slots * page_size, page_size & -page_size)
        driver.must(code)
        try:
            for _ in range(count):
                code, handle = driver.create(page_size)
                driver.must(code)
                self.handles.append(handle)
        except Refused:
            self.close()
            raise

    def at(self, slot: int) -> int:
        return self.address + slot * self.page_size

    def map(self, slot: int, handle: int) -> int:
        code = self.driver.map(self.at(slot), self.page_size, handle)
        if code == 0:
            self.mapped.add(slot)
        return code

    def set_access(self, slot: int, count: int = 1, flags: int = READ_WRITE) -> int:
        return self.driver.set_access(self.at(slot), count * self.page_size, flags)

    def unmap(self, slot: int, count: int = 1) -> int:
        code = self.driver.unmap(self.at(slot), count * self.page_size)
        if code == 0:
            self.mapped.difference_update(range(slot, slot + count))
        return code

    def map_all(self, flags: int = READ_WRITE) -> None:
        """Handle i at slot i, all accessible by one call."""
        for slot, handle in enumerate(self.handles):
            self.driver.must(self.map(slot, handle))
        self.driver.must(self.set_access(0, len(self.handles), flags))

    def close(self) -> None:
        for slot in sorted(self.mapped):
            self.unmap(slot)
        for handle in self.handles:
            self.driver.release(handle)
        self.driver.free(self.address, self.slots * self.page_size)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
