"""Page pools: who owns the physical memory behind tensors that grow."""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from vtensor import _core
from vtensor.errors import Closed, InvalidArgument, VTensorError

if TYPE_CHECKING:
    from vtensor.tensor import VTensor

_MOST_BYTES = 2**62

ZeroPolicy = Literal["never", "new_owner", "always"]


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment. Pages, unless the name says bytes.

    Budget: ``pages_used + pages_free == budget // page_size`` (I5).
    Mappings: ``pages_mapped == pages_needed + pages_ahead + pages_parked + pages_held`` (I4); a page that two
    tensors share is mapped twice and used once.
    """

    page_size: int
    """Bytes of one page."""
    budget: int
    """Bytes the pool may have in use."""
    pages_used: int
    """Page handles in use, and pages that the kernel parted from shared ones."""
    pages_free: int
    """What the budget leaves. Negative where writes parted more shared pages than it had left."""
    pages_cached: int
    """Of the free pages, those whose memory is kept for the next user; ``trim()`` gives it back."""
    pages_parted: int
    """Of the used pages, those that the kernel parted at a write to a shared page and that have no handle
    yet."""
    pages_quarantined: int
    """Of the used pages, those given up after a driver call that could not be undone (I8)."""
    pages_lent: int
    """References that forked child processes keep on used pages until they exit (I13)."""
    pages_mapped: int
    """Page table entries: mapped pages, counted once for each place they are mapped at."""
    pages_needed: int
    """Of the mapped, what the tensors' lengths need."""
    pages_ahead: int
    """Of the mapped, what was prepared ahead of need."""
    pages_parked: int
    """Of the mapped, what freed tensors left for the next one."""
    pages_held: int
    """Of the mapped, what only views of older extents hold."""
    pages_orphaned: int
    """Of the held, what belongs to no open tensor any more and goes with its last view."""
    nbytes_mapped: int
    """``pages_mapped`` in bytes."""
    nbytes_reserved: int
    """Bytes of addresses reserved; they cost no memory."""
    tensors: int
    """Open tensors."""
    driver_calls: dict[str, dict[str, int]]
    """Calls made so far: ``"caller"`` and ``"mapper"`` (the thread), each from a call's name to a count."""


class Pool:
    """The physical pages of one device, lent to the tensors made with ``pool=``.

    Args:
        device: ``"cpu"`` (memfd and mmap), or a CUDA device (CUDA virtual memory management).
        page_size: bytes; the unit of mapping. Host: a power of two from 4 KiB, 64 KiB unless given. CUDA:
        a multiple
            of the device's granularity, 2 MiB unless given.
        budget: bytes of pages that may be in use. Unless given, 80% of what the machine or its cgroup has
            free (host), or 90% of the free device memory (CUDA).
        zero: when a reused page is zeroed: ``"new_owner"`` (before another tensor sees it), ``"always"``, or
            ``"never"`` (tensors may then see what others left).
        ahead: bytes to map ahead of need for each tensor. Look-ahead is not there yet: only 0 is taken.

    Raises:
        InvalidArgument: a page size, budget or policy that cannot be meant.
        DriverError: the driver is missing or refuses; ``call`` and ``name`` say which call and why.
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        page_size: int | None = None,
        budget: int | None = None,
        zero: ZeroPolicy = "new_owner",
        ahead: int = 0,
    ) -> None:
        device = torch.device(device)
        if ahead != 0:
            raise InvalidArgument(
                f"[Pool] ahead is {ahead}: only 0 is supported, pages are mapped when needed"
            )
        sizes = checked_sizes(page_size, budget)
        policy = zero_policy(zero)
        if device.type == "cpu":
            core = _core.host_pool(**sizes, zero=policy, strict_holes=False)
        elif device.type == "cuda":
            index = device.index
            if index is None:
                index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
            device = torch.device("cuda", index)
            core = _core.cuda_pool(index, **sizes, zero=policy, library="", memory_is_host_memory=False)
        else:
            raise InvalidArgument(f"[Pool] device is {device}: vtensor has drivers for cpu and cuda")
        self._adopt(core, device)

    @classmethod
    def _over(cls, core: _core.PagePool, device: torch.device) -> Pool:
        pool = cls.__new__(cls)
        pool._adopt(core, device)
        return pool

    def _adopt(self, core: _core.PagePool, device: torch.device) -> None:
        self._core: _core.PagePool | _core.ClosedPool = core
        self._device = device
        self._tensors: weakref.WeakSet[_Registered] = weakref.WeakSet()
        self._closed = False
        _pools.add(self)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<vtensor.Pool {self._device}, {self.budget:,} bytes in pages of {self.page_size:,}{state}>"

    @property
    def device(self) -> torch.device:
        """The device whose memory this is."""
        return self._device

    @property
    def page_size(self) -> int:
        """Bytes of one page."""
        return self._core.page_size

    @property
    def budget(self) -> int:
        """Bytes of pages that may be in use; a multiple of the page size."""
        return self._core.budget_pages * self._core.page_size

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    def stats(self) -> PoolStats:
        """Counts of this moment. Looks for pages that writes have parted, and changes nothing."""
        counts = self._core.counts()
        size = self._core.page_size
        return PoolStats(
            page_size=size,
            budget=counts.budget_pages * size,
            pages_used=counts.used,
            pages_free=counts.budget_pages - counts.used,
            pages_cached=counts.kept,
            pages_parted=counts.parted,
            pages_quarantined=counts.quarantined,
            pages_lent=counts.lent,
            pages_mapped=counts.mapped,
            pages_needed=counts.needed,
            pages_ahead=0,
            pages_parked=0,
            pages_held=counts.held,
            pages_orphaned=counts.orphaned,
            nbytes_mapped=counts.mapped * size,
            nbytes_reserved=counts.reserved_pages * size,
            tensors=counts.buffers,
            driver_calls=self._core.driver_calls(),
        )

    def prefill(self, nbytes: int) -> None:
        """Makes ``nbytes`` (rounded up to pages) of free pages present, so that growth finds them made.

        Raises:
            OutOfPages: the budget has fewer free.
            Closed: the pool is closed.
        """
        core = self._open_core("Pool.prefill")
        if nbytes < 0:
            raise InvalidArgument(f"[Pool.prefill] nbytes is {nbytes}: it must be at least 0")
        core.prefill(min(-(-nbytes // self.page_size), _MOST_BYTES))

    def trim(self) -> int:
        """Gives the memory of all free pages back to the system. Returns the bytes given back.

        Raises:
            DriverError: the driver refused; what was given back by then stays so.
        """
        return self._core.trim() * self.page_size

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Returns once no page waits to be unmapped.

        Args:
            timeout: seconds. Unmapping happens inside the call, so nothing is waited for yet.

        Raises:
            DriverError: a page could still not be unmapped; it stays counted as held and is tried again.
        """
        if timeout <= 0:
            raise InvalidArgument(f"[Pool.wait_idle] timeout is {timeout}: it must be above 0 seconds")
        self._core.settle()

    def close(self) -> None:
        """Closes the pool's tensors and gives free memory back.

        Pages that views still hold are reported as ``pages_orphaned`` and go with the last view. A second
        call tries again what the driver refused in the first.
        """
        if _core.in_forked_child():
            raise VTensorError(
                "[Pool.close] this process was forked from the one that made the pool: close it there"
            )
        self._closed = True  # nothing new from here on
        core = self._core
        if isinstance(core, _core.ClosedPool):
            core.trim()  # tries again what was refused
            return
        first: BaseException | None = None
        for entry in list(self._tensors):
            try:
                entry.close()
            except VTensorError as error:
                first = first or error
        if first is not None:
            raise first  # what could be closed is; a second call closes the rest
        try:
            core.trim()
        finally:
            self._core = _core.ClosedPool(core)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_core(self, operation: str) -> _core.PagePool:
        core = self._core
        if self._closed or isinstance(core, _core.ClosedPool):
            raise Closed(f"[{operation}] the pool is closed: make a new one")
        return core

    def _register(self, tensor: VTensor) -> None:
        tensor._registered = _Registered(tensor)
        self._tensors.add(tensor._registered)
        if self._closed:  # by another thread, meanwhile
            tensor.close()
            self._open_core("empty")


