"""Memory that other processes read while it grows, without a copy.

A :class:`~vtensor.VTensor` of a pool made with ``shareable=True`` goes through a queue, a pipe or a process's
arguments of :mod:`multiprocessing` or :mod:`torch.multiprocessing`. What arrives is a :class:`Reader` over
the same physical pages::

    pool = vtensor.Pool("cpu", shareable=True)
    k = vtensor.empty(1, 0, 8, 128, grow_dim=1, capacity=131072, pool=pool)
    queue.put(k)

    reader = queue.get()   # in the other process
    k.append(new)          # in the first one
    reader.sync()          # True if something changed: reader.length is now the writer's

The writer keeps its page table and its length in memory that both map, and a reader looks there when it
syncs. On a GPU it then also asks the writer, which answers once its work on the device has ended. A page that
a reader may see is not reused before that reader syncs, closes or dies (epoch-based reclamation, by a version
that each reader holds).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from multiprocessing import context, reduction
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn, cast

import torch

from vtensor import _core
from vtensor._base.arguments import bytes_spanned, of_type
from vtensor._base.processes import Closes, StaysHere
from vtensor._base.streams import Stream, stream_handle
from vtensor._base.torch_modes import without_modes
from vtensor._base.units import byte_text
from vtensor._torch.memory import heaps_of, open_for_readers
from vtensor._torch.variants import AsleepVTensor, CopyOnWriteVTensor, name_of, refuse_in_forked_child
from vtensor.arena import Arena
from vtensor.errors import Closed, InvalidArgument, VTensorError
from vtensor.kv import KVCache
from vtensor.tensor import PageRecord, TensorCore, VTensor

ReaderCore = _core.ReaderCore

# What a reader refuses, by what to do instead. The harmless methods write nothing, although they end in "_".
_HARMLESS = {"requires_grad_", "detach_", "share_memory_"}
_IN_PLACE = {
    name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")
} - _HARMLESS
_OPERATORS = "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
_REFUSED = {
    "call it in the process that writes": (
        "extend prepare append shrink truncate reallocate fork unshare reindex".split()
    ),
    "write to a copy, x.clone()": [*_IN_PLACE, *(f"__{name}__" for name in _OPERATORS.split())],
}


class _View(NamedTuple):
    """Where a tensor lies in one of the ranges that are sent."""

    range: int
    offset: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, number: int, base: int) -> _View:
        offset = max(0, tensor.data_ptr() - base)
        return cls(number, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def over(self, core: ReaderCore) -> torch.Tensor:
        """The tensor, in its range as it was received; refused if it passes it. Its storage has its bytes
        alone."""
        item = self.dtype.itemsize
        nbytes = bytes_spanned(self.sizes, self.strides, item)
        inside = 0 <= self.offset <= self.offset + nbytes <= core.bytes(self.range)
        if self.offset % item or min(self.strides, default=0) < 0 or not inside:
            raise VTensorError("[reader] what was received does not fit its range: send it again")
        storage = cast(torch.UntypedStorage, core.storage(self.range, self.offset, nbytes))
        with without_modes():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            return tensor.set_(storage, 0, self.sizes, self.strides)  # type: ignore[call-overload, no-any-return]


class Reader(VTensor):
    """A VTensor whose memory another process writes. It reads, and follows the writer at :meth:`sync`.

    What it shows changes in :meth:`sync` alone, but for bytes that the writer changes in place. Kernels take
    it as they take any VTensor. A write to it is refused, or ends the process with a report where torch does
    not let us refuse it: through a view, or as ``out=``.
    """

    # Of its own: in a forked child that of VTensor refuses, and a reader may be received there.
    __torch_function__ = torch._C._disabled_torch_function_impl

    when_full: Any = "raise"
    _core: ReaderCore  # type: ignore[assignment]
    _whole: torch.Tensor  # of the tensor's capacity
    _grow_dim: int
    _lock: threading.RLock  # of what changes the tensor; reentrant: a finalizer may close it in a sync

    def sync(self) -> bool:
        """Shows what the writer has now. True if that is anything new.

        Reads shared memory. It maps what is new in one batch, and makes no system call if nothing is, but for
        a look every 50 ms at whether the writer lives. On a GPU, if anything is new, it waits until the work
        that the writer has launched has ended, and before pages go until the caller's has.

        Raises:
            Closed: the writer has closed the tensor, moved it (``reallocate``, ``when_full="move"``) or
                ended. What was read last stays readable.
            Asleep: the writer's pool has put the tensor to sleep.
            TimedOut: the writer was stopped, or work on the device does not end.
            DriverError: the system refused to map a page. The length is as before.
            VTensorError: the writer hands no pages over; the message says why.
        """
        changed = False
        with self._lock:
            try:
                changed = ReaderCore.sync(self._core)
            finally:
                begin, end = self._core.words  # also where pages could not be unmapped
                if (begin, end - begin) != (self._begin, self.length):
                    self._show(begin, end)
                    changed = True
        return changed

    def _show(self, begin: int, end: int) -> None:
        whole, dim = self._whole, self._grow_dim
        sizes, strides = [*whole.shape], whole.stride()
        sizes[dim] = end - begin
        with without_modes():
            torch.Tensor.set_(self, whole.untyped_storage(), begin * strides[dim], sizes, strides)  # type: ignore[call-overload]

    @property
    def _begin(self) -> int:
        return self.storage_offset() // self._whole.stride(self._grow_dim)

    # -- reading

    def alias(self) -> torch.Tensor:
        with without_modes():
            return self.detach()

    def numpy(self, *, force: bool = False) -> Any:
        """As :meth:`VTensor.numpy`, but the array cannot be written to."""
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array

    def pages(self) -> list[PageRecord]:
        return ReaderCore.pages(self._core, 0, self._whole.shape[: self._grow_dim].numel())

    @property
    def length(self) -> int:
        return self.shape[self._grow_dim]

    @property
    def capacity(self) -> int:
        return self._whole.shape[self._grow_dim]

    @property
    def grow_dim(self) -> int:
        return self._grow_dim

    @property
    def pool(self) -> NoReturn:
        """Raises VTensorError: the pool is the writer's."""
        raise VTensorError("[Reader.pool] the pages belong to a pool of the process that writes: ask there")

    @property
    def address(self) -> int:
        return self._whole.data_ptr() + int(self.storage_offset()) * self.itemsize

    @property
    def nbytes_mapped(self) -> int:
        return self._core.mapped(0) * self._core.page_size

    @property
    def nbytes_reserved(self) -> int:
        return self._core.bytes(0)

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Work launched in ``stream`` reads the tensor: pages are unmapped after it, in :meth:`sync` and
        :meth:`close`. The stream that is current at a :meth:`sync` counts without this. Nothing on the host.
        """
        handle = stream_handle("Reader.record_stream", stream)
        if handle is None:
            raise InvalidArgument("[Reader.record_stream] stream is None: name one")
        ReaderCore.record_stream(self._core, handle)

    # -- the end

    def close(self, stream: object = None) -> None:
        """Lets the writer reuse what only this reader still read, once the last view of it is gone.

        ``stream`` is ignored, as on the host in :meth:`VTensor.close`. A second call does nothing.
        """
        with self._lock:
            self.__class__ = _ClosedReader
            with without_modes(), torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.set_(self, torch.UntypedStorage(0, device=self.device), 0, [0], [1])
            self.__dict__.pop("_whole", None)
            ReaderCore.close(self._core)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.closed:
            return "<Reader, closed>"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"<Reader {list(self.shape)} {dtype} on {self.device}, {self.length:,} of {self.capacity:,} "
            f"positions along dim {self.grow_dim}, {byte_text(self.nbytes_mapped)} of another process mapped>"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        shown = repr(self)
        return {"text/plain": shown, "text/html": f"<code>{shown.replace('<', '&lt;')}</code>"}


class _ParentsReader(Reader):
    """A reader that a forked child has of its parent."""

    __torch_function__ = classmethod(refuse_in_forked_child)  # type: ignore[assignment]

    def _refuse(self, *arguments: object, **named: object) -> Any:
        _core.refuse_in_forked_child("reader")

    alias = close = sync = _refuse

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<Reader of the parent process>"


_readers: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()  # by id


def _leave_to_parent() -> None:
    for reader in list(_readers.values()):
        reader.__class__ = _ParentsReader
    _readers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class _ClosedReader(Reader):
    closed = True  # also where the core has still to close, in another call

    def _refuse(self, *arguments: object) -> NoReturn:
        raise Closed("[Reader] the reader is closed: receive the tensor again")

    alias = pages = sync = _refuse
    _whole = property(_refuse)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise Closed(f"[{name_of(func)}] the reader is closed: receive the tensor again")


def _refuse(name: str, instead: str) -> Any:
    def refused(self: Reader, *args: Any, **kwargs: Any) -> NoReturn:
        raise VTensorError(
            f"[Reader.{name}] this memory belongs to another process, and a reader reads: {instead}"
        )

    refused.__name__ = name
    refused.__doc__ = f"Raises VTensorError: a reader reads. {instead[0].upper()}{instead[1:]}."
    return refused


for _instead, _names in _REFUSED.items():
    for _name in _names:
        setattr(Reader, _name, _refuse(_name, _instead))


# -- handing over

# A simulated libcuda to read over, for tests; empty: the system's.
cuda_library = ""

_Sent = list[Any]  # descriptors of the pool's memory, and of each range, by multiprocessing's own means


def _send(files: _core.ReaderFiles) -> _Sent:
    sent = [reduction.DupFd(descriptor) for descriptor in files.descriptors]
    child = context.get_spawning_popen()
    if child is not None:
        weakref.finalize(child, files.close)  # the child gets these very ones, when it starts
    return sent


def _receive(sent: _Sent, words: int) -> ReaderCore:
    files = _core.ReaderFiles()
    try:
        list(map(files.take, map(methodcaller("detach"), sent)))  # in one call of C (I17)
    except (OSError, EOFError, RuntimeError) as error:  # a loop that receives would take EOFError for its end
        raise VTensorError(
            f"[reader] the memory did not arrive ({error!r}): receive once what was sent, while its sender "
            "lives, and raise the limit on descriptors (ulimit -n)"
        ) from None
    return ReaderCore.received(files, words, cuda_library)


def _reduce(tensor: VTensor) -> Any:
    core = tensor._core
    # Opened first: a tensor that then moves is refused as it arrives. Multiprocessing's own descriptors stay
    # until they are received, so they come last: a tensor that then closes has none yet.
    files = TensorCore.open_for_readers(core, tensor)
    sizes = [*tensor.shape]
    sizes[core.grow_dim] = core.capacity
    view = _View(0, core.phase, tuple(sizes), tensor.stride(), core.dtype)
    return _rebuild, (_send(files), view, core.grow_dim)


def _rebuild(sent: _Sent, view: _View, grow_dim: int) -> Reader:
    core = _receive(sent, 2)
    whole = view.over(core)
    with without_modes():
        reader = torch.empty(0, dtype=view.dtype, device=whole.device).as_subclass(Reader)
    reader._core, reader._whole, reader._grow_dim = core, whole, grow_dim
    reader._lock = threading.RLock()
    reader._show(*core.words)
    _readers[id(reader)] = reader
    return reader


# -- objects that have tensors: their readers have views, which never change


class ObjectReader(Closes):
    """What another process reads of an object: plain tensors that :meth:`sync` does not replace.

    They have their full size from the beginning. Where the writer has nothing they read as zeros, or fault on
    a GPU. Writing to one ends the process.
    """

    _core: ReaderCore
    _tensors: dict[Any, torch.Tensor]
    _instead = "send what it reads, from the process that writes, or copies of tensors, x.clone()"

    def __init__(self) -> None:
        raise InvalidArgument(
            f"[{type(self).__name__}] take it out of a queue or a pipe into which the writer puts the object"
        )

    def sync(self) -> bool:
        """As :meth:`Reader.sync`."""
        return ReaderCore.sync(self._core)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._core.closed

    def close(self) -> None:
        """As :meth:`Reader.close`."""
        ReaderCore.close(self._core, self._tensors)

    def __repr__(self) -> str:
        core = self._core
        if core.closed or core.left_behind:
            return f"<{type(self).__name__}{', closed' if core.closed else ' of the parent process'}>"
        mapped = sum(map(core.mapped, range(core.ranges))) * core.page_size
        tensors = f"{len(self._tensors)} tensor{'s' * (len(self._tensors) != 1)}"
        return f"<{type(self).__name__} of {tensors}, {byte_text(mapped)} of another process mapped>"

    @property
    def _shown(self) -> dict[Any, torch.Tensor]:
        ReaderCore.require_open(self._core)
        return self._tensors


class ArenaReader(ObjectReader):
    """Reads an :class:`~vtensor.Arena`."""

    @property
    def tensor(self) -> torch.Tensor:
        """The range as a ``uint8`` tensor ``[nbytes]``. On the host, unmapped blocks read as zeros."""
        return self._shown["tensor"]


class ModuleReader(ObjectReader):
    """Reads the tensors of a module that :func:`~vtensor.adopt` moved into a pool."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, as ``load_state_dict(..., assign=True)`` takes them: those of the
        module's own ``state_dict()``, so none that is not persistent, and no extra state."""
        return dict(self._shown)


