"""Modules and optimizers that were moved into a pool refuse their work while the pool's memory sleeps.

torch does not know that their tensors sleep: without this, a forward pass gives zeros.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import torch
from torch.jit._script import RecursiveScriptModule
from torch.utils.hooks import RemovableHandle

from vtensor import _core
from vtensor._base.arguments import tensors_in
from vtensor._base.weak import members
from vtensor.errors import Asleep

Owner = torch.nn.Module | torch.optim.Optimizer

_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those that were adopted. They also write to parameters, and read gradients, in other heaps and pools."""


class Adopted:
    """The modules that have tensors in one heap, and the hooks of these and of all optimizers while the heap
    sleeps."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: set[RemovableHandle] = set()

    def add(self, owner: Owner) -> None:
        if isinstance(owner, torch.nn.Module):
            self._modules.update(owner.modules())  # parts live on where the whole is dropped
        else:
            _optimizers.add(owner)

    def has(self, module: torch.nn.Module) -> bool:
        """Whether ``module``, or a module that it is a part of, is one of them."""
        return any(module is part for owner in members(self._modules) for part in owner.modules())

    def refuse(self) -> None:
        """Has them raise Asleep if one of their tensors sleeps, until :meth:`let_go`."""
        every = dict.fromkeys(part for module in members(self._modules) for part in module.modules())
        # Scripted modules take no hooks.
        modules = [module for module in every if not isinstance(module, RecursiveScriptModule)]
        optimizers = members(_optimizers)
        steps = [optimizer.register_step_pre_hook for optimizer in optimizers]
        registers: list[Callable[..., RemovableHandle]] = []
        registers += [module.register_forward_pre_hook for module in modules]
        owners: list[Owner] = [*modules, *optimizers]
        for owner in owners:
            registers += owner.register_state_dict_pre_hook, owner.register_load_state_dict_pre_hook
        # No bytecode of ours comes between a hook and the record of it (I17).
        self._hooks.update(map(operator.call, steps, repeat(_refuse_step)))
        self._hooks.update(map(operator.call, registers, repeat(_refuse)))
        for hook in self._hooks.copy():  # before others, which may touch what sleeps
            beside = hook.hooks_dict_ref()
            if beside is not None and hook.id in beside:
                beside.move_to_end(hook.id, last=False)

    def let_go(self) -> None:
        gone = self._hooks.copy()  # not those of a sleep that a signal handler begins meanwhile
        for hook in gone:
            hook.remove()
        self._hooks -= gone


def _refuse(owner: Owner, *arguments: object) -> None:
    if isinstance(owner, torch.nn.Module):
        tensors = chain(owner.parameters(), owner.buffers())
    else:
        tensors = chain(parameters_of(owner), (t for _, t in optimizer_state(owner)))
    for t in tensors:
        raise_if_asleep(type(owner).__name__, "its memory", t)


def _refuse_step(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
    _refuse(optimizer)
    for t in gradients_of(optimizer):
        raise_if_asleep(type(optimizer).__name__, "a gradient", t)


def raise_if_asleep(operation: str, what: str, t: torch.Tensor) -> None:
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta
    if plain and _core.is_asleep(t.untyped_storage().data_ptr()):
        raise Asleep(f"[{operation}] {what} is asleep: call wake() of its pool first")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p.grad for p in parameters_of(optimizer) if p.grad is not None)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state that lie where their parameter does, and names for them.

    Others, such as Adam's step count for a parameter on a device, have to stay where they are.
    """
    for i, p in enumerate(parameters_of(optimizer)):
        state = optimizer.state.get(p)
        for name, value in state.items() if isinstance(state, dict) else [("state", state)]:
            for t in tensors_in([value]):
                if t.device == p.device:
                    yield f"{name} of parameter {i}", t
