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

from vtensor import Pool

from .changes import BatchChange, Choice, finish, twin_of
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

__all__ = ["VTensorHybridLayer", "VTensorHybridSlidingWindowLayer"]

_LINEAR = (
    "number_of_states",
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
    "record_past",
)


class _TwoParts:
    """Operations on a whole layer, which apply to both of its parts."""

    _attention: type[VTensorLayer]

    def lazy_initialization(self: Any, *args: Any, **kwargs: Any) -> None:
        """Initialises K and V if their states are given by position, otherwise the linear part."""
        (self._attention if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def offload(self: Any) -> None:
        """Moves K, V and the linear states to host memory."""
        self._attention.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self: Any) -> None:
        """Brings K, V and the linear states back."""
        self._attention.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self: Any) -> None:
        """Gives the memory of K and V back, and zeroes the linear states."""
        finish(lambda: (self._attention.reset(self), LinearAttentionLayer.reset(self)))

    def reorder_cache(self: Any, beam_idx: torch.Tensor) -> None:
        """Makes sequence ``beam_idx[i]`` the i-th."""
        self._attention.reorder_cache(self, beam_idx)

    def plan_batch(self: Any, change: BatchChange, choice: Choice) -> None:
        """As ``VTensorLayer.plan_batch``, for both parts."""
        self._attention.plan_batch(self, change, choice)
        linear = twin_of(self, LinearAttentionLayer)
        states = [*linear.conv_states.values(), *linear.recurrent_states.values()]
        batch = next((state.shape[0] for state in states if state is not None), None)
        if batch is not None:
            if kept := choice(batch):
                linear.reorder_cache(torch.tensor(kept, device="cpu"))
            else:
                linear = LinearAttentionLayer(self.number_of_states)
                linear.record_past = self.record_past
            change.assign(self, _linear_states(linear))

    def crop(self: Any, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens, if the linear part recorded its past."""
        self._attention.crop(self, tokens_to_remove)

    def plan_crop(self: Any, tokens_to_remove: int) -> Callable[[], None]:
        """As ``VTensorLayer.plan_crop``, for both parts."""
        linear = twin_of(self, LinearAttentionLayer)
        linear.crop(tokens_to_remove)
        cut = self._attention.plan_crop(self, tokens_to_remove)

        def crop() -> None:
            cut()
            self.__dict__.update(_linear_states(linear))

        return crop

    def _empty_copy(self: Any) -> VTensorLayer:
        copied: VTensorLayer = self._attention._empty_copy(self)
        copied.__dict__.update(copy.deepcopy(_linear_states(self)))
        return copied

    def __getstate__(self: Any) -> dict[str, Any]:
        state: dict[str, Any] = self._attention.__getstate__(self)
        return state | {"linear": _linear_states(self)}

    def _restore(self: Any, state: dict[str, Any]) -> None:
        self.__dict__.update(state["linear"])
        self._attention._restore(self, state)


def _linear_states(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in _LINEAR}


class VTensorHybridLayer(_TwoParts, LinearAttentionAndFullAttentionLayer, VTensorLayer):
    """A layer of full attention and linear attention: ``VTensorLayer`` and ``LinearAttentionLayer``."""

    _attention = VTensorLayer

    def __init__(
        self, max_len: int | None = None, pool: Pool | None = None, *, number_of_states: int = 1
    ) -> None:
        VTensorLayer.__init__(self, max_len, pool)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class VTensorHybridSlidingWindowLayer(
    _TwoParts, LinearAttentionAndSlidingWindowAttentionLayer, VTensorSlidingWindowLayer
):
    """A layer of windowed attention and linear attention: ``VTensorSlidingWindowLayer`` and
    ``LinearAttentionLayer``."""

    _attention = VTensorSlidingWindowLayer

    def __init__(
        self,
        sliding_window: int,
        max_len: int | None = None,
        pool: Pool | None = None,
        *,
        number_of_states: int = 1,
    ) -> None:
        VTensorSlidingWindowLayer.__init__(self, sliding_window, max_len, pool)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