class CacheReader(ObjectReader):
    """Reads a :class:`~vtensor.KVCache`: whole steps."""

    @property
    def lengths(self) -> list[int]:
        """The tokens of each slot, as last synced: 0 if it is free, swapped out in any band, or still being
        filled from a prefix or from host memory. Before what its window sees, a layer reads zeros or older
        bytes of the slot on the host."""
        return self._core.words

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of a layer, in the shape that ``cache[layer]`` has in the writer; V is None without V."""
        shown = self._shown
        layers = [(k, shown.get((n, "v"))) for (n, side), k in shown.items() if side == "k"]
        try:
            return layers[layer]
        except IndexError:  # it ends a loop over the layers
            raise IndexError(f"[CacheReader] layer {layer}: it has layers 0 to {len(layers) - 1}") from None


class SharedModule(StaysHere):
    """A module on its way to other processes: see :func:`share`. It may be sent several times."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module


def share(module: torch.nn.Module) -> SharedModule:
    """What to put in a queue, a pipe or a process's arguments so that another process reads a module.

    It arrives there as a :class:`ModuleReader`. No weight is copied. What an optimizer changes in place is
    seen at once; tensors that are new to the module, and those that have moved, are not.

    Args:
        module: a module that :func:`~vtensor.adopt` moved into a shareable pool.

    Raises:
        InvalidArgument: ``module`` is no module, or in no pool. When it is sent: its pool is not shareable,
            or one of its tensors is in no pool.
    """
    heaps_of(of_type("share", "module", module, torch.nn.Module))
    return SharedModule(module)


