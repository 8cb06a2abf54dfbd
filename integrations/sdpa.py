"""``scaled_dot_product_attention`` over a cache: decode, prefill in parts, grouped heads, either layout.

Torch's own function takes a VTensor too, and is enough for one query without a mask. This function differs:

- ``is_causal`` is lower-right: the last query attends to the last key. Torch's is upper-left: over a longer
  cache, the first of several queries attends to the first key only.
- A VTensor that grows along dimension 1, ``[B, S, H, D]``, is transposed to the ``[B, H, S, D]`` of SDPA.
- On the CPU, a step of one query stacks the query heads of a group, because ``enable_gqa`` reads K and V once
  for each query head there.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from vtensor import InvalidArgument
from vtensor.attention import AttentionSpec

from ._kv import KV, TracedSpec, leased, owner_of
from .full_extent import FullExtent

__all__ = ["scaled_dot_product_attention"]

_OPERATION = "scaled_dot_product_attention"
_GROUPED, _ALIKE = (
    AttentionSpec(_OPERATION, "query", "key", "value", heads_first=True, grouped=grouped)
    for grouped in (True, False)
)
_TRACED_GROUPED, _TRACED_ALIKE = TracedSpec("sdpa, grouped", _GROUPED), TracedSpec("sdpa", _ALIKE)


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
        InvalidArgument: if shapes, dtypes or devices do not fit; if the mask has another length, shape or
            dtype; if both masks are given; or if a slot of a KVCache does not have the positions.
    """
    if type(key) is FullExtent:
        key = key.owner
    if type(value) is FullExtent:
        value = value.owner
    if is_dynamo_compiling():
        keys, values, cache = (_TRACED_GROUPED if enable_gqa else _TRACED_ALIKE).take(query, key, value)
    else:
        keys, values, cache = (_GROUPED if enable_gqa else _ALIKE).take(query, key, value)
    of_query, of_keys = query.shape, keys.shape
    heads, queries, length = of_query[1], of_query[2], of_keys[2]
    groups = heads // of_keys[1]
    if attn_mask is not None:
        _check_mask(attn_mask, query, length, is_causal)
    mask, upper_left = attn_mask, False
    if is_causal and queries > 1:
        if queries == length:  # both alignments are the same
            upper_left = True
        else:
            mask = _lower_right(queries, length, query.device)
    with leased(query, owner_of(key), owner_of(value), cache=cache):
        if groups == 1 or queries != 1 or query.device.type != "cpu":
            return functional.scaled_dot_product_attention(
                query, keys, values, mask, dropout_p, upper_left, scale=scale, enable_gqa=groups > 1
            )
        # With one query per head, the heads of a group become the queries of one head.
        batch, _, _, size = query.shape
        stacked = query.reshape(batch, heads // groups, groups, size)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], heads // groups, groups, mask.shape[-1])
        out = functional.scaled_dot_product_attention(stacked, keys, values, mask, dropout_p, scale=scale)
        return out.reshape(batch, heads, 1, values.shape[-1])


def _check_mask(mask: torch.Tensor, query: torch.Tensor, length: int, is_causal: bool) -> None:
    batch, heads, queries, _ = query.shape
    if is_causal:
        raise InvalidArgument(f"[{_OPERATION}] attn_mask and is_causal=True: put both into attn_mask")
    if mask.ndim < 2 or mask.shape[-2] not in (1, queries) or mask.shape[-1] not in (1, length):
        raise InvalidArgument(
            f"[{_OPERATION}] attn_mask ends in {list(mask.shape[-2:])}, there are {queries} queries and "
            f"{length} keys: make the mask after appending"
        )
    # Checked before heads are stacked: a mask per K head would fit the stacked heads, with another meaning.
    if mask.ndim > 4 or any(
        n not in (1, of) for n, of in zip(reversed(mask.shape[:-2]), (heads, batch), strict=False)
    ):
        raise InvalidArgument(
            f"[{_OPERATION}] attn_mask is {list(mask.shape)}, the query has {batch} sequences of {heads} "
            "heads: give a mask that broadcasts to [batch, heads, queries, keys]"
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise InvalidArgument(
            f"[{_OPERATION}] attn_mask is {mask.dtype}, query {query.dtype}: give a mask of bool, or of the "
            "query's dtype"
        )
    if mask.device != query.device:
        raise InvalidArgument(
            f"[{_OPERATION}] attn_mask is on {mask.device}, query on {query.device}: move it there"
        )


def _lower_right(queries: int, length: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and queries < length:
        # A mask by name, without a tensor, which the fused kernels take.
        bias: torch.Tensor = causal_lower_right(queries, length)
        return bias
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)
