"""Torch's modes, such as FakeTensorMode and vmap, and tensors of our own that they must not touch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_count_function_modes = torch._C._len_torch_function_stack
_count_transforms = torch._C._functorch.get_dynamic_layer_stack_depth  # of torch.func
_NOTHING = contextlib.nullcontext()  # holds no state: an interrupt before its end leaves none behind


def without_modes() -> contextlib.AbstractContextManager[None]:
    """A context in which torch makes plain tensors that hold memory, outside inference mode.

    Tensors of our own are made in it: a fake tensor and torch.func's have no memory, and an inference tensor
    cannot be resized later. csrc/bind/torch_bridge.h has the same for the core.
    """
    modes = _count_dispatch_modes() or _count_function_modes() or _count_transforms()
    return _outside_modes() if modes or torch.is_inference_mode_enabled() else _NOTHING


@contextlib.contextmanager
def _outside_modes() -> Iterator[None]:
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            yield


def empty_bytes(nbytes: int, pinned: bool) -> torch.Tensor:
    """Host memory for the core."""
    with without_modes():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def whole_storage(storage: Any) -> torch.Tensor:
    """The bytes of ``storage``, as a tensor."""
    with without_modes():
        plain = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return plain.set_(storage, 0, (storage.nbytes(),), (1,))