def _rebuild_object(reader: Any, sent: _Sent, words: int, views: dict[Any, _View]) -> Any:
    made = reader.__new__(reader)
    made._core = core = _receive(sent, words)
    made._tensors = {key: view.over(core) for key, view in views.items()}
    return made


def _reduce_arena(arena: Arena) -> Any:
    view = _View.of(arena.tensor, 0, arena.tensor.data_ptr())
    sent = _send(_core.ArenaCore.open_for_readers(arena._core))
    return _rebuild_object, (ArenaReader, sent, 0, {"tensor": view})


def _reduce_cache(cache: KVCache) -> Any:
    views = {}
    for layer, places in enumerate(cache._layout.layers):
        for name, tensor, place in zip("kv", cache[layer], places, strict=True):
            if tensor is not None and place is not None:
                base = cache._bytes[place.row_group].data_ptr()
                views[layer, name] = _View.of(tensor, place.row_group, base)
    sent = _send(_core.CacheCore.open_for_readers(cache._core))
    return _rebuild_object, (CacheReader, sent, cache.max_batch, views)


def _reduce_module(shared: SharedModule) -> Any:
    module = shared._module
    moved = set(map(id, chain(module.parameters(), module.buffers())))  # not what get_extra_state() makes
    saved = module.state_dict(keep_vars=True).items()
    tensors = {name: value for name, value in saved if id(value) in moved}
    addresses = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    arenas, files = open_for_readers(module, addresses)
    views = {}
    for name, tensor in tensors.items():
        at = tensor.data_ptr() or arenas[0][0]  # one without elements lies nowhere
        found = [(i, base) for i, (base, nbytes) in enumerate(arenas) if base <= at < base + nbytes]
        if not found:
            raise InvalidArgument(
                f"[share] {name} is not in the pool that the module was moved to: call "
                "vtensor.adopt(module, pool) again"
            )
        views[name] = _View.of(tensor, *found[0])
    return _rebuild_object, (ModuleReader, _send(files), 0, views)


reduction.ForkingPickler.register(Arena, _reduce_arena)
reduction.ForkingPickler.register(KVCache, _reduce_cache)
reduction.ForkingPickler.register(SharedModule, _reduce_module)
for _class in (VTensor, CopyOnWriteVTensor, AsleepVTensor):  # the last two say why not
    reduction.ForkingPickler.register(_class, _reduce)
_instead = "send the tensor itself from the process that writes, or a copy, x.clone()"
for _class in (Reader, _ClosedReader, _ParentsReader):
    reduction.ForkingPickler.register(_class, _refuse("send", _instead))
del _class, _instead, _names, _name
