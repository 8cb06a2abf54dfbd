"""libcuda's virtual memory management through NVIDIA's cuda-bindings, and torch tensors over its addresses.

Each call returns the driver's answer as it came, because the answers are what is asked about; ``must`` raises
on a refusal. The calls drop the GIL, as vtensor's own do.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import torch
from cuda.bindings import driver as cuda

PAGE = 2 << 20
NO_ACCESS, READ_ONLY, READ_WRITE = 0, 1, 3  # CUmemAccess_flags
HANDLE_TYPES = {"none": 0, "a POSIX descriptor": 1, "fabric": 8}  # CUmemAllocationHandleType
_ON_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_MINIMUM = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_RDMA_SUPPORTED = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class Refused(Exception):
    """A driver call that had to succeed answered with an error."""


Answer = tuple[Any, ...]  # of cuda-bindings: a code, 0 for CUDA_SUCCESS, and what the call made


def name_of(answer: Answer) -> str:
    """ "CUDA_ERROR_INVALID_VALUE"."""
    return str(cuda.CUresult(answer[0]).name)


def must(answer: Answer) -> int:
    """The first of what the call made, or 0. Raises Refused unless it succeeded."""
    code, *made = answer
    if code != 0:
        raise Refused(f"the driver answered {name_of(answer)} ({int(code)})")
    return int(made[0]) if made else 0


def reserve(size: int, alignment: int = 0) -> Answer:
    return cuda.cuMemAddressReserve(size, alignment, 0, 0)


def map_at(address: int, size: int, handle: int, offset: int = 0) -> Answer:
    return cuda.cuMemMap(address, size, offset, handle, 0)


def retain_context() -> None:
    """Makes the device's primary context current in this thread."""
    must(cuda.cuInit(0))
    must(cuda.cuCtxSetCurrent(must(cuda.cuDevicePrimaryCtxRetain(0))))


def release_context() -> None:
    must(cuda.cuCtxSetCurrent(cuda.CUcontext(0)))
    must(cuda.cuDevicePrimaryCtxRelease(0))


class Driver:
    """Calls on the first device whose arguments are structures. Sizes are in bytes."""

    def __init__(self) -> None:
        must(cuda.cuInit(0))
        self._plain = {kind: self._properties(kind) for kind in HANDLE_TYPES.values()}
        self._used = self._plain[0]
        self._wanted = {flags: [self._access(flags)] for flags in (NO_ACCESS, READ_ONLY, READ_WRITE)}
        self.granularity = must(cuda.cuMemGetAllocationGranularity(self._used, _MINIMUM))
        self.rdma = "not supported"
        if must(cuda.cuDeviceGetAttribute(_RDMA_SUPPORTED, 0)):  # asked for as vtensor's own driver does
            self._used = self._properties(0, rdma=True)
            tried = self.create(self.granularity)
            self.rdma = f"supported by its attribute; cuMemCreate with it: {name_of(tried)}"
            if tried[0] == 0:
                must(cuda.cuMemRelease(tried[1]))
            else:
                self._used = self._plain[0]

    @staticmethod
    def _properties(handle_type: int, rdma: bool = False) -> cuda.CUmemAllocationProp:
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = cuda.CUmemAllocationHandleType(handle_type)
        properties.location.type, properties.location.id = _ON_DEVICE, 0
        properties.allocFlags.gpuDirectRDMACapable = int(rdma)
        return properties

    @staticmethod
    def _access(flags: int) -> cuda.CUmemAccessDesc:
        wanted = cuda.CUmemAccessDesc()
        wanted.location.type, wanted.location.id = _ON_DEVICE, 0
        wanted.flags = cuda.CUmemAccess_flags(flags)
        return wanted

    def create(self, size: int) -> Answer:
        return cuda.cuMemCreate(size, self._used, 0)

    def create_plain(self, size: int, handle_type: int = 0) -> Answer:
        """Without GPUDirect RDMA; perhaps with a type of handle that other processes may be given."""
        return cuda.cuMemCreate(size, self._plain[handle_type], 0)

    def set_access(self, address: int, size: int, flags: int = READ_WRITE) -> Answer:
        return cuda.cuMemSetAccess(address, size, self._wanted[flags], 1)


class Pages:
    """A range of `slots` pages and `count` handles, of which nothing is mapped at first.

    At the end of the `with` whatever is still mapped is unmapped; wait for kernels before.
    """

    def __init__(self, driver: Driver, slots: int, count: int, size: int = PAGE) -> None:
        self.driver, self.size, self.slots = driver, size, slots
        self.mapped: set[int] = set()
        self.address = must(reserve(slots * size, size & -size))
        self.handles = [must(driver.create(size)) for _ in range(count)]

    def at(self, slot: int) -> int:
        return self.address + slot * self.size

    def map(self, slot: int, handle: int) -> Answer:
        """Maps handle number `handle` there, not accessible yet."""
        answer = map_at(self.at(slot), self.size, self.handles[handle])
        if answer[0] == 0:
            self.mapped.add(slot)
        return answer

    def set_access(self, slot: int, count: int = 1, flags: int = READ_WRITE) -> Answer:
        return self.driver.set_access(self.at(slot), count * self.size, flags)

    def put(self, slot: int, handle: int, flags: int = READ_WRITE) -> Answer:
        must(self.map(slot, handle))
        must(answer := self.set_access(slot, 1, flags))
        return answer

    def put_all(self) -> Pages:
        """Handle i at slot i, all accessible by one call."""
        for slot in range(len(self.handles)):
            must(self.map(slot, slot))
        must(self.set_access(0, len(self.handles)))
        return self

    def unmap(self, slot: int, count: int = 1) -> Answer:
        answer = cuda.cuMemUnmap(self.at(slot), count * self.size)
        if answer[0] == 0:
            self.mapped.difference_update(range(slot, slot + count))
        return answer

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *exc: object) -> None:
        for slot in sorted(self.mapped):
            self.unmap(slot)
        for handle in self.handles:
            cuda.cuMemRelease(handle)
        cuda.cuMemAddressFree(self.address, self.slots * self.size)


class _Tensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x, which torch takes in every release."""

    _fields_ = [
        *(("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32)),
        *(("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)),
        *(("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)),
        *(("manager", c_void_p), ("deleter", c_void_p)),
    ]


_kept: list[object] = []  # torch reads them for as long as a storage lives; a run makes a few hundred
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = (c_void_p, ctypes.c_char_p, c_void_p)
_new_capsule.restype = ctypes.py_object


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor over addresses, mapped or not, which the caller keeps."""
    length, step = c_int64(math.prod(shape) * dtype.itemsize), c_int64(1)
    kind = 2 if device.type == "cuda" else 1  # kDLCUDA, kDLCPU
    tensor = _Tensor(
        address, kind, device.index or 0, 1, 1, 8, 1, ctypes.pointer(length), ctypes.pointer(step)
    )
    _kept.append((tensor, length, step))
    flat = torch.from_dlpack(_new_capsule(ctypes.addressof(tensor), b"dltensor", None))
    return flat.view(dtype).view(*shape)
