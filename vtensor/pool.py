"""Page pools: the owners of the physical memory behind tensors that grow."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from operator import call
from typing import Literal, Protocol, TypeVar, get_args

import torch

from vtensor import _core
from vtensor._base.arguments import byte_count, choice, device_of, of_type, seconds, tag_of
from vtensor._base.notebook import Drawn
from vtensor._base.processes import Closes
from vtensor._base.units import Bytes
from vtensor._base.weak import members
from vtensor._pool.adopted import Adopted
from vtensor._pool.closed import ClosedPool
from vtensor._pool.sleep import Image, Sleeper, contents_of, fall_asleep, wake
from vtensor.errors import Closed, DriverError, InvalidArgument, TimedOut, VTensorError

T = TypeVar("T")

_PREFETCH = 64 << 20
_CLOSE_SECONDS = 10.0
_FAREWELL_SECONDS = 0.2

ZeroPolicy = Literal["never", "new_owner", "always"]


@dataclass(frozen=True)
class PoolStats:
    """Counts of a pool at one moment, in pages unless the name says bytes. Its ``repr`` shows eight of them.

    Budget: ``pages_used + pages_free == budget // page_size`` (I5).
    Mappings: ``pages_mapped == pages_active + pages_prefetched + pages_cached + pages_pinned`` (I4); a page
    that two tensors share is mapped twice and used once.

    Attributes:
        page_size: bytes of one page.
        budget: bytes the pool may have in use.
        pages_used: pages in use within the budget.
        pages_free: pages that the budget leaves.
        pages_over: pages beside the budget. The kernel copies a page at a write to a shared one (I6) without
            asking: within the budget as long as pages are free, and then beside it, where they count until
            they are gone. Nothing grows meanwhile.
        pages_spare: free pages with memory: growth takes them first, ``trim()`` gives the memory back.
        pages_private: pages in use, or beside the budget, that the kernel copied at a write to a shared one.
        pages_indexed: references that prefix indices keep on used pages, mapped or not.
        pages_held_by_readers: pages in use that left a tensor, and that readers in other processes may still
            read: until they sync, close or die (see ``vtensor.sharing``).
        pages_mapped: page table entries: a page counts once for each place where it is mapped.
        pages_active: mapped pages that the tensors' lengths need.
        pages_prefetched: mapped pages ahead of need: prepared, or taken over from the last owner.
        pages_cached: mapped pages that freed tensors left for the next one.
        pages_pinned: mapped pages that only views of older extents, or running work, still use.
        pages_orphaned: pinned pages that belong to no open tensor any more and go with their last view.
        sharing: how pages go to readers in other processes: ``"file"`` (all at once, on the host),
            ``"fabric"`` (by CUDA fabric handles), ``"descriptors"`` (one a page, on CUDA), or ``"none"``.
        nbytes_mapped: ``pages_mapped`` in bytes.
        nbytes_held: bytes of used and spare pages, and of those beside the budget: what this pool counts in
            a shared budget.
        nbytes_held_by_others: bytes that the other pools of a shared budget hold; 0 if the budget is not
            shared.
        nbytes_asleep: bytes that :meth:`Pool.sleep` has given back, and :meth:`Pool.wake` will take. They
            count nowhere else.
        nbytes_reserved: bytes of addresses reserved; they cost no memory.
        nbytes_by_tag: bytes that allocations take, by the ``tag`` of :func:`vtensor.memory` or
            :func:`vtensor.adopt`; 0 while they sleep.
        tensors: open tensors, caches and arenas.
        growths_ready: growths into new pages, since the pool was made, that found them ready and made no
            driver call.
        growths_mapped: growths into new pages that had to map them.
        pages_recycled: pages taken that had memory.
        pages_fresh: pages taken whose memory had to be made.
        tensors_reused: tensors that began on the mapped pages of a freed one of their shape.
        tensors_fresh: tensors that began with nothing mapped.
        driver_calls: calls so far, by thread (``"caller"`` and ``"mapper"``) and name.
    """

    page_size: int = field(repr=False)
    budget: int
    pages_used: int
    pages_free: int
    pages_over: int = field(repr=False)
    pages_spare: int = field(repr=False)
    pages_private: int = field(repr=False)
    pages_indexed: int = field(repr=False)
    pages_held_by_readers: int = field(repr=False)
    pages_mapped: int
    pages_active: int
    pages_prefetched: int
    pages_cached: int
    pages_pinned: int
    pages_orphaned: int = field(repr=False)
    sharing: str = field(repr=False)
    nbytes_mapped: int = field(repr=False)
    nbytes_held: int = field(repr=False)
    nbytes_held_by_others: int = field(repr=False)
    nbytes_asleep: int = field(repr=False)
    nbytes_reserved: int = field(repr=False)
    nbytes_by_tag: dict[str, int] = field(repr=False)
    tensors: int = field(repr=False)
    growths_ready: int = field(repr=False)
    growths_mapped: int = field(repr=False)
    pages_recycled: int = field(repr=False)
    pages_fresh: int = field(repr=False)
    tensors_reused: int = field(repr=False)
    tensors_fresh: int = field(repr=False)
    driver_calls: dict[str, dict[str, int]] = field(repr=False)


class Pool(Closes, Drawn):
    """The physical pages of one device, behind the tensors made with ``pool=``.

    Bytes are whole numbers, or text such as ``"40GiB"``, ``"512MiB"``, ``"64KiB"``.

    Args:
        device: ``"cpu"`` (memfd and mmap), or a CUDA device (CUDA virtual memory management).
        page_size: bytes; the unit of mapping. Host: a power of two from 4 KiB, 64 KiB unless given. CUDA: a
            multiple of the device's granularity, 2 MiB unless given.
        budget: bytes of pages that may be in use. Unless given, 80% of the free memory of the machine or its
            cgroup (host), or 90% of the free device memory (CUDA), less what other pools of this process may
            still take, and never below a sixteenth of that. Pools of other processes do not count.
        zero: when a reused page is zeroed: ``"new_owner"`` (before another tensor sees it), ``"always"``, or
            ``"never"`` (tensors may then see what others left).
        prefetch: the most bytes mapped ahead of need for each tensor; 64 MiB unless given. Within it a
            tensor gets what its rate of growth asks for, but at most a sixteenth of what it stores, or 1 MiB
            if that is more. With 0 the pool's mapper runs only for :meth:`VTensor.prepare` and for what must
            wait for the device.
        cache: the most bytes that freed tensors leave mapped for the next tensor of the same shape, which
            then begins without a driver call; a quarter of the budget unless given, and 0 if ``prefetch`` is
            0.
        spare: the most bytes of spare pages (free, with memory) to keep; no limit unless given. The mapper
            gives others back to the system.
        device_reserve: bytes of the device's memory that are left to others: growth that would use them
            raises ``OutOfPages``.
        shared_budget: a name. All pools of this name, in all processes of this user on this machine, have one
            budget together, and each of them may reach it. One may take what another frees, and a killed
            process gives back what its pools had. They must name the same ``budget``.
        shareable: other processes can read what is in the pool, as ``vtensor.sharing`` says: a tensor is
            put in a queue of ``multiprocessing`` or ``torch.multiprocessing``. A process that gets one
            tensor of the pool can read all of its memory, so what is not for the same readers belongs in
            another pool. ``stats().sharing`` says how its pages go to another process.
        rdma: CUDA: network adapters can be given the memory (GPUDirect RDMA). Pages that forks share are then
            not mapped read-only, because drivers refuse to share such memory once more: call
            :meth:`VTensor.unshare` before a write by other means than the tensor's own methods.

    Raises:
        InvalidArgument: a page size, budget, name or policy that makes no sense, a budget other than the one
            that pools of the name have, or ``rdma`` on a device without it.
        VTensorError: pools of the name belong to another version of vtensor, or there are 128 of them.
        TimedOut: a stopped process has the shared budget locked.
        DriverError: the driver is missing or refuses; ``call`` and ``name`` say which call and why.
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        page_size: Bytes | None = None,
        budget: Bytes | None = None,
        zero: ZeroPolicy = "new_owner",
        prefetch: Bytes | None = None,
        cache: Bytes | None = None,
        spare: Bytes | None = None,
        device_reserve: Bytes = 0,
        shared_budget: str | None = None,
        shareable: bool = False,
        rdma: bool = False,
    ) -> None:
        device = device_of("Pool", device)
        size = checked_page_size(page_size)
        options = pool_options(
            budget, zero, prefetch, cache, spare, device_reserve, shared_budget=shared_budget
        )
        if device.type == "cpu":
            if rdma:
                raise InvalidArgument("[Pool] rdma is for memory of a CUDA device: leave it out for the CPU")
            core = _core.host_pool(page_size=size, options=options, shareable=bool(shareable))
        elif device.type == "cuda":
            index = device.index
            if index is None:
                index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
            device = torch.device("cuda", index)
            core = _core.cuda_pool(
                index, page_size=size, options=options, shareable=bool(shareable), rdma=bool(rdma)
            )
        else:
            raise InvalidArgument(f"[Pool] device is {device}: vtensor has drivers for cpu and cuda")
        self._attach(core, device)

    @classmethod
    def _over(cls, core: _core.PagePool, device: torch.device) -> Pool:
        pool = cls.__new__(cls)
        pool._attach(core, device)
        return pool

    def _attach(self, core: _core.PagePool, device: torch.device) -> None:
        self._core: _core.PagePool | ClosedPool = core
        self._device = device
        # A simulated device's memory is the host's.
        self._tensor_device = torch.device("cpu") if core.device[0] == 1 else device
        # By id: a WeakSet would compare tensors by ==.
        self._tensors: weakref.WeakValueDictionary[int, _Tensor] = weakref.WeakValueDictionary()
        self._heaps: dict[str, Heap] = {}
        self._asleep: list[Image] = []
        self._sleep_lock = threading.RLock()  # reentrant: a signal handler may ask while memory falls asleep
        self._closed = False
        # Pages that freed tensors left cached would keep the pool alive without an owner.
        self._retired = weakref.finalize(self, _retire, core)
        self._retired.atexit = False
        _pools.add(self)

    def __repr__(self) -> str:
        tags = ", ".join(sorted({image.tag for image in self._asleep}))
        state = f", asleep: {tags}" if tags else ""
        if self._closed or self.broken is not None:
            state = " closed" if self._closed else ", broken"
        return f"<vtensor.Pool {self._device}, {self.budget:,} bytes in pages of {self.page_size:,}{state}>"

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self._device

    @property
    def page_size(self) -> int:
        """Bytes of one page."""
        return self._core.page_size

    @property
    def budget(self) -> int:
        """Bytes of pages that may be in use; a multiple of the page size. It can be raised and lowered at any
        time: lowering takes back what is cached, prefetched and spare. A shared budget cannot be set.

        Raises:
            OutOfPages: on setting, if more is in use; nothing is changed then.
            InvalidArgument: on setting, if the budget is shared.
        """
        return self._core.budget_pages * self._core.page_size

    @budget.setter
    def budget(self, value: Bytes) -> None:
        self._open_core("Pool.budget").set_budget(byte_count("Pool.budget", "budget", value, 1))

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    @property
    def broken(self) -> str | None:
        """Why the pool is broken; ``None`` if it is not.

        The driver refused to replace pages that a fork shares, that ``reindex`` moves or that fall asleep or
        wake, and then refused to put the old ones back (I8). Such a pool maps and unmaps nothing more, and
        each operation on what is in it raises a :class:`DriverError` of these words. Tensors and views stay
        readable, but for those pages. ``stats()`` and ``close()`` work. What it holds stays charged until it
        is closed and the last view is gone. Other pools go on, also of a shared budget, and
        :func:`default_pool` makes another one.
        """
        return self._core.broken

    def stats(self) -> PoolStats:
        """Counts of this moment. Looks for pages that writes have copied, and changes nothing."""
        counts = self._core.counts()
        events = self._core.events()
        size = self._core.page_size
        used = min(counts.used, counts.budget_pages)
        return PoolStats(
            page_size=size,
            budget=counts.budget_pages * size,
            pages_used=used,
            pages_free=counts.budget_pages - used,
            pages_over=counts.used - used,
            pages_spare=counts.spare,
            pages_private=counts.private_copies,
            pages_indexed=counts.in_page_sets,
            pages_held_by_readers=counts.held_by_readers,
            pages_mapped=counts.mapped,
            pages_active=counts.active,
            pages_prefetched=counts.prefetched,
            pages_cached=counts.cached,
            pages_pinned=counts.pinned,
            pages_orphaned=counts.orphaned,
            sharing=self._core.sharing,
            nbytes_mapped=counts.mapped * size,
            nbytes_held=(counts.used + counts.spare) * size,
            nbytes_held_by_others=counts.held_elsewhere,
            nbytes_asleep=counts.asleep * size,
            nbytes_reserved=counts.reserved_pages * size,
            nbytes_by_tag=self._nbytes_by_tag(),
            tensors=counts.buffers,
            growths_ready=events.growths_ready,
            growths_mapped=events.growths_mapped,
            pages_recycled=events.pages_recycled,
            pages_fresh=events.pages_fresh,
            tensors_reused=events.tensors_reused,
            tensors_fresh=events.tensors_fresh,
            driver_calls=self._core.driver_calls(),
        )

    def trim(self) -> int:
        """Gives spare pages back to the system: free ones that have memory, and those that freed tensors,
        slots and arenas left mapped for the next. Returns the bytes given back.

        Raises:
            DriverError: the driver refused; what was given back by then stays so.
        """
        return self._core.trim() * self.page_size

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Waits until nothing is left to do in the background: prepared pages are ready, no page waits to be
        unmapped, no more pages are spare than ``spare``, and swapped slots are copied.

        Args:
            timeout: seconds.

        Raises:
            DriverError: a page could still not be unmapped: it stays counted as pinned, and is tried again.
                Or an error of the mapper for some tensor, raised once.
            TimedOut: work on the device that may use the pages has not ended.
        """
        timeout = seconds("Pool.wait_idle", "timeout", timeout)
        until = time.monotonic() + timeout
        self._core.wait_idle(timeout)
        for t in self._each_tensor():
            wait = getattr(type(t), "_await_arrivals", None)  # of a cache: all copies to its slots
            if wait is not None and not wait(t, until - time.monotonic()):
                raise TimedOut(
                    f"[Pool.wait_idle] timed out after {timeout:g} s: slots of a cache are still being "
                    "copied from host memory; they stay as they are"
                )

    def sleep(self, *, contents: str | os.PathLike[str], tag: str | None = None) -> int:
        """Gives the memory behind tensors and caches back, and keeps all else about them: addresses, shapes,
        views, forks, captured graphs.

        torch does not know that plain tensors over the pool (views, adopted weights) sleep. On the CPU they
        read as zeros, and a write to them ends the process; on CUDA kernels that touch them fault. So the
        modules and optimizers that :func:`vtensor.adopt` moved refuse their forward pass, their step and
        their state dicts meanwhile. Nothing refuses a read of ``module.weight`` itself, or a forward pass
        that ``torch.compile`` or ``torch.jit.script`` has compiled.

        Until :meth:`wake`, operations that need the memory raise :class:`vtensor.Asleep`, and so do torch's
        on a VTensor. Lengths and counts can be read, and what sleeps can be closed. Cached and prefetched
        pages go too, and so do the prefixes that a cache keeps for later requests. Pages that are shared with
        something that is awake stay. Whole or nothing.

        Args:
            contents: ``"host"``: kept in host memory; a folder: kept in a temporary file there, which has no
                name; ``"discard"``: lost, reads as zeros after waking. There is no default.
            tag: what to put to sleep; all unless given. A tag of :func:`vtensor.adopt`
                (``"weights"`` unless given), :func:`vtensor.memory`, :func:`vtensor.empty` (``"tensors"``),
                :class:`KVCache` or :class:`Arena` (``"kv"``).

        Returns:
            The bytes given back; 0 if all sleep already.

        Raises:
            InvalidArgument: nothing has this tag; or the folder does not exist; or K and V of slots in use
                would be discarded.
            TimedOut: work that may use the memory, or a lease, has not ended.
            OutOfPages: the host has no memory for the contents; or pages that the kernel copied for forks
                need handles of their own first.
            DriverError: the driver refuses a call.
            OSError: the folder has no space, or cannot be written. In all cases everything is awake, as it
                was.
        """
        core = self._open_core("Pool.sleep")
        kept = contents_of(contents)
        with self._sleep_lock:
            by_tag = self._sleepers()
            if tag is not None:
                if tag_of("Pool.sleep", tag) not in by_tag:
                    raise _no_such_tag("sleep", tag, by_tag)
                by_tag = {tag: by_tag[tag]}
            return fall_asleep(core, by_tag, kept, self._asleep) * self.page_size

    def wake(self, *, tag: str | None = None, discard: bool = False) -> None:
        """Gives what sleeps its memory and contents again, at the same addresses. Whole or nothing.

        Args:
            tag: the tag of what is to wake; all unless given.
            discard: give up the kept contents: as if ``contents`` had been ``"discard"``.

        Raises:
            InvalidArgument: nothing has this tag.
            OutOfPages: the pool has too few pages; the message says how many are missing. All stays asleep.
            OSError: the temporary file cannot be read; all stays asleep.
            DriverError: the driver refuses a call; all stays asleep.
        """
        core = self._open_core("Pool.wake")
        with self._sleep_lock:
            chosen = [image for image in self._asleep if tag is None or image.tag == tag]
            if chosen:
                wake(core, self._asleep, chosen, discard)
            elif tag is not None and tag_of("Pool.wake", tag) not in (there := self._sleepers()):
                raise _no_such_tag("wake", tag, there)

    def _sleepers(self) -> dict[str, list[Sleeper]]:
        """The objects whose memory can leave, by tag."""
        by_tag: dict[str, list[Sleeper]] = {}
        for t in self._each_tensor():
            if not t.closed:
                by_tag.setdefault(t._sleeps_as, []).append(t)
        for tag, heap in self._each_heap():
            by_tag.setdefault(tag, []).append(heap)
        return by_tag

    def close(self) -> None:
        """Closes the pool's tensors and gives free memory back.

        Pages that views still hold are counted as ``pages_orphaned`` and go with the last view. A second call
        tries again what the driver refused in the first. All memory of a broken pool goes with the last view.
        """
        _core.refuse_in_forked_child("Pool.close")
        self._close(_CLOSE_SECONDS)

    def _close(self, seconds: float) -> None:
        """As ``close``; waits at most ``seconds`` for pages that the device still uses."""
        core = self._core
        if isinstance(core, ClosedPool):
            core.trim()  # tries again what was refused
            return
        was_closed = self._closed  # an earlier call was refused
        try:
            self._closed = True  # nothing new from here on
            self._close_tensors()
            self._close_heaps()
            self._asleep.clear()
        except VTensorError:
            raise  # what could be closed is; a second call closes the rest
        except BaseException:  # from outside (I17): the pool is as before, and so are the tensors still open
            self._closed = was_closed
            raise
        core.retire()
        try:
            if core.broken is None:
                # Pages that the device still uses, or that the driver refuses to unmap, stay.
                with suppress(TimedOut, DriverError):
                    core.wait_idle(seconds)
                core.trim()
        finally:
            self._retired.detach()
            closed = self._core = ClosedPool(core)
            del core
            closed.leave_mapper()  # the mapper may have the last reference to the pool

    def _close_tensors(self) -> None:
        """Closes as many as it can, and then raises the first refusal."""
        first: VTensorError | None = None
        for t in self._each_tensor():
            try:
                t.close()
            except VTensorError as error:
                first = first or error
        if first is not None:
            raise first

    def _heap(self, operation: str, tag: str) -> Heap:
        with _heaps_lock:
            core = self._open_core(operation)
            heap = self._heaps.get(tag)
            if heap is None:
                heap = self._heaps[tag] = Heap(_core.HeapCore(core), Adopted())
            return heap

    def _each_heap(self) -> list[tuple[str, Heap]]:
        with _heaps_lock:
            return list(self._heaps.items())

    def _nbytes_by_tag(self) -> dict[str, int]:
        found = {}
        for tag, heap in self._each_heap():
            with suppress(Closed):  # another thread closed it
                found[tag] = 0 if heap.core.asleep else heap.core.counts().allocated
        return found

    def _close_heaps(self) -> None:
        with _heaps_lock:
            heaps = list(self._heaps.values())
            for heap in heaps:
                heap.torch_pool = None  # its end gives back what torch has cached
            # In one call of C: an exception from outside leaves no open heap that the pool has forgotten, and
            # no closed one that it still has (I17).
            deque(map(call, [*(heap.core.close for heap in heaps), self._heaps.clear]), maxlen=0)

    def _open_core(self, operation: str) -> _core.PagePool:
        _core.refuse_in_forked_child(operation)
        core = self._core
        if self._closed or isinstance(core, ClosedPool):
            raise Closed(f"[{operation}] the pool is closed: make a new one")
        core.raise_if_broken()
        return core

    def _register(self, tensor: _Tensor) -> None:
        tensor._made_at = made_at()
        self._tensors[id(tensor)] = tensor
        if self._closed:  # by another thread, which may be interrupted and leave the pool open
            tensor.close()
            raise Closed("[empty] the pool is being closed by another thread: make a new one")

    def _each_tensor(self) -> Iterator[_Tensor]:
        """One at a time, so that none is kept that is dropped meanwhile. Others may be made meanwhile."""
        for known in self._tensors.valuerefs():
            tensor = known()
            if tensor is not None:
                yield tensor
            del tensor


def _no_such_tag(operation: str, tag: object, by_tag: dict[str, list[Sleeper]]) -> InvalidArgument:
    there = ", ".join(map(repr, by_tag)) or "nothing"
    return InvalidArgument(f"[Pool.{operation}] nothing in the pool has tag {tag!r}: there is {there}")


def _retire(core: _core.PagePool) -> None:
    if not _core.in_forked_child():
        core.retire()


class _Tensor(Sleeper, Protocol):
    """An object that uses a pool's pages and ends with the pool: a VTensor, a KVCache or an Arena."""

    _made_at: str
    _sleeps_as: str

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Heap:
    """Memory of one tag in a pool, for allocations of any size."""

    core: _core.HeapCore
    adopted: Adopted
    torch_pool: object = None
    """The ``torch.cuda.MemPool`` over it, once there is one."""
    _made_at: str = field(default_factory=lambda: made_at())

    def _fall_asleep(self, sleep: _core.FallAsleep, discard: bool) -> None:
        if not self.core.asleep:
            self.core.fall_asleep(sleep)
            if self.core.asleep:
                self.adopted.refuse()

    def _wake(self) -> None:
        if not self.core.asleep:
            self.adopted.let_go()


