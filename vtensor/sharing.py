"""Memory that other processes read while it grows: no copy, and no message for growth.

A :class:`~vtensor.VTensor` of a pool made with ``shareable=True`` goes through a queue, a pipe or a process's
arguments of :mod:`multiprocessing` or :mod:`torch.multiprocessing`. What arrives is a :class:`Reader` over the
same physical pages::

    pool = vtensor.Pool("cpu", shareable=True)
    k = vtensor.empty(1, 0, 8, 128, grow_dim=1, capacity=131072, pool=pool)
    queue.put(k)

    reader = queue.get()   # in the other process
    k.append(new)          # in the first one
    reader.sync()          # True if something changed: reader.length is now the writer's

The writer tells its readers nothing: it keeps its page table and its length in memory that both map, and a
reader looks there when it syncs. A page that a reader may see is not reused before that reader syncs, closes or
dies (epoch-based reclamation, by a version that each reader holds).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any, NoReturn

import torch

from vtensor import _core
from vtensor._base.processes import keep_private
from vtensor._base.torch_modes import without_modes
from vtensor._base.units import byte_text
from vtensor.errors import Closed, VTensorError
from vtensor.tensor import TensorCore, VTensor

ReaderCore = _core.ReaderCore
PageRecord = _core.PageRecord

# These methods change no element, although they end as those do that write in place.
_HARMLESS = frozenset(["requires_grad_", "detach_", "share_memory_", "resize_", "resize_as_", "set_"])
_WRITING_OPERATORS = "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__".split() + (
    "__iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)


@dataclass(frozen=True)
class _Shape:
    """Where a tensor's elements lie in its range."""

    sizes: tuple[int, ...]  # sizes[grow_dim] says nothing
    grow_dim: int
    capacity: int
    dtype: torch.dtype
    row_bytes: int
    phase: int  # bytes before position 0 of a row

    @property
    def rows(self) -> int:
        rows = 1
        for size in self.sizes[: self.grow_dim]:
            rows *= size
        return rows

    @property
    def item_bytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.sizes[self.grow_dim + 1 :]:
            size *= n
        return size

    def strides(self) -> tuple[int, ...]:
        strides = [1] * len(self.sizes)
        for dim in range(len(self.sizes) - 2, -1, -1):
            strides[dim] = (
                self.row_bytes // self.dtype.itemsize
                if dim + 1 == self.grow_dim
                else strides[dim + 1] * self.sizes[dim + 1]
            )
        return tuple(strides)

    def fits(self, nbytes: int) -> bool:
        """Whether a range of ``nbytes`` has all rows."""
        return (
            min(self.sizes[: self.grow_dim] + self.sizes[self.grow_dim + 1 :], default=1) > 0
            and 0 <= self.phase
            and self.phase + self.capacity * self.item_bytes <= self.row_bytes
            and 0 < self.rows * self.row_bytes <= nbytes
        )


