"""``scaled_dot_product_attention`` over a cache: decode, prefill in parts, grouped heads, either layout.

Torch's own function takes a VTensor too, and is enough for one query without a mask. This function differs:

- ``is_causal`` is lower-right: the last query attends to the last key. Torch's is upper-left: over a longer
  cache, the first of several queries attends to the first key only.
- A VTensor that grows along dimension 1, ``[B, S, H, D]``, is transposed to the ``[B, H, S, D]`` of SDPA.
- On the CPU, a step of one query stacks the query heads of a group, because ``enable_gqa`` reads K and V once
  for each query head there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from vtensor import InvalidArgument
from vtensor.attention import views

from ._kv import KV, leased, tensor_of, traced_views

__all__ = ["SingleStepView", "scaled_dot_product_attention"]

_OPERATION = "scaled_dot_product_attention"
_SDPA = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: KV,
    value: KV,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with a lower-right ``is_causal``.

    Args:
        query: ``[B, Hq, Sq, D]``. With ``is_causal``, the last ``Sq`` positions of the sequence.
        key, value: ``[B, Hkv, Sk, D]``: plain tensors of any strides, VTensors that grow along dimension 2,
            or VTensors ``[B, Sk, Hkv, D]`` that grow along dimension 1. A FullExtent stands for its VTensor.
            A view of a KVCache's layer must have only positions that each slot has, even with a mask.
        attn_mask: a tensor that broadcasts to ``[B, Hq, Sq, Sk]``: bool, where True means to attend, or
            float32 or the query's dtype, which is added to the scores.
        dropout_p, scale: as for torch's function.
        is_causal: query ``i`` attends to keys up to ``Sk - Sq + i``. A query that attends to none gives
            zeros.
        enable_gqa: whether ``Hq`` may be a multiple of ``Hkv``.

    Returns:
        ``[B, Hq, Sq, Dv]``.

    Raises:
        InvalidArgument: if a slot of a KVCache does not have the positions, one of two VTensors is shorter,
            or both masks are given. Other errors are torch's.
    """
    key, value = tensor_of(key), tensor_of(value)
    take = traced_views if is_dynamo_compiling() else views
    keys, values, cache = take(_OPERATION, key, value, True)
    queries, length = query.shape[-2], keys.shape[-2]
    mask = attn_mask
    if is_causal and mask is not None:
        raise InvalidArgument(f"[{_OPERATION}] attn_mask and is_causal=True: put both into attn_mask")
    if is_causal and not 1 < queries == length:  # else torch's alignment is the same
        is_causal = False
        mask = _lower_right(queries, length, query.device) if queries > 1 else None
    with leased(_OPERATION, query, key, value, cache=cache):
        attend = functional.scaled_dot_product_attention
        grouped = enable_gqa and not query.shape[-3] == keys.shape[-3] == values.shape[-3]
        if not (grouped and query.is_cpu and queries == 1 and _stacks(query, keys, values, mask)):
            return attend(query, keys, values, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
        # With one query per head, the heads of a group become the queries of one head.
        split = -3, (keys.shape[-3], -1)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask.unflatten(*split).squeeze(-2)
        out = attend(query.unflatten(*split).squeeze(-2), keys, values, mask, dropout_p, scale=scale)
        return out.flatten(-3, -2).unsqueeze(-2)


def _stacks(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether torch would take these. A mask for K's heads would fit the stacked heads, and mean another."""
    heads, groups = query.shape[-3], keys.shape[-3]
    shape = (1, 1, 1) if mask is None else mask.shape
    fits = len(shape) > 1 and shape[-2] == 1 and (len(shape) == 2 or shape[-3] in (1, heads))
    return fits and 0 < groups == values.shape[-3] and heads % groups == 0


def _lower_right(queries: int, length: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and queries < length:
        # A mask by name, without a tensor, which the fused kernels take.
        bias: torch.Tensor = causal_lower_right(queries, length)
        return bias
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)


class SingleStepView(torch.Tensor):
    """K or V of which SDPA reads each head once.

    If a step has no mask, transformers calls SDPA with ``enable_gqa``. On the host, that reads K and V once
    for each query head, which takes twice the time at 8k tokens. With this view, SDPA stacks the query heads
    of a group instead. In every other operation it is a plain tensor. All results are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The function above gives a mask and is_causal= another meaning than torch does.
        masked = len(args) > 3 or kwargs.get("attn_mask") is not None or kwargs.get("is_causal")
        with torch._C.DisableTorchFunctionSubclass():
            if operation is _SDPA and kwargs.get("enable_gqa") and not masked:
                return scaled_dot_product_attention(*args, **kwargs)
            return operation(*args, **kwargs)
