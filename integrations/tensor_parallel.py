"""Tensor-parallel generation that fails on all ranks, or on none.

Each rank of a model loaded with ``tp_plan="auto"`` has a ``VTensorCache`` of its own for its local heads. A
forward is full of collectives. If a rank ran out of memory in the middle of one, the other ranks would wait
for it. So each rank maps the memory of a step before the forward, and the ranks then agree whether all of
them succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache as remember
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache

import vtensor
from vtensor import InvalidArgument, VTensorError

from .transformers import VTensorCache, VTensorLayer
from .transformers.release import CACHE

__all__ = ["in_agreement"]


@contextmanager
def in_agreement(model: torch.nn.Module, cache: VTensorCache, timeout: float = 60.0) -> Iterator[None]:
    """Makes every forward of ``model`` over ``cache`` begin on all ranks or on none::

        cache = VTensorCache(model.config)
        with in_agreement(model, cache):
            model.generate(**inputs, past_key_values=cache)

    Before a forward, each rank maps its memory (``VTensorCache.prepare``). Then the ranks exchange one number
    over a gloo group of their own, so that no device waits. Before the first forward over an empty cache, a
    forward of one token over another cache finds the sizes of the local K and V. If an error ends the block
    on one rank between two forwards, it ends the block on the others too.

    Args:
        model: the same model on every rank of the default process group.
        cache: the cache of this rank.
        timeout: the most seconds to wait for the other ranks.

    Raises:
        InvalidArgument: if there is no process group.
        VTensorError: on every rank, the error of the first rank that failed, of the same class
            (``OutOfPages``, ...). The caches are as before that forward (I8). Also if the other ranks do not
            answer in time.
    """
    if not dist.is_initialized():
        raise InvalidArgument(
            "[in_agreement] no process group: run under torchrun, and load the model with tp_plan='auto' "
            "first"
        )
    ranks = _Ranks(timeout)

    def before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get(CACHE, kwargs.get("past_key_values")) is not cache:
            return
        inputs = args[0] if args else kwargs.get("input_ids")
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        assert inputs is not None, "a model is called with input_ids or with inputs_embeds"
        layers = [layer for layer in cache.layers if isinstance(layer, VTensorLayer)]
        # K and V without tokens may be of another batch, or made on this rank alone.
        ready = any(layer.get_seq_length() for layer in layers)
        sizes = [] if ready else list(_local_states(module, inputs, cache))
        error: VTensorError | None = None
        try:
            for layer, states in sizes:
                layer.reset()
                layer.lazy_initialization(*states)
            cache.prepare(inputs.shape[1])
        except VTensorError as refused:
            error = refused
        try:
            ranks.agree(error)
        except BaseException:
            for layer in layers:
                layer.settle() if ready else layer.reset()
            raise

    handle = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield
    except BaseException as error:
        if not ranks.disagreed:
            with suppress(VTensorError):  # the error of this rank is the cause, and is being raised
                ranks.agree(error)
        raise
    else:
        ranks.agree(None)
    finally:
        handle.remove()


class _Ranks:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.group = _group(dist.group.WORLD, timeout)
        self.disagreed = False

    def agree(self, error: BaseException | None) -> None:
        """Returns if no rank has an error. Otherwise raises the error of the first such rank on all ranks."""
        flag = torch.tensor(int(error is None), device="cpu")
        try:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.group)
            if flag:
                return
            self.disagreed = True
            errors: list[tuple[str, str] | None] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(errors, error and (type(error).__name__, str(error)), group=self.group)
        except RuntimeError as lost:
            self.disagreed = True
            raise VTensorError(
                f"[in_agreement] the other ranks did not answer within {self.timeout} s: see their own "
                "errors, or raise timeout="
            ) from (error or lost)
        rank, (name, message) = next((r, e) for r, e in enumerate(errors) if e is not None)
        kind = getattr(vtensor, name, None)
        if isinstance(kind, type) and issubclass(kind, VTensorError):
            raise kind(f"[in_agreement] on rank {rank}: {message}") from error
        raise VTensorError(f"[in_agreement] on rank {rank}: {name}: {message}") from error


@remember  # because making a group is a collective too, and torch keeps each group until the end
def _group(world: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group


def _local_states(
    model: torch.nn.Module, inputs: torch.Tensor, cache: VTensorCache
) -> Iterator[tuple[VTensorLayer, list[torch.Tensor]]]:
    """Empty K and V of each layer of `cache`, of the shape that they will have for a batch of `inputs`."""
    probe = DynamicCache(config=model.config)
    name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
    with torch.no_grad():
        model(**{name: inputs[:1, :1], CACHE: probe}, use_cache=True)
    for layer, found in zip(cache.layers, probe.layers, strict=True):
        if isinstance(layer, VTensorLayer) and found.keys is not None:
            yield layer, [x[:, :, :0].expand(len(inputs), -1, -1, -1) for x in (found.keys, found.values)]
