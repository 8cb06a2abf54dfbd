"""The layers of ``VTensorCache`` for models that run attention and linear attention in one layer.

K and V are VTensors. The states of the linear part do not grow, and are Hugging Face's own. Follows
``LinearAttentionAndFullAttentionLayer`` in ``transformers/cache_utils.py`` of transformers 5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .changes import BatchChange, Choice, finish, twin_of
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer


class _TwoParts(VTensorLayer):
    """Operations on a whole layer, which apply to both of its parts: K and V by ``super()``, then the
    linear part."""

    get_max_length = LinearAttentionLayer.get_max_length  # as transformers' layers of two parts

    def __init__(self, *args: Any, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises K and V if their states are given by position, otherwise the linear part."""
        if args:
            super().lazy_initialization(*args, **kwargs)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        """Moves K, V and the linear states to host memory."""
        super().offload()
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Brings K, V and the linear states back."""
        super().prefetch()
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        """Gives the memory of K and V back, and zeroes the linear states."""
        finish(lambda: [part.reset(self) for part in (VTensorLayer, LinearAttentionLayer)])

    def plan_batch(self, change: BatchChange, choice: Choice) -> None:
        """As ``VTensorLayer.plan_batch``, for both parts."""
        super().plan_batch(change, choice)
        linear: Any = twin_of(self, LinearAttentionLayer)
        states = [*linear.conv_states.values(), *linear.recurrent_states.values()]
        batch = next((state.shape[0] for state in states if state is not None), None)
        if batch is not None:
            if kept := choice(batch):
                linear.reorder_cache(torch.tensor(kept, device="cpu"))
            change.assign(self.__dict__, _linear_states(linear) if kept else emptied(self))

    def plan_crop(self, tokens_to_remove: int) -> Callable[[], None]:
        """As ``VTensorLayer.plan_crop``, for both parts. The linear part must have recorded its past."""
        linear = twin_of(self, LinearAttentionLayer)
        linear.crop(tokens_to_remove)
        cut = super().plan_crop(tokens_to_remove)

        def crop() -> None:
            cut()
            self.__dict__.update(_linear_states(linear))

        return crop

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensorLayer:
        """As ``VTensorLayer.__deepcopy__``, with copies of the linear states."""
        copied = super().__deepcopy__(memo)
        copied.__dict__.update(copy.deepcopy(_linear_states(self)))
        return copied


def emptied(layer: Any) -> dict[str, Any]:
    """The attributes of a linear part without states. After its own ``reset`` it would keep the batch."""
    return dict(vars(LinearAttentionLayer(layer.number_of_states)), record_past=layer.record_past)


def empty(layer: Any) -> None:
    """Empties a layer, which then takes any batch."""
    if isinstance(layer, LinearAttentionLayer):  # first: its reset would write to tensors of inference mode
        vars(layer).update(emptied(layer))
    layer.reset()


def _linear_states(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in emptied(layer)}


class VTensorHybridLayer(_TwoParts, LinearAttentionAndFullAttentionLayer):
    """Full attention and linear attention: a ``VTensorLayer`` with ``number_of_states=``."""


class VTensorHybridSlidingWindowLayer(
    _TwoParts, VTensorSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Windowed attention and linear attention: a ``VTensorSlidingWindowLayer`` with ``number_of_states=``."""
