"""The tensor that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch

from vtensor import _core
from vtensor._arguments import choice, device_of, integer, of_type
from vtensor._line import tensor_line
from vtensor._notebook import bundle
from vtensor._processes import keep_private
from vtensor._streams import Stream, stream_handle
from vtensor.errors import CapacityExceeded, InvalidArgument, VTensorError
from vtensor.pool import Pool, default_pool

# Its methods are called by the class: torch.compile, where it breaks a graph at the method of an object of an
# extension, goes on with a call that has lost the object (torch 2.13).
TensorCore = _core.TensorCore
PageRecord = _core.PageRecord
WhenFull = Literal["raise", "move"]

_MOST_POSITIONS = 2**62
_QUANTIZED = frozenset([torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4])


class VTensor(torch.Tensor):
    """A ``torch.Tensor`` that grows and shrinks in place, at the same address, without a copy.

    It owns a reserved range of addresses and borrows physical pages from a :class:`~vtensor.Pool`. The
    dimensions before ``grow_dim`` are its rows, each of which grows by itself; a position is one index along
    ``grow_dim``. Any kernel takes it as the plain strided tensor it is; results of torch operations, and
    views, are plain tensors. Make one with :func:`~vtensor.empty`, :func:`~vtensor.zeros` or
    :func:`~vtensor.from_tensor`.

    A view keeps the pages it could see when it was taken, for as long as it lives, and no more: not those
    that the tensor grows into later, and not the tensor. Readers on other threads use :meth:`alias`.

    It is an inference structure: gradients are refused.
    """

    _core: TensorCore
    _pool: Pool
    _registered: object

    # Kernels and operators see a plain tensor, and give plain tensors back.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgument("[VTensor] make one with vtensor.empty, vtensor.zeros or vtensor.from_tensor")

    # -- growing and shrinking

    def extend(self, n: int) -> VTensor:
        """Adds ``n`` positions at the end, mapped and ready to use; returns the tensor.

        New positions show zeros or what this tensor itself had there before (I7); of a tensor made by
        :func:`~vtensor.zeros`, zeros.

        Raises:
            CapacityExceeded: there is less room.
            OutOfPages: the pool has too few free pages.
            DriverError: a driver call was refused.
            InvalidArgument: ``n`` is negative.
        """
        TensorCore.extend(self._core, self, n)
        return self

    def prepare(self, n: int) -> VTensor:
        """Has the next ``n`` positions made ready in the background, and returns the tensor at once.

        The pool's mapper maps, populates and zeroes what is missing; the ``extend`` to come then makes no
        driver call. What is prepared and not used stays mapped until the tensor shrinks or another needs the
        pages.

        Raises:
            CapacityExceeded: there is less room.
            InvalidArgument: ``n`` is negative.
            DriverError: what the mapper met for this tensor before; raised once.
        """
        TensorCore.prepare(self._core, n)
        return self

    def append(self, x: torch.Tensor) -> VTensor:
        """Grows by ``x``'s size along ``grow_dim`` and copies ``x`` there; returns the tensor.

        Args:
            x: a tensor of the same dtype, device and shape except along ``grow_dim``; any strides, conjugate
                and negative views, and parts of this very tensor are fine.

        Raises:
            InvalidArgument: another dtype, device or shape, or a source that requires grad outside
                ``no_grad``.
            CapacityExceeded, OutOfPages, DriverError: as for :meth:`extend`.
        """
        TensorCore.append(self._core, self, x)
        return self

    def shrink(self, n: int, front: bool = False, stream: Stream | None = None) -> VTensor:
        """Drops the last ``n`` positions, or the first with ``front=True``; returns the tensor.

        Nothing moves: after a front shrink ``data_ptr()`` is the address of the first position kept (I1), and
        the capacity that it used up comes back only where the tensor was made with ``when_full="move"``, or
        once it is empty. Pages without a position go back to the pool, once no view holds them and the work
        that was launched in ``stream`` (torch's current one unless given) has passed.

        Raises:
            InvalidArgument: ``n`` is negative or above the length.
        """
        TensorCore.shrink(self._core, self, n, front, stream_handle("VTensor.shrink", stream))
        return self

    def truncate(self, length: int, stream: Stream | None = None) -> VTensor:
        """Keeps the first ``length`` positions; returns the tensor. ``stream`` as for :meth:`shrink`.

        Raises:
            InvalidArgument: ``length`` is negative or above the present length.
        """
        TensorCore.truncate(self._core, self, length, stream_handle("VTensor.truncate", stream))
        return self

    def reallocate(self, capacity: int) -> VTensor:
        """A new tensor of another capacity over the same physical pages; this one is closed.

        No byte is copied. Where views of this tensor are alive, its pages are shared with them copy-on-write.

        Raises:
            CapacityExceeded: ``capacity`` is below the length, or passes the address space.
            OutOfPages, DriverError: as for :meth:`fork`.
        """
        moved = _coreless(self._pool, self._core.dtype)
        TensorCore.reallocate(self._core, self, moved, capacity)
        self._pool._register(moved)
        return moved

    # -- sharing

    def fork(self, stream: Stream | None = None) -> VTensor:
        """A second tensor of the same content and capacity that shares this one's pages copy-on-write.

        It takes no page until somebody writes; then one for each page written to. A write through either is
        never seen through the other, whoever makes it (I6). On CUDA it waits for the work that was launched
        on this tensor, in ``stream`` (torch's current one unless given) and in those of its leases.

        Raises:
            OutOfPages: pages that writes have copied since the last fork do not fit the budget.
            DriverError: a driver call was refused.
            TimedOut: that work has not ended in 60 s.
        """
        core = TensorCore.fork(self._core, self, stream_handle("VTensor.fork", stream))
        return _over(core, self._pool, core.length)

    def unshare(self, start: int, stop: int) -> VTensor:
        """Parts the shared pages behind positions ``[start, stop)``, so that writes there go to memory of
        this tensor's own; returns the tensor.

        On CUDA, call it before writing through views of shared pages; on the host the kernel copies them.

        Raises:
            InvalidArgument: not ``0 <= start <= stop <= length``.
            OutOfPages, DriverError: nothing was changed.
        """
        TensorCore.unshare(self._core, self, start, stop)
        return self

    def reindex(self, index: Sequence[int] | torch.Tensor) -> VTensor:
        """Makes this tensor what ``self[index]`` is along dimension 0, by remapping pages; returns the
        tensor.

        Rows that several entries name share their pages copy-on-write. On the host the address stays where
        the number of rows does and no view holds the present extent; otherwise the rows move to a fresh
        range.

        Args:
            index: integers in ``[-size(0), size(0))``, any number of them from 1. Needs ``grow_dim > 0``.

        Raises:
            InvalidArgument: an index out of range, none, or ``grow_dim == 0``.
            OutOfPages, DriverError: nothing was changed.
        """
        if isinstance(index, torch.Tensor):
            if index.dtype == torch.bool or index.is_floating_point():
                raise InvalidArgument(
                    f"[VTensor.reindex] index is of {index.dtype}: give integers, as mask.nonzero() does"
                )
            index = index.tolist()
        TensorCore.reindex(self._core, self, index)
        return self

    # -- reading

    def alias(self) -> torch.Tensor:
        """A plain tensor of this moment over the same memory, for kernels, models and readers on other
        threads.

        It keeps its shape and its pages whatever this tensor does later.
        """
        alias: torch.Tensor = TensorCore.alias(self._core, self)
        return alias

    def pages(self) -> list[PageRecord]:
        """What stands behind this tensor.

        Records of ``row``, ``index`` (of the page in its row), ``address``, ``page_id``, ``shared`` (how many
        page tables, and forked processes, name that page) and ``state``: ``"mapped"``, ``"shared"``,
        ``"prefetched"``, ``"private"`` (shared once, written since; it has no id until the next fork gives
        it one, so ``page_id`` is -1), ``"pinned"`` by older views or by work that may use it, or
        ``"quarantined"``.
        """
        return TensorCore.pages(self._core)

    @property
    def length(self) -> int:
        """Positions: the size along ``grow_dim``."""
        return self._core.length

    @property
    def capacity(self) -> int:
        """Positions that the reserved range was asked to hold."""
        return self._core.capacity

    @property
    def grow_dim(self) -> int:
        """The dimension that grows."""
        return self._core.grow_dim

    @property
    def when_full(self) -> WhenFull:
        """What an ``extend`` does that needs what front shrinks used up: ``"raise"`` or ``"move"``."""
        return "move" if self._core.moves_when_full else "raise"

    @property
    def pool(self) -> Pool:
        """The pool that lends the pages."""
        return self._pool

    @property
    def address(self) -> int:
        """Address of the first position, also at length 0, where ``data_ptr()`` is 0."""
        return self._core.address

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of pages mapped for this tensor, those that older views hold included."""
        return self._core.mapped_bytes

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of addresses reserved; they cost no memory."""
        return self._core.reserved_bytes

    @property
    def closed(self) -> bool:
        """Whether the tensor was closed, by ``close()``, ``reallocate()`` or its pool."""
        return self._core.closed

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Says that work in ``stream``, now and later, uses the tensor: its pages are unmapped only after it.

        The stream must outlive the tensor. A :class:`~vtensor.lease` is for one piece of work.

        Raises:
            InvalidArgument: it is no stream.
        """
        handle = stream_handle("VTensor.record_stream", stream)
        if handle is None:
            raise InvalidArgument("[VTensor.record_stream] stream is None: name one")
        TensorCore.record_stream(self._core, handle)

    # -- the end

    def close(self, stream: Stream | None = None) -> None:
        """Gives pages and addresses back; every operation on the tensor then raises :class:`~vtensor.Closed`.

        What views hold stays until the last of them is gone, and what work in ``stream`` (torch's current one
        unless given) may use until that has passed. A second call does nothing.
        """
        TensorCore.close(self._core, self, stream_handle("VTensor.close", stream))

    def __enter__(self) -> VTensor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- where torch would not be safe

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensor:
        forked = self.fork()
        memo[id(self)] = forked
        return forked

    def __copy__(self) -> torch.Tensor:
        return self._alias()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Dense and plain: the storage under us is larger than what we show, and a subclass would not load.
        return self.clone(memory_format=torch.contiguous_format).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """A numpy array over :meth:`alias`: good whatever this tensor does later. ``force`` as torch's."""
        return self._alias().numpy(force=force)

    def _alias(self) -> torch.Tensor:
        # A forked child may read, and a thread of its parent may have held the lock that an alias takes.
        return torch.Tensor.detach(self) if _core.in_forked_child() else self.alias()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._alias().__dlpack__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return tensor_line(self, self._core)

    def __str__(self) -> str:
        # A compiled region has no alias to give, and breaks at any other question.
        return repr(self) if torch.compiler.is_compiling() or self.closed else str(self._alias())

    __format__ = object.__format__  # torch's refuses closed tensors

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(self)

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """As :meth:`alias`. Setting it is refused."""
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse("data")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Always False: a VTensor keeps no graph. Setting it is refused."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> VTensor:
        """Refused (VTensorError) where ``requires_grad`` is true: a VTensor is an inference structure."""
        if requires_grad:
            raise VTensorError(
                "[VTensor.requires_grad] a VTensor keeps no graph: use t.clone().requires_grad_()"
            )
        return self

    def share_memory_(self) -> NoReturn:
        """Refused: other processes cannot follow a tensor that grows."""
        _refuse("share_memory_")

    def resize_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the tensor's own methods change its size."""
        _refuse("resize_")

    def resize_as_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the tensor's own methods change its size."""
        _refuse("resize_as_")

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the tensor's storage is vtensor's."""
        _refuse("set_")


keep_private(VTensor)


def _refuse(operation: str) -> NoReturn:
    raise VTensorError(
        f"[VTensor.{operation}] the storage and shape belong to vtensor: use extend, append, shrink, "
        "truncate or reallocate, or take t.clone() for a tensor of your own"
    )


def _coreless(pool: Pool, dtype: torch.dtype) -> VTensor:
    """A VTensor that has no core yet, and shows nothing."""
    if torch.is_inference_mode_enabled():  # an inference tensor could not be resized later
        with torch.inference_mode(False):
            return _coreless(pool, dtype)
    # As a view of a tensor of its own, because views of views name the first as their base: so no view keeps
    # the VTensor alive.
    tensor = torch.empty(0, dtype=dtype, device=pool._tensor_device).as_subclass(VTensor)
    tensor._pool = pool
    return tensor


def _over(core: TensorCore, pool: Pool, length: int) -> VTensor:
    """The VTensor of a core, with `length` positions, known to the pool."""
    tensor = _coreless(pool, core.dtype)
    tensor._core = core
    try:
        core.attach(tensor, length)
    except BaseException:
        core.close(tensor)  # now, and not when the traceback lets it go
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
) -> VTensor:
    """A tensor that can grow to ``capacity`` positions along ``grow_dim``.

    Args:
        sizes: the shape; ``sizes[grow_dim]`` is the length to begin with, often 0.
        grow_dim: the dimension that grows. What stands before it are rows, which grow by themselves.
        capacity: positions to reserve addresses for. They cost no memory.
        dtype: any dtype of torch; torch's default unless given.
        device: ``"cpu"`` unless given, or the pool's.
        pool: where the pages come from; :func:`~vtensor.default_pool` of the device unless given.
        when_full: what an ``extend`` does that fits ``capacity`` only without what front shrinks used up:
            ``"raise"`` CapacityExceeded, or ``"move"`` the pages to a fresh range (nothing is copied, the
            address changes).

    Raises:
        InvalidArgument: sizes, ``grow_dim`` or a device that cannot be meant.
        CapacityExceeded: the initial length passes ``capacity``, or ``capacity`` the address space.
        OutOfPages: the pool has too few pages for the initial length.
        DriverError: the addresses could not be reserved.
    """
    return _make(sizes, grow_dim, capacity, dtype, device, pool, when_full, zeroed=False)


def zeros(
    *sizes: int | Sequence[int],
    grow_dim: int,
    capacity: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    pool: Pool | None = None,
    when_full: WhenFull = "raise",
) -> VTensor:
    """As :func:`empty`; every position reads as zeros until written, those added by ``extend`` too.

    Raises:
        InvalidArgument, CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    return _make(sizes, grow_dim, capacity, dtype, device, pool, when_full, zeroed=True)


def empty_like(
    t: torch.Tensor, capacity: int | None = None, pool: Pool | None = None, **options: Any
) -> VTensor:
    """A tensor of ``t``'s shape, dtype and device.

    Args:
        t: a VTensor, whose ``grow_dim``, capacity, pool and ``when_full`` are taken unless given; or a plain
            tensor, which needs ``grow_dim=`` and ``capacity=``.
        capacity, pool, options: as for :func:`empty`.

    Raises:
        InvalidArgument, CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    of_type("empty_like", "t", t, torch.Tensor)
    if isinstance(t, VTensor):
        options.setdefault("grow_dim", t.grow_dim)
        options.setdefault("when_full", t.when_full)
        capacity = t.capacity if capacity is None else capacity
        pool = t.pool if pool is None and "device" not in options else pool
    if capacity is None or "grow_dim" not in options:
        raise InvalidArgument("[empty_like] of a plain tensor needs grow_dim= and capacity=")
    options.setdefault("dtype", t.dtype)
    if pool is None:
        options.setdefault("device", t.device)
    return empty(*t.shape, capacity=capacity, pool=pool, **options)


def from_tensor(
    x: torch.Tensor, grow_dim: int, capacity: int, pool: Pool | None = None, when_full: WhenFull = "raise"
) -> VTensor:
    """A tensor that begins as a copy of ``x`` and can grow to ``capacity`` positions along ``grow_dim``.

    Args:
        x: a plain tensor, of any strides, or a VTensor. The device is its.
        grow_dim, capacity, pool, when_full: as for :func:`empty`.

    Raises:
        InvalidArgument: as for :func:`empty`; or ``x`` requires grad outside ``no_grad``.
        CapacityExceeded, OutOfPages, DriverError: as for :func:`empty`.
    """
    of_type("from_tensor", "x", x, torch.Tensor)
    dim = _checked_dim(x.shape, grow_dim)
    sizes = [0 if i == dim else size for i, size in enumerate(x.shape)]
    device = None if pool is not None else x.device
    t = empty(
        *sizes, grow_dim=dim, capacity=capacity, dtype=x.dtype, device=device, pool=pool, when_full=when_full
    )
    try:
        return t.append(x)
    except BaseException:
        t.close()
        raise


def _checked_dim(sizes: Sequence[int], grow_dim: int) -> int:
    grow_dim = integer("empty", "grow_dim", grow_dim)
    if not -len(sizes) <= grow_dim < len(sizes):
        raise InvalidArgument(
            f"[empty] grow_dim is {grow_dim}, the shape has {len(sizes)} dimensions: name one of them"
        )
    return grow_dim % len(sizes)


def _same_device(device: torch.device | str | int | None, of_pool: torch.device) -> bool:
    if device is None:
        return True
    asked = device_of("empty", device)
    return asked.type == of_pool.type and (asked.index is None or asked.index == (of_pool.index or 0))


def _make(
    sizes: Sequence[int | Sequence[int]],
    grow_dim: int,
    capacity: int,
    dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    pool: Pool | None,
    when_full: WhenFull,
    zeroed: bool,
) -> VTensor:
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    shape = tuple(integer("empty", "a size", size) for size in given)
    dim = _checked_dim(shape, grow_dim)
    choice("empty", "when_full", when_full, ("raise", "move"))
    capacity = integer("empty", "capacity", capacity)
    if capacity < 0:
        raise InvalidArgument(f"[empty] capacity is {capacity}: it must be at least 0")
    if max(capacity, *map(abs, shape)) > _MOST_POSITIONS:
        raise CapacityExceeded(
            f"[empty] sizes {shape} or capacity {capacity} pass the address space: lower them"
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
        raise InvalidArgument(f"[empty] dtype is {dtype!r}: give a torch.dtype that is not quantized")
    if pool is None:
        pool = default_pool("cpu" if device is None else device)
    elif not _same_device(device, of_type("empty", "pool", pool, Pool).device):
        raise InvalidArgument(f"[empty] device is {device}, the pool's {pool.device}: leave one of them out")
    core = TensorCore(
        pool=pool._open_core("empty"),
        sizes=list(shape),
        grow_dim=dim,
        capacity=capacity,
        dtype=dtype,
        device=pool._tensor_device,
        item_size=dtype.itemsize,
        zeroed=zeroed,
        move_when_full=when_full == "move",
    )
    return _over(core, pool, shape[dim])
