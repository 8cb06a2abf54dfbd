"""Modules and optimizers that were moved into a pool refuse their work while the pool's memory sleeps.

torch does not know that their tensors sleep: without this, a forward pass gives zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain

import torch
from torch.utils.hooks import RemovableHandle

from vtensor import _core
from vtensor.errors import Asleep

__all__ = ["Adopted", "Owner", "optimizer_state", "raise_if_asleep"]

Owner = torch.nn.Module | torch.optim.Optimizer


class Adopted:
    """The owners of tensors in one heap, and their hooks while it sleeps."""

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []

    def add(self, owner: Owner) -> None:
        self._owners.add(owner)

    def refuse(self) -> None:
        """Has every owner raise Asleep if one of its tensors sleeps, until :meth:`let_go`."""
        for owner in list(self._owners):
            if isinstance(owner, torch.optim.Optimizer):
                for register in (
                    owner.register_step_pre_hook,
                    owner.register_state_dict_pre_hook,
                    owner.register_load_state_dict_pre_hook,
                ):
                    self._hooks.append(register(_refuse))  # type: ignore[operator]
                continue
            for module in owner.modules():
                for register in (
                    module.register_forward_pre_hook,
                    module.register_state_dict_pre_hook,
                    module.register_load_state_dict_pre_hook,
                ):
                    self._hooks.append(register(_refuse))  # type: ignore[operator]

    def let_go(self) -> None:
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()


def _refuse(owner: Owner, *arguments: object) -> None:
    tensors: Iterator[torch.Tensor]
    if isinstance(owner, torch.nn.Module):
        tensors = chain(owner.parameters(), owner.buffers())
    else:
        parameters = (p for group in owner.param_groups for p in group["params"])
        tensors = chain(parameters, (t for _, t in optimizer_state(owner)))
    for t in tensors:
        raise_if_asleep(type(owner).__name__, "its memory", t)


def raise_if_asleep(operation: str, what: str, t: torch.Tensor) -> None:
    if t.layout == torch.strided and not t.is_meta and _core.is_asleep(t.data_ptr()):
        raise Asleep(f"[{operation}] {what} is asleep: call wake() of its pool first")


def optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state that lie where their parameter does, and names for them.

    Others, such as Adam's step count for a parameter on a device, have to stay where they are.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.device == p.device:
                yield f"{name} of parameter {i}", value