class _Registered:
    """A pool's way to a tensor. Owned by the tensor, because a WeakSet of tensors would compare them by
    ``==``."""

    def __init__(self, tensor: VTensor) -> None:
        self._tensor = weakref.ref(tensor)

    def close(self) -> None:
        tensor = self._tensor()
        if tensor is not None:
            tensor.close()


def checked_sizes(page_size: int | None, budget: int | None) -> dict[str, int]:
    """``page_size`` and ``budget`` as the core takes them, where 0 asks for the default."""
    if page_size is not None and not 0 < page_size <= _MOST_BYTES:
        raise InvalidArgument(
            f"[Pool] page_size is {page_size} bytes: give a power of two from 4096 (host), or a multiple of "
            "the granularity (CUDA)"
        )
    if budget is not None and not 0 < budget <= _MOST_BYTES:
        raise InvalidArgument(
            f"[Pool] budget is {budget} bytes: it must hold a page and fit in an address space"
        )
    return {"page_size": page_size or 0, "budget": budget or 0}


def zero_policy(zero: str) -> _core.ZeroPolicy:
    """The core's name of a zeroing policy."""
    policies = {
        "never": _core.ZeroPolicy.never,
        "new_owner": _core.ZeroPolicy.new_owner,
        "always": _core.ZeroPolicy.always,
    }
    if zero not in policies:
        raise InvalidArgument(f"[Pool] zero is {zero!r}: it must be one of {', '.join(map(repr, policies))}")
    return policies[zero]


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_default_pools: dict[torch.device, Pool] = {}
_default_pools_lock = threading.Lock()


def default_pool(device: torch.device | str | int = "cpu") -> Pool:
    """The pool that tensors made without ``pool=`` use; one for each device, made when first asked for.

    Raises:
        DriverError: the device's driver is missing or refuses.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    if device.type == "cpu":
        device = torch.device("cpu")
    with _default_pools_lock:
        pool = _default_pools.get(device)
        if pool is None or pool.closed:
            pool = _default_pools[device] = Pool(device)
        return pool


@atexit.register
def _close_pools() -> None:
    if _core.in_forked_child():
        return
    for pool in list(_pools):
        with suppress(VTensorError):  # the process ends: the others are to be closed all the same
            pool.close()
