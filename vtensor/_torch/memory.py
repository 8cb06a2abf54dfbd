"""Memory of a pool for all of torch: an allocator for CUDA, and tensors moved into a pool."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from vtensor import _core
from vtensor._base.arguments import bytes_spanned, has_memory, of_type, tag_of, type_text
from vtensor._base.terminal import Progress
from vtensor._base.torch_modes import whole_storage, without_modes
from vtensor._pool.adopted import Owner, gradients_of, optimizer_state, parameters_of, raise_if_asleep
from vtensor.errors import InvalidArgument, VTensorError
from vtensor.pool import Heap, Pool, default_pool, open_pools, while_awake
from vtensor.tensor import VTensor

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator

_COPIED_AT_ONCE = 64 << 20  # bytes between two readings of the clock


@contextlib.contextmanager
def memory(pool: Pool | None = None, *, tag: str = "memory") -> Iterator[None]:
    """A context in which torch's allocations on a CUDA device, in this thread, come from ``pool``.

    It uses a ``torch.cuda.MemPool`` over the pool. Any free pages are mapped behind one range of addresses,
    wherever they lie (GMLake, arXiv 2401.08156). torch's expandable segments do the same, but not for a
    ``MemPool`` over another allocator. So weights, activations and K and V share one budget, and what torch's
    cache gives back serves tensors and caches of the pool.

    Tensors made inside live on outside, even if the pool is closed. Only this thread's allocations come from
    the pool: not those of the threads in which ``backward()`` runs on CUDA, unless you call
    ``torch.autograd.set_multithreading_enabled(False)``. Contexts may be nested: the innermost counts.

    Args:
        pool: a pool of the CUDA device; its default pool unless given.
        tag: a name for this memory. Memory of one tag is cached and reported together, as
            ``Pool.stats().nbytes_by_tag``.

    Raises:
        InvalidArgument: the pool is one of the CPU, for which torch has no such hook: :func:`adopt` moves a
            module's tensors there, and :func:`vtensor.empty` makes new ones.
        VTensorError: torch finds no CUDA device.
        Closed: the pool is closed.
        torch.OutOfMemoryError: inside, if the pool refuses; a note says why.
    """
    if pool is None:
        _require_cuda()
        pool = default_pool("cuda")
    of_type("memory", "pool", pool, Pool)
    tag = tag_of("memory", tag)
    if pool.device.type != "cuda":
        raise InvalidArgument(
            f"[memory] the pool is of {pool.device}, and torch has no hook for its allocations on the CPU: "
            "move a module's parameters and buffers with vtensor.adopt(module, pool), and make new tensors "
            "with vtensor.empty(..., pool=pool)"
        )
    _require_cuda()
    heap = pool._heap("memory", tag)
    with entered(heap), torch.cuda.use_mem_pool(_torch_pool(heap, pool.device), device=pool.device):
        _core.take_heap_refusal()
        try:
            yield
        except torch.OutOfMemoryError as error:
            if refusal := _core.take_heap_refusal():
                error.add_note(refusal)
            raise


@contextlib.contextmanager
def entered(heap: Heap) -> Iterator[None]:
    """A context in which torch's allocations through the C functions, in this thread, come from ``heap``."""
    outer: list[_core.OuterHeap] = []
    try:
        outer.extend(map(_core.HeapCore.enter, [heap.core]))  # entered and noted in one call of C (I17)
        yield
    finally:
        deque(map(_core.leave_heap, outer), maxlen=0)


