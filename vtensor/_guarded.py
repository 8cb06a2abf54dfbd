"""Torch's writes to tensors whose shared pages are mapped read-only (CUDA): what they write to is parted
first (I6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vtensor._processes import keep_private
from vtensor.tensor import VTensor

# They change a tensor's shape or storage and none of its elements, whatever their schema says.
_METADATA_ONLY = frozenset(["as_strided_", "detach", "detach_", "resize_", "resize_as_", "set_"])


class GuardedVTensor(VTensor):
    """A VTensor some of whose pages are shared where a write would fault."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _METADATA_ONLY:
                return func(*args, **kwargs)
            guarded = [t for t in _flat([args, kwargs]) if isinstance(t, GuardedVTensor) and t.length]
            with _PartBeforeWrite({t.untyped_storage().data_ptr(): t for t in guarded}):
                return func(*args, **kwargs)


keep_private(GuardedVTensor)


class _PartBeforeWrite(TorchDispatchMode):
    """Has a tensor own its pages before an operator runs that, by its schema, writes to its storage."""

    def __init__(self, guarded: dict[int, GuardedVTensor]) -> None:
        super().__init__()
        self._guarded = guarded  # by the address of the storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds, at the first use

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and func._schema.name.removeprefix("aten::") not in _METADATA_ONLY:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for written in _flat([value]):
                    owner = self._guarded.get(written.untyped_storage().data_ptr())
                    if owner is not None:
                        owner.own(0, owner.length)
        return func(*args, **kwargs)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
