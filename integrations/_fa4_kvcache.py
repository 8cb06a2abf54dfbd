"""``flash_attn_with_kvcache`` for FlashAttention 4, which has the attention but not the append."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._kv import append


def with_kvcache(module: Any) -> Callable[..., Any]:
    """The function over ``flash_attn.cute``.

    Passes lengths in a tensor as ``seqused_k``. For other lengths, it passes K and V of exactly that length.
    """

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        cache_seqlens: int | torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        return_softmax_lse: bool = False,
    ) -> Any:
        given = k is not None or v is not None
        added = append(q, k_cache, v_cache, k, v, cache_seqlens) if given else 0
        batch = q.shape[0]
        if k_cache.shape[0] > batch:  # this package takes no further rows
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": tuple(None if side is None or side < 0 else side for side in window_size),
            "softcap": softcap,
            "num_splits": num_splits,
        }
        if return_softmax_lse:
            options["return_lse"] = True
        if isinstance(cache_seqlens, torch.Tensor):
            options["seqused_k"] = cache_seqlens + added if added else cache_seqlens
            result = module.flash_attn_varlen_func(q, k_cache, v_cache, **options)
        else:
            stop = k_cache.shape[1] if cache_seqlens is None else cache_seqlens + added
            result = module.flash_attn_func(
                q, k_cache.narrow(1, 0, stop), v_cache.narrow(1, 0, stop), **options
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        return (out, lse) if return_softmax_lse else out

    return flash_attn_with_kvcache
