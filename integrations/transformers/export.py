"""Registers ``VTensorCache`` with ``torch.export`` as the plain K and V that it holds.

Follows ``register_dynamic_cache_export_support`` of transformers 5.23 (``integrations/executorch.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree  # as transformers does: the public name is newer
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from vtensor import InvalidArgument

from .cache import VTensorCache, holds_nothing
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

# For each layer: its window or None, and whether it holds K and V.
Context = list[tuple[int | None, bool]]

_EXPORTED = (VTensorLayer, VTensorSlidingWindowLayer, DynamicLayer, DynamicSlidingWindowLayer)


def register_export() -> None:
    """Makes a cache a possible input and output of ``torch.export``.

    A traced program cannot map memory. In it, and in its outputs, the layers of the cache are those of
    ``DynamicCache``.
    """
    pytree.register_pytree_node(
        VTensorCache,
        _flatten,
        _unflatten,
        serialized_type_name=f"{VTensorCache.__module__}.{VTensorCache.__name__}",
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(cache: VTensorCache) -> tuple[list[torch.Tensor], Context]:
    leaves: list[torch.Tensor] = []
    context: Context = []
    for layer in cache.layers:
        if type(layer) not in _EXPORTED and not holds_nothing(layer):
            raise InvalidArgument(
                f"[VTensorCache] a {type(layer).__name__} in an input of torch.export, which takes K and V "
                "alone: export the model without a cache"
            )
        states: list[Any] = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        held = all(x is not None for x in states)
        context.append((getattr(layer, "sliding_window", None), held))
        leaves += states if held else []
    return leaves, context


def _flatten_with_keys(cache: VTensorCache) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
    leaves, context = _flatten(cache)
    return [(pytree.SequenceKey(number), leaf) for number, leaf in enumerate(leaves)], context


def _unflatten(leaves: Iterable[Any], context: Context) -> VTensorCache:
    states = iter(leaves)
    layers: list[tuple[Any, ...]] = []
    for window, held in context:
        keys, values = (next(states), next(states)) if held else (None, None)
        layers.append((keys, values, None if window is None else torch.tensor(window, device="cpu")))
    return VTensorCache.over(DynamicCache(layers))
