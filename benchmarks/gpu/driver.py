"""libcuda's virtual memory management through NVIDIA's cuda-bindings: the real driver, or the simulated one
of ``tests/simcuda`` where that lies as ``libcuda.so.1`` on ``LD_LIBRARY_PATH``.

It needs no torch. Each call returns the driver's answer as it came, because the answers are what is asked
about; ``must`` raises on a refusal. The calls drop the GIL, as vtensor's own do.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

READ_ONLY, READ_WRITE, NO_ACCESS = 1, 3, 0  # CUmemAccess_flags
NOT_SHAREABLE, POSIX_DESCRIPTOR, FABRIC = 0, 1, 8  # CUmemAllocationHandleType
_ON_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_MINIMUM = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_RDMA_SUPPORTED = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
_GREATER_OR_EQUAL = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
_DEVICE_POINTER = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER


class Refused(Exception):
    """A driver call that had to succeed answered with an error."""


class Driver:
    """The VMM calls on one device. Handles, addresses and sizes are integers; sizes are in bytes.

    What makes something returns (answer, what it made), all else the answer alone: 0 is CUDA_SUCCESS.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.must(cuda.cuInit(0)[0])
        self._plain = {kind: self._properties_for(kind) for kind in (NOT_SHAREABLE, POSIX_DESCRIPTOR, FABRIC)}
        self._properties = self._plain[NOT_SHAREABLE]
        self._wanted = {flags: [self._access(flags)] for flags in (NO_ACCESS, READ_ONLY, READ_WRITE)}
        code, self.granularity = cuda.cuMemGetAllocationGranularity(self._properties, _MINIMUM)
        self.must(code)
        code, supported = cuda.cuDeviceGetAttribute(_RDMA_SUPPORTED, device)
        self.must(code)
        self.rdma = self._probe_rdma() if supported else "not supported"

    def _properties_for(self, handle_type: int, rdma: bool = False) -> cuda.CUmemAllocationProp:
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = cuda.CUmemAllocationHandleType(handle_type)
        properties.location.type, properties.location.id = _ON_DEVICE, self.device
        properties.allocFlags.gpuDirectRDMACapable = int(rdma)
        return properties

    def _probe_rdma(self) -> str:
        """Asks for GPUDirect RDMA from here on, as vtensor's own driver does, unless that is refused."""
        self._properties = self._properties_for(NOT_SHAREABLE, rdma=True)
        code, handle = self.create(self.granularity)
        if code != 0:
            self._properties = self._plain[NOT_SHAREABLE]
            return f"supported by its attribute, refused with {self.name_of(code)}"
        self.must(self.release(handle))
        return "asked for"

    def _access(self, flags: int) -> cuda.CUmemAccessDesc:
        wanted = cuda.CUmemAccessDesc()
        wanted.location.type, wanted.location.id = _ON_DEVICE, self.device
        wanted.flags = cuda.CUmemAccess_flags(flags)
        return wanted

    def name_of(self, code: int) -> str:
        """ "CUDA_ERROR_INVALID_VALUE"."""
        return str(cuda.CUresult(code).name)

    def must(self, code: int) -> None:
        """Raises Refused unless `code` is CUDA_SUCCESS."""
        if code != 0:
            raise Refused(f"the driver answered {self.name_of(code)} ({int(code)})")

    def reserve(self, size: int, alignment: int = 0) -> tuple[int, int]:
        return _made(cuda.cuMemAddressReserve(size, alignment, 0, 0))

    def free(self, address: int, size: int) -> int:
        return _code(cuda.cuMemAddressFree(address, size))

    def create(self, size: int) -> tuple[int, int]:
        return _made(cuda.cuMemCreate(size, self._properties, 0))

    def create_plain(self, size: int, handle_type: int = NOT_SHAREABLE) -> tuple[int, int]:
        """Without GPUDirect RDMA; perhaps with a type of handle that other processes may be given."""
        return _made(cuda.cuMemCreate(size, self._plain[handle_type], 0))

    def release(self, handle: int) -> int:
        return _code(cuda.cuMemRelease(handle))

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> int:
        return _code(cuda.cuMemMap(address, size, offset, handle, 0))

    def unmap(self, address: int, size: int) -> int:
        return _code(cuda.cuMemUnmap(address, size))

    def set_access(self, address: int, size: int, flags: int = READ_WRITE) -> int:
        return _code(cuda.cuMemSetAccess(address, size, self._wanted[flags], 1))

    def fill(self, address: int, value: int, size: int) -> int:
        return _code(cuda.cuMemsetD8(address, value, size))

    def copy(self, to: int, origin: int, size: int) -> int:
        return _code(cuda.cuMemcpyDtoD(to, origin, size))

    def device_pointer(self, address: int) -> int:
        """Whether kernels may be given that address: what Triton asks of each of its arguments."""
        return _code(cuda.cuPointerGetAttribute(_DEVICE_POINTER, address))

    def wait_for_flag(self, stream: int, address: int) -> int:
        """Has the stream wait until the 32-bit number there is 1 or more."""
        return _code(cuda.cuStreamWaitValue32(stream, address, 1, _GREATER_OR_EQUAL))

    def synchronize(self) -> int:
        return _code(cuda.cuCtxSynchronize())

    def memory(self) -> tuple[int, int, int]:
        """(answer, free bytes, total bytes); needs a current context."""
        code, free, total = cuda.cuMemGetInfo()
        return code, free, total

    def retain_context(self) -> int:
        """Makes the device's primary context current in this thread."""
        code, context = cuda.cuDevicePrimaryCtxRetain(self.device)
        return code or _code(cuda.cuCtxSetCurrent(context))

    def release_context(self) -> None:
        self.must(_code(cuda.cuCtxSetCurrent(cuda.CUcontext(0))))
        self.must(_code(cuda.cuDevicePrimaryCtxRelease(self.device)))


def _code(answer: tuple[Any, ...]) -> int:
    code: int = answer[0]
    return code


def _made(answer: tuple[Any, Any]) -> tuple[int, int]:
    """(answer, what was made, or 0 where that was refused)."""
    code, made = answer
    return code, int(made) if code == 0 else 0


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
