"""The tensor that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch

from vtensor import _core
from vtensor._base.arguments import MOST, choice, integer, items, of_type, tag_of
from vtensor._base.notebook import Drawn
from vtensor._base.streams import Stream, stream_handle
from vtensor._base.torch_modes import without_modes
from vtensor._base.units import byte_text
from vtensor.errors import Asleep, CapacityExceeded, InvalidArgument, VTensorError
from vtensor.pool import Pool, pool_of

# VTensor calls these methods through the class. If torch.compile breaks a graph at a method of an extension
# object, it resumes with a call that has lost the object (torch 2.13).
FallAsleep = _core.FallAsleep
TensorCore = _core.TensorCore
PageRecord = _core.PageRecord
WhenFull = Literal["raise", "move"]

_QUANTIZED = frozenset([torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4])


class VTensor(torch.Tensor, Drawn):
    """A ``torch.Tensor`` that grows and shrinks in place, at the same address, without a copy.

    It owns a reserved range of addresses and borrows physical pages from a :class:`~vtensor.Pool`. The
    dimensions before ``grow_dim`` are its rows; each row grows by itself. A position is one index along
    ``grow_dim``. Kernels take it as a plain strided tensor. Views and results of torch operations are plain
    tensors. Make one with :func:`~vtensor.empty`, :func:`~vtensor.zeros` or :func:`~vtensor.from_tensor`.

    A view keeps alive the pages that the tensor had when the view was taken. It keeps neither the tensor nor
    pages that the tensor grows into later. Readers on other threads use :meth:`alias`.

    A VTensor is for inference: it refuses gradients.
    """

    _core: TensorCore
    _pool: Pool
    _made_at: str

    # Kernels and operators see a plain tensor, and return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgument("[VTensor] make one with vtensor.empty, vtensor.zeros or vtensor.from_tensor")

    # -- growing and shrinking

    def extend(self, n: int) -> VTensor:
        """Adds ``n`` positions at the end, mapped and ready to use. Returns the tensor.

        New positions hold zeros or what this tensor itself had there before (I7). In a tensor made by
        :func:`~vtensor.zeros` they hold zeros.

        Raises:
            CapacityExceeded: if the capacity has less room.
            OutOfPages: if the pool has too few free pages.
            DriverError: if a driver call was refused.
            InvalidArgument: if ``n`` is negative.
        """
        TensorCore.extend(self._core, self, n)
        return self

    def prepare(self, n: int) -> VTensor:
        """Makes the next ``n`` positions ready in the background. Returns the tensor at once.

        The pool's mapper maps, populates and zeroes the missing pages, so that the next ``extend`` makes no
        driver call. Prepared pages that are not used stay mapped until the tensor shrinks or another tensor
        needs them.

        Raises:
            CapacityExceeded: if the capacity has less room.
            InvalidArgument: if ``n`` is negative.
            DriverError: if a driver call of the mapper for this tensor was refused before. Raised once.
        """
        TensorCore.prepare(self._core, n)
        return self

    def append(self, x: torch.Tensor) -> VTensor:
        """Grows by ``x``'s size along ``grow_dim`` and copies ``x`` there. Returns the tensor.

        Args:
            x: a tensor of the same dtype, device and shape except along ``grow_dim``. It may have any
                strides, be a conjugate or negative view, or be a part of this tensor.

        Raises:
            InvalidArgument: if ``x`` has another dtype, device or shape, or requires grad outside
                ``no_grad``.
            CapacityExceeded, OutOfPages, DriverError: as for :meth:`extend`.
        """
        TensorCore.append(self._core, self, x)
        return self

    def shrink(self, n: int, front: bool = False, stream: Stream | None = None) -> VTensor:
        """Drops the last ``n`` positions, or the first ``n`` with ``front=True``. Returns the tensor.

        No element moves: after a front shrink ``data_ptr()`` is the address of the first position kept (I1).
        A front shrink uses up capacity. A tensor made with ``when_full="move"`` gets it back when it moves,
        any other when it is empty. Pages without a position return to the pool once no view holds them and
        the work launched in ``stream`` (torch's current one by default) has passed.

        Raises:
            InvalidArgument: if ``n`` is negative or above the length.
        """
        TensorCore.shrink(self._core, self, n, front, stream_handle("VTensor.shrink", stream))
        return self

    def truncate(self, length: int, stream: Stream | None = None) -> VTensor:
        """Keeps the first ``length`` positions. Returns the tensor. ``stream`` is as for :meth:`shrink`.

        Raises:
            InvalidArgument: if ``length`` is negative or above the current length.
        """
        TensorCore.truncate(self._core, self, length, stream_handle("VTensor.truncate", stream))
        return self

    def reallocate(self, capacity: int) -> VTensor:
        """Returns a new tensor of another capacity over the same physical pages, and closes this one.

        Copies no byte. If views of this tensor are alive, the new tensor shares their pages copy-on-write.

        Raises:
            CapacityExceeded: if ``capacity`` is below the length, or exceeds the address space.
            OutOfPages, DriverError: as for :meth:`fork`.
        """
        moved = _coreless(self._pool, self._core.dtype, self._sleeps_as)
        TensorCore.reallocate(self._core, self, moved, capacity)
        self._pool._register(moved)
        return moved

    # -- sharing

    def fork(self, stream: Stream | None = None) -> VTensor:
        """Returns a tensor of the same content and capacity that shares this one's pages copy-on-write.

        It takes no page until the first write, then one for each page written to. A write through one tensor
        is never seen through the other (I6). On CUDA, ``fork`` waits for the work launched on this tensor: in
        ``stream`` (torch's current one by default) and in the streams of its leases.

        Raises:
            OutOfPages: if pages that writes have copied since the last fork do not fit the budget.
            DriverError: if a driver call was refused.
            TimedOut: if that work has not ended after 60 s.
        """
        core = TensorCore.fork(self._core, self, stream_handle("VTensor.fork", stream))
        return _over(core, self._pool, core.length, self._sleeps_as)

    def unshare(self, start: int, stop: int) -> VTensor:
        """Copies the shared pages of positions ``[start, stop)`` to pages of its own. Returns the tensor.

        On CUDA, call it before a write through a view of shared pages. On the host, the operating system
        copies a shared page at the first write.

        Raises:
            InvalidArgument: unless ``0 <= start <= stop <= length``.
            OutOfPages: if the budget has too few free pages. Nothing was changed.
            DriverError: if a driver call was refused. Nothing was changed.
        """
        TensorCore.unshare(self._core, self, start, stop)
        return self

    def reindex(self, index: Sequence[int] | torch.Tensor) -> VTensor:
        """Replaces the rows with ``self[index]`` along dimension 0 by remapping pages. Returns the tensor.

        Entries that name the same row share its pages copy-on-write. On the host the address stays the same
        if the number of rows does and no view holds the current pages. Otherwise the rows move to a new
        range.

        Args:
            index: at least one integer; each in ``[-size(0), size(0))``. Requires ``grow_dim > 0``.

        Raises:
            InvalidArgument: if ``index`` is empty or out of range, or ``grow_dim == 0``.
            OutOfPages, DriverError: as for :meth:`fork`. Nothing was changed.
        """
        if isinstance(index, torch.Tensor) and (index.dtype == torch.bool or index.is_floating_point()):
            raise InvalidArgument(
                f"[VTensor.reindex] index is of {index.dtype}: give integers, as mask.nonzero() does"
            )
        if not isinstance(index, (list, tuple)):
            index = items("VTensor.reindex", "index", index, "integers, as mask.nonzero() does")
        if bool in map(type, index):  # True is an integer to Python
            raise InvalidArgument("[VTensor.reindex] index is a mask: give integers, the places of its True")
        _core.reindex([self._core], [self], [index], [])
        return self

    # -- reading

    def alias(self) -> torch.Tensor:
        """Returns a plain tensor with the current shape over the same memory.

        It keeps its shape and its pages when this tensor changes later. Use it for kernels, models and
        readers on other threads.
        """
        alias: torch.Tensor = TensorCore.alias(self._core, self)
        return alias

    def pages(self) -> list[PageRecord]:
        """Returns a record for each page behind this tensor.

        A record has ``row``, ``index`` (of the page in its row), ``address``, ``page_id``, ``shared`` (the
        number of page tables that refer to the page) and ``state``: ``"mapped"``,
        ``"shared"``, ``"prefetched"``, ``"private"`` (written after it was shared; ``page_id`` is -1 until
        the next fork), ``"pinned"`` (by older views, or by work that may use it) or ``"asleep"`` (see
        :meth:`vtensor.Pool.sleep`; ``page_id`` is -1).
        """
        return TensorCore.pages(self._core)

    @property
    def length(self) -> int:
        """Positions: the size along ``grow_dim``."""
        return self._core.length

    @property
    def capacity(self) -> int:
        """Positions that the tensor can grow to, as asked for and not rounded."""
        return self._core.capacity

    @property
    def grow_dim(self) -> int:
        """The dimension that grows."""
        return self._core.grow_dim

    @property
    def when_full(self) -> WhenFull:
        """What ``extend`` does if it needs capacity that front shrinks used up: ``"raise"`` or ``"move"``."""
        return "move" if self._core.moves_when_full else "raise"

    @property
    def pool(self) -> Pool:
        """The pool of the pages."""
        return self._pool

    @property
    def address(self) -> int:
        """Address of the first position. At length 0, ``data_ptr()`` is 0 and this is not."""
        return self._core.address

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of pages mapped for this tensor, including those that older views hold."""
        return self._core.mapped_bytes

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of addresses reserved; they cost no memory."""
        return self._core.reserved_bytes

    @property
    def closed(self) -> bool:
        """Whether ``close()``, ``reallocate()`` or its pool has closed the tensor."""
        return self._core.closed

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Declares that current and future work in ``stream`` uses the tensor.

        Pages are unmapped only after that work. The stream must outlive the tensor. For a single launch, use
        :class:`~vtensor.lease`.

        Raises:
            InvalidArgument: if ``stream`` is no stream.
        """
        handle = stream_handle("VTensor.record_stream", stream)
        if handle is None:
            raise InvalidArgument("[VTensor.record_stream] stream is None: name one")
        TensorCore.record_stream(self._core, handle)

    _sleeps_as: str

    def _fall_asleep(self, sleep: FallAsleep, discard: bool) -> None:
        TensorCore.fall_asleep(self._core, self, sleep)

    def _wake(self) -> None:
        TensorCore.wake(self._core, self)

    # -- the end

    def close(self, stream: Stream | None = None) -> None:
        """Gives pages and addresses back. Every later operation on it raises :class:`~vtensor.Closed`.

        Pages that views hold stay until the last view is gone. Pages that work in ``stream`` (torch's current
        one by default) may use stay until that work has passed. A second call does nothing.
        """
        TensorCore.close(self._core, self, stream_handle("VTensor.close", stream))

    def __enter__(self) -> VTensor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- unsafe methods of torch.Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensor:
        return self.fork()

    def __copy__(self) -> torch.Tensor:
        return self.alias()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles a dense plain tensor: the storage is larger than the tensor, and torch.load refuses a
        # subclass.
        return self.clone(memory_format=torch.contiguous_format).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a numpy array over :meth:`alias`, which stays valid when this tensor changes.

        ``force`` is as for ``torch.Tensor.numpy``.
        """
        alias = self.alias()
        with without_modes():
            return alias.numpy(force=force)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        alias = self.alias()
        with without_modes():
            return alias.__dlpack__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # Debuggers, logs and failed assertions call it often: it reads no element, waits for no device and no
        # lock, and makes no driver call. The bytes may be a moment old.
        core = self._core
        # Closed and copy-on-write tensors answer torch's attributes in Python, or refuse to.
        with torch._C.DisableTorchFunctionSubclass():
            if core.closed:
                return "<VTensor, closed>"
            dtype = str(self.dtype).removeprefix("torch.")
            memory = "asleep" if core.asleep else f"{byte_text(core.mapped_bytes_seen)} mapped"
            return (
                f"<VTensor {list(self.shape)} {dtype} on {self.device}, "
                f"{core.length:,} of {core.capacity:,} positions along dim {core.grow_dim}, "
                f"{memory}>"
            )

    def __str__(self) -> str:
        # torch.compile cannot trace alias(), nor any other call of the core.
        if torch.compiler.is_compiling() or self.closed:
            return repr(self)
        try:
            alias = self.alias()
        except Asleep:
            return repr(self)
        with without_modes():
            return str(alias)

    # Torch's refuse closed tensors.
    __format__ = object.__format__
    __dir__ = object.__dir__

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same as :meth:`alias`. Setting it raises VTensorError."""
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse("data")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Always False: a VTensor keeps no graph. Setting it to True raises VTensorError."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> VTensor:
        """Raises VTensorError if ``requires_grad`` is true: a VTensor is for inference."""
        if requires_grad:
            raise VTensorError(
                "[VTensor.requires_grad] a VTensor keeps no graph: use t.clone().requires_grad_()"
            )
        return self

    def share_memory_(self) -> NoReturn:
        """Raises VTensorError: put a tensor of a shareable pool in a queue as it is (``vtensor.sharing``)."""
        _refuse("share_memory_")


def _refuse(operation: str) -> NoReturn:
    raise VTensorError(
        f"[VTensor.{operation}] the storage and shape belong to vtensor: use extend, append, shrink, "
        "truncate or reallocate, or take t.clone() for a tensor of your own"
    )


def _refused(name: str) -> Any:
    def refused(self: VTensor, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name)

    refused.__name__ = name
    refused.__doc__ = "Raises VTensorError: the storage and the shape belong to vtensor."
    return refused


for (
    _name
) in "resize_ resize_as_ set_ as_strided_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split():
    setattr(VTensor, _name, _refused(_name))
del _name


def _coreless(pool: Pool, dtype: torch.dtype, tag: str) -> VTensor:
    """An empty VTensor that has no core yet."""
    # A view of a plain tensor: views of the VTensor then have that tensor as their base, and none keeps the
    # VTensor alive. Made in no_grad: torch then refuses to write a tensor that requires grad to it, and it
    # never gets a graph, which would keep all that was written.
    with without_modes(), torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=pool._tensor_device).as_subclass(VTensor)
    tensor._pool = pool
    tensor._sleeps_as = tag
    return tensor


def _over(core: TensorCore, pool: Pool, length: int, tag: str) -> VTensor:
    """Makes the VTensor of a core, with `length` positions, and registers it with the pool."""
    tensor = _coreless(pool, core.dtype, tag)
    tensor._core = core
    try:
        core.attach(tensor, length)
    except BaseException:
        core.close(tensor)  # now: the traceback would keep it open
        raise
    pool._register(tensor)
    return tensor


def empty(
    *sizes: int | Sequence[int],
    grow_dim: int,
    capacity: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    pool: Pool | None = None,
    when_full: WhenFull = "raise",
    tag: str = "tensors",
) -> VTensor:
    """Makes a tensor that can grow to ``capacity`` positions along ``grow_dim``.

    Args:
        sizes: the shape. ``sizes[grow_dim]`` is the initial length, often 0.
        grow_dim: the dimension that grows. The dimensions before it are rows, which all have one length.
        capacity: positions to reserve addresses for. Addresses cost no memory.
        dtype: any dtype of torch that is not quantized. Defaults to torch's default dtype.
        device: defaults to the pool's device, or else to torch's default device.
        pool: the pool of the pages. Defaults to :func:`~vtensor.default_pool` of the device.
        when_full: what ``extend`` does if it needs capacity that front shrinks used up: ``"raise"``
            CapacityExceeded, or ``"move"`` the pages to a new range (the address changes, no byte is copied).
        tag: the name by which :meth:`Pool.sleep` puts it to sleep; its forks have it too.

    Raises:
        InvalidArgument: if ``sizes``, ``grow_dim``, ``dtype`` or ``device`` is not valid.
        CapacityExceeded: if the initial length exceeds ``capacity``, or ``capacity`` the address space.
        OutOfPages: if the pool has too few pages for the initial length.
        DriverError: if the addresses could not be reserved.
    """
    return _make("empty", sizes, grow_dim, capacity, dtype, device, pool, when_full, tag)


def zeros(
    *sizes: int | Sequence[int],
    grow_dim: int,
    capacity: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    pool: Pool | None = None,
    when_full: WhenFull = "raise",
    tag: str = "tensors",
) -> VTensor:
    """As :func:`empty`. Every position holds zeros until it is written, including those that ``extend`` adds.

    Raises:
        InvalidArgument, CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    return _make("zeros", sizes, grow_dim, capacity, dtype, device, pool, when_full, tag, zeroed=True)


def empty_like(
    t: torch.Tensor, capacity: int | None = None, pool: Pool | None = None, **options: Any
) -> VTensor:
    """Makes a tensor of ``t``'s shape, dtype and device.

    Args:
        t: a VTensor or a plain tensor. A VTensor gives the defaults of ``grow_dim``, ``capacity``, ``pool``,
            ``when_full`` and ``tag``; a reader (``vtensor.sharing``) those but ``pool`` and ``tag``. With a
            plain tensor, ``grow_dim=`` and ``capacity=`` are required.
        capacity, pool, options: as for :func:`empty`.

    Raises:
        InvalidArgument, CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    of_type("empty_like", "t", t, torch.Tensor)
    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(t, VTensor):
        options.setdefault("grow_dim", t.grow_dim)
        options.setdefault("when_full", t.when_full)
        capacity = t.capacity if capacity is None else capacity
        if isinstance(t._core, TensorCore):  # a reader has no tag, and its pool is in another process
            options.setdefault("tag", t._sleeps_as)
            pool = t.pool if pool is None and "device" not in options else pool
    if capacity is None or "grow_dim" not in options:
        raise InvalidArgument("[empty_like] of a plain tensor needs grow_dim= and capacity=")
    options.setdefault("dtype", t.dtype)
    if pool is None:
        options.setdefault("device", t.device)
    return empty(*t.shape, capacity=capacity, pool=pool, **options)


def from_tensor(
    x: torch.Tensor,
    grow_dim: int,
    capacity: int,
    pool: Pool | None = None,
    when_full: WhenFull = "raise",
    tag: str = "tensors",
) -> VTensor:
    """Makes a copy of ``x`` that can grow to ``capacity`` positions along ``grow_dim``.

    Args:
        x: a plain tensor of any strides, or a VTensor. Without ``pool``, the new tensor is on its device.
        grow_dim, capacity, pool, when_full, tag: as for :func:`empty`.

    Raises:
        InvalidArgument: as for :func:`empty`, or if ``x`` requires grad outside ``no_grad``.
        CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    if of_type("from_tensor", "x", x, torch.Tensor).is_nested:
        raise InvalidArgument(
            "[from_tensor] x is nested, and all rows of a VTensor have one length: give "
            "x.to_padded_tensor(0.0), or use a vtensor.KVCache"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            "[from_tensor] x requires grad, and a VTensor keeps no graph: give x.detach(), or work under "
            "torch.no_grad()"
        )
    dim = _checked_dim("from_tensor", x.shape, grow_dim)
    sizes = [0 if i == dim else size for i, size in enumerate(x.shape)]
    device = None if pool is not None else x.device
    t = _make("from_tensor", sizes, dim, capacity, x.dtype, device, pool, when_full, tag)
    try:
        return t.append(x)
    except BaseException:
        t.close()
        raise


class lease(_core.Lease):
    """A context manager around kernel launches: keeps the tensors' pages mapped for the work launched in it.

    Pages that the tensors give back in the meantime, from any thread, stay mapped until the work launched in
    the stream up to the end of the ``with`` has passed. Without a lease, ``shrink``, ``close`` and ``fork``
    consider only the stream that is current at the call. So a lease is for work in other streams.

    Inside the capture of a CUDA graph the lease lasts as long as the graph can be replayed, so a replay needs
    no lease for its pages to stay mapped. CUDA does not report the streams in which a graph is replayed. So
    ``fork``, ``unshare``, ``reallocate`` and the first growth after a ``fork``, which remap pages in place,
    wait for a replay in another stream than the current one only if it is launched in a lease too.

    A lease that names its stream covers the work launched there before the end of the ``with``, so the stream
    may be destroyed after that. ``fork`` and ``unshare`` wait for work in that stream as soon as the lease
    begins.

    Args:
        tensors: VTensors, or one list of them.
        stream: the stream in which the work is launched: a ``torch.cuda.Stream``, a ``cuda.core`` stream or
            an integer. Defaults to torch's current stream at the end of the ``with``. Ignored on the CPU.

    Raises:
        Closed: if one of the tensors is closed.
        InvalidArgument: if one of ``tensors`` is no VTensor, or ``stream`` no stream.
        VTensorError: if the lease has begun already.
        TimedOut: if another thread's operation on one of the tensors has not ended in 60 s.
        DriverError: at the end of the ``with``, if no fence can be made. The pages then stay pinned for good.
    """

    def __init__(self, *tensors: VTensor | Sequence[VTensor], stream: Stream | None = None) -> None:
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
            tensors = tuple(tensors[0])
        super().__init__(tensors, stream_handle("lease", stream))


def _checked_dim(operation: str, sizes: Sequence[int], grow_dim: int) -> int:
    grow_dim = integer(operation, "grow_dim", grow_dim)
    if not -len(sizes) <= grow_dim < len(sizes):
        raise InvalidArgument(
            f"[{operation}] grow_dim is {grow_dim}, the shape has {len(sizes)} dimensions: name one of them"
        )
    return grow_dim % len(sizes)


def _make(
    operation: str,
    sizes: Sequence[int | Sequence[int]],
    grow_dim: int,
    capacity: int,
    dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    pool: Pool | None,
    when_full: WhenFull,
    tag: str,
    zeroed: bool = False,
) -> VTensor:
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    shape = tuple(integer(operation, "a size", size) for size in given)
    dim = _checked_dim(operation, shape, grow_dim)
    choice(operation, "when_full", when_full, ("raise", "move"))
    tag = tag_of(operation, tag)
    capacity = integer(operation, "capacity", capacity, 0)
    if max(capacity, *map(abs, shape)) > MOST:
        raise CapacityExceeded(
            f"[{operation}] sizes {shape} or capacity {capacity} pass the address space: lower them"
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
        raise InvalidArgument(f"[{operation}] dtype is {dtype!r}: give a torch.dtype that is not quantized")
    pool = pool_of(operation, pool, device)
    core = TensorCore(
        pool=pool._open_core(operation),
        sizes=list(shape),
        grow_dim=dim,
        capacity=capacity,
        dtype=dtype,
        device=pool._tensor_device,
        item_size=dtype.itemsize,
        zeroed=zeroed,
        move_when_full=when_full == "move",
    )
    return _over(core, pool, shape[dim], tag)