notes_makers = False
"""Whether the place in the program where an object is made is noted: once something looks for leaks."""


def made_at() -> str:
    """The line outside vtensor that called it; empty unless :data:`notes_makers`."""
    if not notes_makers:
        return ""
    frame = sys._getframe(1)
    inner = ("vtensor", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def checked_page_size(page_size: Bytes | None) -> int:
    """The page size as the core takes it: 0 asks for the default."""
    return 0 if page_size is None else byte_count("Pool", "page_size", page_size, 4096)


def pool_options(
    budget: Bytes | None = None,
    zero: str = "new_owner",
    prefetch: Bytes | None = 0,
    cache: Bytes | None = None,
    spare: Bytes | None = None,
    device_reserve: Bytes = 0,
    patience: float = 60.0,
    shared_budget: str | None = None,
) -> _core.PoolOptions:
    """The core's options, from those of :class:`Pool`; ``patience`` is the bound of its waits, in seconds."""
    if shared_budget is not None:
        named = isinstance(shared_budget, str) and shared_budget.isascii() and shared_budget.isprintable()
        if not named or not shared_budget:
            raise InvalidArgument(
                f"[Pool] shared_budget is {shared_budget!r}: give the name of a shared budget, in ASCII, or "
                "None"
            )
        if budget is None:
            raise InvalidArgument(
                f"[Pool] shared_budget is {shared_budget!r} and budget is not given: name the budget of all "
                "pools together"
            )
    policy = choice("Pool", "zero", zero, get_args(ZeroPolicy))
    prefetch = _PREFETCH if prefetch is None else byte_count("Pool", "prefetch", prefetch)
    if cache is None:
        cache = 0 if prefetch == 0 else _core.CACHE_BY_BUDGET
    else:
        cache = byte_count("Pool", "cache", cache)
    return _core.PoolOptions(
        budget=0 if budget is None else byte_count("Pool", "budget", budget, 1),
        shared_budget=shared_budget or "",
        zero=getattr(_core.ZeroPolicy, policy),
        prefetch=prefetch,
        cache=cache,
        spare=_core.NO_LIMIT if spare is None else byte_count("Pool", "spare", spare),
        device_reserve=byte_count("Pool", "device_reserve", device_reserve),
        patience=seconds("Pool", "patience", patience),
    )


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_heaps_lock = threading.RLock()  # reentrant: a finalizer may ask while a heap is being made
_default_pools: dict[torch.device, Pool] = {}
_default_pools_lock = threading.RLock()  # reentrant: a finalizer may ask while a pool is being made


def _renew_locks() -> None:
    """A thread of the parent of this forked child may have had them."""
    global _heaps_lock, _default_pools_lock
    _heaps_lock, _default_pools_lock = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def default_pool(device: torch.device | str | int = "cpu") -> Pool:
    """The pool that tensors made without ``pool=`` use; one for each device, made when first asked for, and
    anew when that is closed or broken.

    Raises:
        DriverError: the device's driver is missing or refuses.
    """
    device = device_of("default_pool", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    if device.type == "cpu":
        device = torch.device("cpu")
    _core.refuse_in_forked_child("default_pool")
    with _default_pools_lock:
        pool = _default_pools.get(device)
        if pool is None or pool.closed or pool.broken is not None:
            _default_pools.pop(device, None)
            pool = _default_pools.setdefault(device, Pool(device))  # a finalizer's, if that was first
        return pool


def pool_of(operation: str, pool: Pool | None, device: torch.device | str | int | None) -> Pool:
    """``pool``, after a check that it is on ``device`` if both are given; else the device's default pool.

    Without either, the device is torch's default device.
    """
    if pool is None:
        return default_pool(torch.get_default_device() if device is None else device)
    of_type(operation, "pool", pool, Pool)
    if device is not None:
        on = device_of(operation, device)
        if on.type != pool.device.type or on.index not in (None, pool.device.index or 0):
            raise InvalidArgument(
                f"[{operation}] device is {on} and the pool is on {pool.device}: leave one of them out"
            )
    return pool


def open_pools() -> list[Pool]:
    """The pools of this process that were not collected."""
    return members(_pools)


def while_awake(work: Callable[[], T]) -> T:
    """Does ``work``. Meanwhile no other thread puts memory of a pool to sleep, or wakes it."""
    locks = [pool._sleep_lock for pool in sorted(open_pools(), key=id) if not pool.closed]
    return _holding(locks, work)


def _holding(locks: Sequence[AbstractContextManager[object]], work: Callable[[], T]) -> T:
    """By a ``with`` for each, which nothing interrupts on its way out (I17)."""
    if not locks:
        return work()
    with locks[0]:
        return _holding(locks[1:], work)


@atexit.register
def _close_pools() -> None:
    if _core.in_forked_child():
        return
    until = time.monotonic() + _CLOSE_SECONDS
    pools = [pool for pool in open_pools() if not pool.closed]
    # A daemon thread may be inside torch with memory of a pool, and torch has let the interpreter's lock go.
    in_use = len(sys._current_frames()) > 1
    for pool in pools:
        if in_use and isinstance(pool._core, _core.PagePool):
            pool._core.keep_mapped()
        with suppress(VTensorError):  # the process ends: close the others all the same
            pool._close(max(0.001, until - time.monotonic()))
    _core.leave_budgets()
    # Operations of daemon threads have just raised Closed, and the threads drop tensors on their way out. A
    # thread that comes back from torch to an interpreter that has ended aborts the process (before Python
    # 3.14).
    until = time.monotonic() + _FAREWELL_SECONDS
    while pools and threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.001)
