"""The view of K or V that attention gets in a step of one token on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .. import sdpa

__all__ = ["SingleStepView"]

_SDPA = functional.scaled_dot_product_attention


class SingleStepView(torch.Tensor):
    """K or V of which SDPA reads each head once.

    If a step has no mask, transformers calls SDPA with ``enable_gqa``. On the host, that reads K and V once
    for each query head, which takes twice the time at 8k tokens. With this view, SDPA stacks the query heads
    of a group instead. See ``integrations.sdpa``. In every other operation it is a plain tensor. All results
    are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if operation is _SDPA:
                return _attend(*args, **kwargs or {})
            return operation(*args, **kwargs or {})


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # The function of integrations.sdpa gives a mask and is_causal= another meaning than torch does.
    if enable_gqa and attn_mask is None and not is_causal:
        return sdpa.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=True
        )
    return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
