"""FlashAttention for left-padded batches that reads the cache in place.

transformers' own FlashAttention path unpads: at every step it gathers the valid tokens of the whole cache
into a new tensor. ``flash_attn_with_kvcache`` instead takes the number of padding tokens of each sequence
(``cache_leftpad``) and skips them while it reads.

Follows ``integrations/flash_attention.py`` and ``flash_attention_mask`` of transformers 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from vtensor import InvalidArgument

from ..flash_attention import flash_attn_with_kvcache

# Not "flash...": transformers searches for a package to load if the name contains that.
_NAME = "vtensor"


def register_attention(kernel: Callable[..., torch.Tensor] | None = None) -> str:
    """Registers ``attn_implementation="vtensor"`` with transformers. Returns that name.

    It is for decoder-only models with full or sliding-window attention, prompts padded on the left, and a
    cache of exactly the tokens so far (``VTensorCache``, ``DynamicCache``)::

        model.set_attn_implementation(register_attention())

    Args:
        kernel: a ``flash_attn_with_kvcache``. Defaults to that of ``vtensor.integrations.flash_attention``.

    A forward without padding compiles with ``fullgraph=True`` if the kernel does. With padding, the host
    reads the mask once a forward, which breaks the graph.

    A forward raises InvalidArgument before the launch for padding that is not on the left, a mask that does
    not fit the cache or is more than causal, chunked attention past its first chunk, dropout, attention
    sinks, position biases, and a model that has its window, or that it is causal, in its mask alone.
    """

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = 0,  # 0: the model names none
        softcap: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        # Query, key and value are [batch, heads, tokens, head_dim]. The mask is [batch, tokens of K]; False
        # means padding.
        for name in ("dropout", "s_aux", "position_bias", "cache"):
            given = kwargs.get(name)
            if given is not None and not (name == "dropout" and given == 0):
                raise InvalidArgument(
                    f"[attention] {name}=, which flash_attn_with_kvcache has not: use another "
                    "attn_implementation for this model"
                )
        tokens = key.shape[2]
        if attention_mask is not None and attention_mask.shape != (key.shape[0], tokens):
            raise InvalidArgument(
                f"[attention] a mask {tuple(attention_mask.shape)} for K of {key.shape[0]} sequences of "
                f"{tokens} tokens: pass one that covers the tokens in the cache and the new ones"
            )
        config = getattr(module, "config", None)
        window = getattr(config, "sliding_window", None) or tokens
        masked = set(getattr(config, "layer_types", None) or ()) != {"full_attention"}
        if sliding_window == 0 and tokens > window and masked:
            raise InvalidArgument("[attention] a window in the mask alone: use another attn_implementation")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if not causal and query.shape[2] > 1 and getattr(module, "is_decoder", False):
            source = vars(sys.modules[type(module).__module__]).values()
            if not any(getattr(each, "_supports_sdpa", False) for each in source):  # as BigBird-Pegasus
                raise InvalidArgument("[attention] causal by the mask alone: use another attn_implementation")
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if sliding_window and tokens > sliding_window:
            options["window_size"] = (sliding_window - 1, 0)
        if attention_mask is not None:
            options["cache_leftpad"] = tokens - attention_mask.sum(-1, dtype=torch.int32)
        output = (kernel or flash_attn_with_kvcache)(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            cache_seqlens=tokens,
            softmax_scale=scaling,
            causal=causal,
            **options,
        )
        return output, None

    AttentionInterface.register(_NAME, forward)
    AttentionMaskInterface.register(_NAME, _left_padding)
    return _NAME


def unregister_attention() -> None:
    """Undoes ``register_attention``. Models that are set to use it fail afterwards."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(_NAME, None)


def _left_padding(
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """The mask that ``forward`` gets for K of ``kv_length`` tokens: [batch, kv_length], or None without
    padding.

    transformers calls it once a forward for each type of layer. Only here does the host wait for the device.
    """
    prefix = getattr(config, "use_bidirectional_attention", None) is True  # as PaliGemma's text model
    whole = not allow_is_bidirectional_skip and (prefix or not allow_is_causal_skip)
    if use_vmap or (q_length > 1 and whole):
        raise InvalidArgument(
            "[attention] a mask that is more than causal (packed sequences, or a function of the model's "
            "own): use another attn_implementation"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is not None and local_size == chunk and kv_length + kv_offset > chunk:
        raise InvalidArgument(
            f"[attention] {kv_length + kv_offset} tokens in chunks of {chunk}, which flash_attn_with_kvcache "
            "cannot keep apart: use another attn_implementation"
        )
    if attention_mask is None:
        return None
    # generate() may have cut the mask to the window already.
    if attention_mask.shape[1] not in (kv_length, kv_offset + kv_length):
        raise InvalidArgument(
            f"[attention] a mask of {attention_mask.shape[1]} tokens, the cache and the new ones are "
            f"{kv_offset + kv_length}: pass one that covers them all"
        )
    mask = attention_mask[:, -kv_length:].bool()
    if mask.all():
        return None
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise InvalidArgument(
            "[attention] padding that is not on the left: tokenize with padding_side='left', or use another "
            "attn_implementation"
        )
    return mask