def adopt(
    what: torch.nn.Module | torch.optim.Optimizer | Iterable[torch.Tensor],
    pool: Pool | None = None,
    *,
    tag: str = "weights",
) -> int:
    """Moves tensors into ``pool``, each storage by one copy: a module's, an optimizer's, or those given.

    Parameters stay the same objects, so tied weights stay tied and optimizers keep them. Tensors that are
    views of one storage stay views of one, with their strides and offsets. ``requires_grad`` and ``grad``
    stay; if the pool is on another device, a gradient moves too. Other views of the old storages keep these
    and their memory.

    Whole or nothing: an exception, even Ctrl-C, leaves all as it was. The move needs the old and the new
    memory at the same time. If it takes over a second, stderr shows the progress.

    Args:
        what: a module: its parameters and buffers; an optimizer: its state, which most make at their first
            step; or tensors, such as gradients.
        pool: the default pool of the first tensor's device unless given.
        tag: a name for this memory, as for :func:`memory`.

    Returns:
        The bytes moved.

    Raises:
        InvalidArgument: a tensor without memory, in shared memory, sparse, nested, quantized, made in
            inference mode, lazily conjugated or negated, or of a class other than ``Parameter`` and
            ``Tensor``; or a wrapper of an optimizer, which has no hooks.
        Asleep: a tensor lies in memory that sleeps, or what the optimizer's step reads; or the memory of
            this tag sleeps.
        OutOfPages: the pool has no memory for all of it.
        DriverError: the driver refuses a call.
        Closed: the pool is closed. In all cases everything is as before.
    """
    tensors = _tensors_of(what)
    if pool is None:
        pool = default_pool(tensors[0].device if tensors else "cpu")
    heap = of_type("adopt", "pool", pool, Pool)._heap("adopt", tag_of("adopt", tag))
    owner = what if isinstance(what, (torch.nn.Module, torch.optim.Optimizer)) else None
    return while_awake(lambda: _move(tensors, heap, pool._tensor_device, owner))


def _move(tensors: list[torch.Tensor], heap: Heap, device: torch.device, owner: Owner | None) -> int:
    storages = {_key(t): t.untyped_storage() for t in tensors}
    nbytes = sum(storage.nbytes() for storage in storages.values())
    with without_modes():
        moved: dict[int, Any] = {}
        done = 0
        with Progress() as show:
            for key, storage in storages.items():
                size = storage.nbytes()
                moved[key] = heap.core.storage(size) if size else torch.UntypedStorage(0, device=device)
                for copied in _copy(moved[key], storage):
                    done += copied
                    show(f"adopt: {done:,} of {nbytes:,} bytes")
        for t in tensors:
            raise_if_asleep("adopt", "a tensor that is being copied", t)  # since it was checked
        old = [t.data for t in tensors]
        try:
            new_data = [_over(moved[_key(t)], t) for t in old]
        except KeyError:
            raise VTensorError(
                "[adopt] a tensor got other memory while it was being copied, from another thread, a signal "
                "handler or a finalizer: nothing was moved, so call it again"
            ) from None
        leaves = (t for t in tensors if t.is_leaf)  # torch warns of the gradients of others
        grads = [t.grad for t in leaves if t.grad is not None and t.grad.device != device]
        old += [grad.data for grad in grads]
        new_data += [grad.data.to(device) for grad in grads]
        targets = tensors + grads
        if owner is not None:
            heap.adopted.add(owner)
        try:
            _set_data(targets, new_data)
        except BaseException:
            _set_data(targets, old)
            raise
    return nbytes


