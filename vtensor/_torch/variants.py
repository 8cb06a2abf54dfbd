"""The classes of a VTensor in states that need a hook around torch's functions.

There are three: tensors with shared pages, where a write would fault, tensors that are asleep, and closed
ones. The core sets a tensor's class (csrc/bind/tensor_core.cpp). In a forked child all tensors are in one
state, so there each of the classes refuses torch's functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vtensor import _core
from vtensor._base.arguments import tensors_in
from vtensor.errors import Asleep, Closed
from vtensor.tensor import VTensor

# These change a tensor's shape or storage but no element, although their schema says that they write.
_METADATA_ONLY = frozenset(["as_strided_", "detach", "detach_", "resize_", "resize_as_", "set_"])
# Batch norm writes these arguments, and its schemas do not say so.
_WRITTEN_UNSAID = frozenset(["running_mean", "running_var"])


# These read no element, and give none; nor do other properties than these.
_NO_ELEMENT = frozenset(
    "__len__ __repr__ data_ptr dim element_size get_device is_complex is_contiguous "
    "is_floating_point nelement ndimension numel size storage_offset stride untyped_storage".split()
)
_ELEMENTS = frozenset("__cuda_array_interface__ H T imag mH mT real".split())


def name_of(func: Any) -> str:
    """The name of one of torch's functions as its caller knows it: ``shape``, not the ``__get__`` of it."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


class CopyOnWriteVTensor(VTensor):
    """A VTensor with shared pages that are mapped read-only (CUDA): unshares them before torch writes
    (I6)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _METADATA_ONLY:
                return func(*args, **kwargs)
            with _UnshareBeforeWrite(_shared([args, kwargs])):
                return func(*args, **kwargs)


class AsleepVTensor(VTensor):
    """A VTensor whose pages are away: every torch operation raises Asleep."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in([args, kwargs or {}]):
            if not isinstance(tensor, AsleepVTensor):
                continue
            name = name_of(func)
            is_property = getattr(func, "__name__", "") == "__get__"
            if tensor._core.asleep and (name in _ELEMENTS if is_property else name not in _NO_ELEMENT):
                raise Asleep(f"[{name}] the VTensor is asleep, without memory: call wake() of its pool first")
            tensor._core.wake(tensor)  # Pool.wake was interrupted before it set the tensor's class
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ClosedVTensor(VTensor):
    """A closed VTensor: every torch operation raises Closed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise Closed(
            f"[{name_of(func)}] the VTensor is closed: use what reallocate() returned, make a new one, or "
            "keep an alias() before closing"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise Closed("[copy.deepcopy] the VTensor is closed")


def refuse_in_forked_child(
    cls: type[VTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> None:
    """``__torch_function__`` of what a forked child has of its parent."""
    _core.refuse_in_forked_child(name_of(func))


def _leave_to_parent() -> None:
    """Has every torch operation on a VTensor raise, in a process that was just forked (I13)."""
    if not _core.in_forked_child():
        return  # the parent has made nothing yet
    for tensor_class in (VTensor, CopyOnWriteVTensor, AsleepVTensor, ClosedVTensor):
        setattr(tensor_class, "__torch_function__", classmethod(refuse_in_forked_child))  # noqa: B010


class _UnshareBeforeWrite(TorchDispatchMode):
    """Unshares a tensor's pages before an operator that writes to its storage, according to its schema."""

    def __init__(self, shared: dict[int, CopyOnWriteVTensor]) -> None:
        super().__init__()
        self._shared = shared  # by the address of the storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler at the first use, which takes seconds

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") not in _METADATA_ONLY:
            for i, argument in enumerate(func._schema.arguments):
                said = argument.alias_info is not None and argument.alias_info.is_write
                if not said and argument.name not in _WRITTEN_UNSAID:
                    continue
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for written in tensors_in([value]):
                    if written.layout is not torch.strided:
                        continue  # it has no storage
                    owner = self._shared.get(written.untyped_storage().data_ptr())
                    if owner is not None:
                        owner.unshare(0, owner.length)
        return func(*args, **kwargs)


# A function of its own, because a loop inside the ``with`` is not safe (I17): CPython 3.12 and 3.13 leave the
# loop's jump back out of the exception table, so a Ctrl-C there would skip ``__exit__``.
def _shared(values: Any) -> dict[int, CopyOnWriteVTensor]:
    """The tensors with shared pages in nested lists, tuples and dicts, by the address of their storage."""
    return {
        t.untyped_storage().data_ptr(): t
        for t in tensors_in(values)
        if isinstance(t, CopyOnWriteVTensor) and t.length
    }


os.register_at_fork(after_in_child=_leave_to_parent)
_core.use_tensor_classes(
    open=VTensor, copy_on_write=CopyOnWriteVTensor, asleep=AsleepVTensor, closed=ClosedVTensor
)
