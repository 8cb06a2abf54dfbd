"""FlashAttention's three functions over torch's own kernels.

On CUDA in float16 and bfloat16 they call ``aten._flash_attention_forward``, as torch's ``varlen_attn`` does.
They do not call ``varlen_attn`` itself, because its arguments differ between releases. Elsewhere they call
SDPA, as a reference that runs the same code on a CPU. Lengths, windows and causality follow FlashAttention 2:
masks are lower-right, and a query that attends to no key gives zeros. Rows of different lengths are computed
one by one, over exactly their positions, so nothing past a length is read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vtensor import InvalidArgument

from ._kv import append
from .sdpa import scaled_dot_product_attention

Lengths = int | torch.Tensor | None
Window = tuple[int | None, int | None]
_Sides = tuple[int, int]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    **others: Any,
) -> torch.Tensor:
    """FlashAttention 2's function of that name: q ``[B, Sq, Hq, D]``, k and v ``[B, Sk, Hkv, D]``."""
    _refuse_others("flash_attn_func", dropout_p=dropout_p, **others)
    return _attend(q, k, v, softmax_scale, _window(causal, window_size))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    **others: Any,
) -> torch.Tensor:
    """FlashAttention 2's function of that name: q ``[Tq, Hq, D]``, k and v ``[Tk, Hkv, D]``, packed."""
    _refuse_others("flash_attn_varlen_func", dropout_p=dropout_p, **others)
    window = _window(causal, window_size)
    if _has_flash(q):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _flash(q, k, v, lengths, softmax_scale, window)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (a, b), (c, d) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        # narrow raises past the end; a slice would be shorter.
        queries, keys, values = q.narrow(0, a, b - a), k.narrow(0, c, d - c), v.narrow(0, c, d - c)
        out[a:b] = _attend(queries[None], keys[None], values[None], softmax_scale, window)[0]
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Lengths = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """FlashAttention 2's function of that name: q ``[B, Sq, Hq, D]``, caches ``[rows, S, Hkv, D]``.

    The host reads lengths, left pads and batch indices in tensors, and waits for the device to do so.
    """
    others.update(rotary_cos=rotary_cos, rotary_sin=rotary_sin, block_table=block_table, softcap=softcap)
    _refuse_others("flash_attn_with_kvcache", **others)
    batch, window = q.shape[0], _window(causal, window_size)
    added = 0 if k is v is None else append(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx)
    if not any(isinstance(t, torch.Tensor) for t in (cache_seqlens, cache_batch_idx, cache_leftpad)):
        stop = k_cache.shape[1] if cache_seqlens is None else int(cache_seqlens) + added
        keys, values = (t.narrow(0, 0, batch).narrow(1, 0, stop) for t in (k_cache, v_cache))
        return _attend(q, keys, values, softmax_scale, window)
    stops = [n + added for n in _numbers(cache_seqlens, batch, k_cache.shape[1])]
    starts = _numbers(cache_leftpad, batch, 0)
    rows = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    out = q.new_empty(*q.shape[:3], v_cache.shape[-1])
    for b, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True)):
        keys, values = (t[row].narrow(0, start, stop - start) for t in (k_cache, v_cache))
        out[b] = _attend(q[b : b + 1], keys[None], values[None], softmax_scale, window)[0]
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: _Sides
) -> torch.Tensor:
    """Attention of ``[B, S, H, D]`` tensors over all positions of ``k`` and ``v``."""
    queries, length = q.shape[1], k.shape[1]
    if _has_flash(q):
        return _flash(q, k, v, (None, None, queries, length), scale, window)
    mask = None
    if window not in ((-1, 0), (-1, -1)):
        left, right = window
        mask = q.new_ones(queries, length, dtype=torch.bool)
        if right >= 0:
            mask = mask.tril(length - queries + right)
        if left >= 0:
            mask = mask.triu(length - queries - left)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options: Any = {"is_causal": window == (-1, 0), "scale": scale, "enable_gqa": True}
    return scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Any, scale: float | None, window: _Sides
) -> torch.Tensor:
    """Torch's own FlashAttention 2 over ``[B, S, H, D]``, or over packed ``[T, H, D]``.

    ``lengths`` are the starts of packed queries and keys, or None twice, and the longest of both. Heads may
    be grouped. The arguments mean the same in torch 2.10 to 2.13: the lower-right window alone defines the
    mask, and is_causal is set for the window (-1, 0).
    """
    kernel = torch.ops.aten._flash_attention_forward
    sides = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    out: torch.Tensor = kernel(q, k, v, *lengths, 0.0, window == (-1, 0), False, scale=scale, **sides)[0]
    return out


def _has_flash(q: torch.Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


def _window(causal: bool, window_size: Window) -> _Sides:
    """(left, right) as in FlashAttention 2: -1 means no bound. FlashAttention 4 writes None for that."""
    left, right = (-1 if side is None or side < 0 else side for side in window_size)
    return left, 0 if causal else right


def _numbers(value: Lengths, batch: int, default: int) -> list[int]:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [default if value is None else value] * batch


def _refuse_others(operation: str, **others: Any) -> None:
    for hint in ("deterministic", "rotary_interleaved", "num_splits"):  # which change no result here
        others.pop(hint, None)
    asked = sorted(
        name
        for name, value in others.items()
        if isinstance(value, torch.Tensor) or value not in (None, False, 0)
    )
    if asked:
        raise InvalidArgument(
            f"[{operation}] {', '.join(asked)}, which torch's own kernels do not take: install "
            "FlashAttention (pip install flash-attn --no-build-isolation), or leave it out"
        )