class Reader(VTensor):
    """A VTensor whose memory another process writes. It reads, and follows the writer at :meth:`sync`.

    What it shows changes in :meth:`sync` alone, but for bytes that the writer changes in place. Kernels take it
    as they take any VTensor. A write to it is refused, or ends the process with a report where torch does not
    let us refuse it: through a view, or as ``out=``.
    """

    _core: ReaderCore  # type: ignore[assignment]
    _storage: torch.UntypedStorage
    _shape: _Shape
    _words: tuple[int, int]

    def sync(self) -> bool:
        """Shows what the writer has now. True if that is anything new.

        Reads shared memory. It maps what is new in one batch, and makes no system call if nothing is, but for
        a look every 50 ms at whether the writer lives.

        Raises:
            Closed: the writer has closed the tensor, moved it (``reallocate``, ``when_full="move"``) or ended.
                What was read last stays readable.
            Asleep: the writer's pool has put the tensor to sleep.
            TimedOut: the writer was stopped in the middle of a change.
            DriverError: the system refused to map a page. The length is as before.
        """
        if not ReaderCore.sync(self._core):
            return False
        self._show(*self._core.words)
        return True

    def _show(self, begin: int, end: int) -> None:
        shape = self._shape
        sizes = (*shape.sizes[: shape.grow_dim], end - begin, *shape.sizes[shape.grow_dim + 1 :])
        offset = (shape.phase + begin * shape.item_bytes) // shape.dtype.itemsize
        with without_modes():
            torch.Tensor.set_(self, self._storage, offset, sizes, shape.strides())
        self._words = (begin, end)

    # -- reading

    def alias(self) -> torch.Tensor:
        with without_modes():
            return self.detach()

    def pages(self) -> list[PageRecord]:
        return ReaderCore.pages(self._core, 0, self._shape.row_bytes // self._core.page_size(0))

    @property
    def length(self) -> int:
        begin, end = self._words
        return end - begin

    @property
    def capacity(self) -> int:
        return self._shape.capacity

    @property
    def grow_dim(self) -> int:
        return self._shape.grow_dim

    @property
    def when_full(self) -> Any:
        return "raise"

    @property
    def pool(self) -> NoReturn:
        """Raises VTensorError: the pool is the writer's."""
        raise VTensorError("[Reader.pool] the pages belong to a pool of the process that writes: ask there")

    @property
    def address(self) -> int:
        return self._core.base(0) + self._shape.phase + self._words[0] * self._shape.item_bytes

    @property
    def nbytes_mapped(self) -> int:
        return self._core.mapped(0) * self._core.page_size(0)

    @property
    def nbytes_reserved(self) -> int:
        return self._core.bytes(0)

    def record_stream(self, stream: object) -> None:
        """Does nothing: on the host there is no work beside its callers'."""

    # -- the end

    def close(self, stream: object = None) -> None:
        """Lets the writer reuse what only this reader still read, once the last view of it is gone."""
        if self._core.closed:
            return
        with without_modes():
            torch.Tensor.set_(self, torch.UntypedStorage(0), 0, [0], [1])
        del self._storage
        ReaderCore.close(self._core)
        self.__class__ = _ClosedReader

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = self.clone()
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self._core.closed:
            return "<Reader, closed>"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"<Reader {list(self.shape)} {dtype} on {self.device}, {self.length:,} of {self.capacity:,} "
            f"positions along dim {self.grow_dim}, {byte_text(self.nbytes_mapped)} of another process mapped>"
        )


class _ClosedReader(Reader):
    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        raise Closed(f"[{name}] the reader is closed: receive the tensor again")


def _refuse(name: str, instead: str) -> Any:
    def refused(self: Reader, *args: Any, **kwargs: Any) -> NoReturn:
        raise VTensorError(f"[Reader.{name}] this memory belongs to another process, and a reader reads: {instead}")

    refused.__name__ = name
    refused.__doc__ = f"Raises VTensorError: a reader reads. {instead[0].upper()}{instead[1:]}."
    return refused


for _name in ("extend", "prepare", "append", "shrink", "truncate", "reallocate", "fork", "unshare", "reindex"):
    setattr(Reader, _name, _refuse(_name, "call it in the process that writes"))
for _name in [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]:
    if _name not in _HARMLESS:
        setattr(Reader, _name, _refuse(_name, "write to a copy, x.clone()"))
for _name in _WRITING_OPERATORS:
    setattr(Reader, _name, _refuse(_name, "write to a copy, x.clone()"))
del _name


# -- handing over


class _Descriptor:
    """A descriptor on its way to another process, by multiprocessing's own means."""

    def __init__(self, descriptor: int) -> None:
        child = context.get_spawning_popen()
        try:
            self._sent = reduction.DupFd(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if child is None:
            os.close(descriptor)  # what was sent is another
        else:
            weakref.finalize(child, os.close, descriptor)  # the child gets it when it starts

    def receive(self) -> int:
        descriptor: int = self._sent.detach()
        return descriptor


def _reduce(tensor: VTensor) -> Any:
    core = tensor._core
    range_file, memory_file = TensorCore.open_for_reader(core, tensor)
    shape = _Shape(
        tuple(tensor.shape), core.grow_dim, core.capacity, core.dtype, core.row_bytes, core.phase
    )
    return _rebuild, (_Descriptor(range_file), _Descriptor(memory_file), shape)


def _rebuild(range_file: _Descriptor, memory_file: _Descriptor, shape: _Shape) -> Reader:
    core = ReaderCore([(range_file.receive(), memory_file.receive())], 2)
    if not shape.fits(core.bytes(0)):
        core.close()
        raise VTensorError("[Reader] what was received does not fit its range: send it again")
    with without_modes():
        reader = torch.empty(0, dtype=shape.dtype).as_subclass(Reader)
    reader._core = core
    reader._shape = shape
    reader._storage = core.storage(0)
    reader._show(0, 0)
    reader.sync()
    return reader


reduction.ForkingPickler.register(VTensor, _reduce)
keep_private(Reader)
keep_private(_ClosedReader)