def _set_data(tensors: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    """Sets all of them in one call of C, which no exception from outside interrupts (I17)."""
    deque(map(torch.Tensor.data.__set__, tensors, data), maxlen=0)  # type: ignore[attr-defined]


def _key(t: torch.Tensor) -> int:
    return cast(int, t.untyped_storage()._cdata)


def _tensors_of(what: object) -> list[torch.Tensor]:
    """Each tensor once, after a check that it can be moved."""
    found: dict[int, torch.Tensor] = {}
    if isinstance(what, torch.optim.Optimizer):  # a sleep that has begun does not refuse its step
        if not hasattr(what, "_optimizer_step_pre_hooks"):  # a wrapper that never called Optimizer's __init__
            raise InvalidArgument(
                f"[adopt] what is {type_text(type(what))}, which has no hooks to refuse a step while its "
                "memory sleeps: adopt the optimizer that it wraps; nothing was moved"
            )
        for t in (*parameters_of(what), *gradients_of(what)):
            raise_if_asleep("adopt", "a parameter of the optimizer, or its gradient,", t)
    for name, t in _named(what):
        if reason := _unfit(t):
            raise InvalidArgument(f"[adopt] {name} {reason}; nothing was moved")
        raise_if_asleep("adopt", name, t)
        found[id(t)] = t
    return list(found.values())


def _named(what: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(what, torch.nn.Module):
        yield from what.named_parameters()
        yield from what.named_buffers()
    elif isinstance(what, torch.optim.Optimizer):
        yield from optimizer_state(what)
    elif isinstance(what, Iterable) and not isinstance(what, (torch.Tensor, str, bytes)):
        for i, t in enumerate(what):
            yield f"tensor {i}", of_type("adopt", f"tensor {i}", t, torch.Tensor)
    else:
        raise InvalidArgument(
            f"[adopt] what is {type_text(type(what))}: give a Module, an Optimizer, or a list of tensors"
        )


def _unfit(t: torch.Tensor) -> str | None:
    """Why the tensor cannot be moved; None if it can."""
    if isinstance(t, VTensor):
        return "is a VTensor, which has its pages from a pool already"
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        return f"is {type_text(type(t))}: only plain tensors and parameters can be moved"
    if t.is_meta:
        return "is on the meta device and has no contents: materialise the module first, with to_empty()"
    if t.layout != torch.strided:
        return f"has the layout {t.layout}: only strided tensors can be moved"
    if t.is_nested:
        return "is nested: only tensors of one shape can be moved"
    if t.is_inference():
        return (
            "was made in inference mode, and torch moves no such tensor: make it outside, or take a clone()"
        )
    if t.is_quantized:
        return "is quantized: dequantize it first"
    if not has_memory(t) or _end(t) > t.untyped_storage().nbytes():
        return "has no memory: it is a wrapper of torch.func, or its storage was freed"
    if t.is_conj() or t.is_neg():
        return "is lazily conjugated or negated: call resolve_conj() and resolve_neg() first"
    if t.device.type == "cpu" and t.is_shared():
        return "lies in shared memory, where other processes would no longer see it change"
    return None


def _end(t: torch.Tensor) -> int:
    """Bytes that the storage of ``t`` needs."""
    spanned = bytes_spanned(t.shape, t.stride(), t.itemsize)
    return int(t.storage_offset()) * t.itemsize + spanned if spanned else 0


def heaps_of(module: torch.nn.Module) -> list[Heap]:
    """The heaps of open pools that the module was moved through. Throws InvalidArgument if there is none."""
    heaps = [heap for pool in open_pools() for _, heap in pool._each_heap() if heap.adopted.has(module)]
    if not heaps:
        raise InvalidArgument("[share] the module is in no pool: call vtensor.adopt(module, pool) first")
    return heaps


def open_for_readers(
    module: torch.nn.Module, addresses: list[int]
) -> tuple[list[tuple[int, int]], _core.ReaderFiles]:
    """Of the heap that has these tensors of the module: its arenas there, and their files."""
    for heap in heaps_of(module):
        if opened := heap.core.open_for_readers(addresses):
            return opened
    raise InvalidArgument(
        "[share] no tensor of the module has memory of the pool: adopt it again, if any has elements"
    )


def _copy(to: torch.UntypedStorage, source: torch.UntypedStorage) -> Iterator[int]:
    """Copies a storage in parts, and yields the bytes of each."""
    whole, wanted = whole_storage(to), whole_storage(source)
    for begin in range(0, source.nbytes(), _COPIED_AT_ONCE):
        part = slice(begin, begin + _COPIED_AT_ONCE)
        whole[part].copy_(wanted[part])
        yield wanted[part].numel()


def _over(storage: torch.UntypedStorage, t: torch.Tensor) -> torch.Tensor:
    """A tensor as ``t``, over another storage."""
    plain = torch.empty(0, dtype=t.dtype, device=storage.device)
    return plain.set_(storage, t.storage_offset(), t.size(), t.stride())


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise VTensorError(
            "[memory] torch finds no CUDA device, and its allocations on the CPU have no hook: vtensor.adopt "
            "moves a module's tensors into a pool, and vtensor.empty makes new ones"
        )


@cache
def _allocator() -> CUDAPluggableAllocator:
    """The C functions of the extension, as torch takes them. Kept for ever, because torch's cached blocks
    refer to it."""
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(_core.__file__, "vtensor_allocate", "vtensor_free")


def _torch_pool(heap: Heap, device: torch.device) -> torch.cuda.MemPool:
    if heap.torch_pool is None:
        with torch.cuda.device(device):
            heap.torch_pool = torch.cuda.MemPool(_allocator().allocator())
    return cast("torch.cuda.MemPool", heap.torch_pool)
