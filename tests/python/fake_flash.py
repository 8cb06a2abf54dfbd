"""Stand-ins for the FlashAttention packages, which need a GPU: their parameters as in their sources (2.8,
hopper/flash_attn_interface.py, flash_attn/cute/interface.py), over a plain kernel that records what it is
given.

The kernel reads as theirs do: that of 2 exactly the valid positions, those of 3 and 4 whole tiles, which end
at the tensor they are given, with hidden positions weighted by zero. No time of it means anything.
"""

from __future__ import annotations

import sys
import types

import torch

TILE = 224  # the largest of FlashAttention 3


class Recorder:
    """What the last call got: the function's name and its arguments by name."""

    def __init__(self) -> None:
        self.name = ""
        self.got: dict[str, object] = {}
        self.before = lambda: None  # called with the kernel's arguments in hand

    def record(self, name: str, got: dict[str, object]) -> None:
        self.name, self.got = name, {key: value for key, value in got.items() if value is not self}
        self.before()


def attend(q, k, v, length, *, tile=1, scale=None, causal=False, window=(-1, -1), softcap=0.0):
    """One row: q ``[Sq, Hq, D]`` over the first `length` positions of k and v ``[S, Hkv, D]``."""
    stop = min(-(-length // tile) * tile, k.shape[0])
    groups = q.shape[1] // k.shape[1]
    keys, values = (t[:stop].float().repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[0])[:, None] + length - q.shape[0]
    kv = torch.arange(stop)[None]
    left, right = (-1 if side is None else side for side in window)
    right = 0 if causal else right
    seen = (kv < length) & ((kv <= at + right) | (right < 0)) & ((kv >= at - left) | (left < 0))
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def rows(q, k, v, lengths, index=None, **options):
    index = range(len(q)) if index is None else index.tolist()
    numbers = lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * len(q)
    return torch.stack(
        [attend(q[b], k[r], v[r], n, **options) for b, (r, n) in enumerate(zip(index, numbers, strict=True))]
    )


def with_append(q, k_cache, v_cache, k, v, cache_seqlens, index, **options):
    lengths = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    if k is not None:
        numbers = lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * len(q)
        for b, n in enumerate(numbers):
            row = b if index is None else int(index[b])
            k_cache[row, n : n + k.shape[1]] = k[b]
            v_cache[row, n : n + k.shape[1]] = v[b]
        lengths = lengths + k.shape[1]
    return rows(q, k_cache, v_cache, lengths, index, **options)


def packed(q, k, v, starts_q, starts_k, **options):
    parts = []
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        parts.append(attend(q[a:b], k[c:d], v[c:d], int(d - c), **options))
    return torch.cat(parts)


def flash2(seen: Recorder) -> types.ModuleType:
    """Module ``flash_attn``."""
    module = types.ModuleType("flash_attn")
    module.__path__ = []  # flash_attn.cute lies in it

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        seen.record("flash_attn_func", locals())
        return rows(q, k, v, k.shape[1], scale=softmax_scale, causal=causal, window=window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        seen.record("flash_attn_varlen_func", locals())
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal)

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        seen.record("flash_attn_with_kvcache", locals())
        options = {"scale": softmax_scale, "causal": causal, "window": window_size}
        return with_append(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, **options)

    return _filled(module, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)


def flash3(seen: Recorder) -> types.ModuleType:
    """Module ``flash_attn_interface``."""

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        seen.record("flash_attn_func", locals())
        return rows(q, k, v, k.shape[1], tile=TILE, scale=softmax_scale, causal=causal, window=window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        seen.record("flash_attn_varlen_func", locals())
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, tile=TILE, scale=softmax_scale, causal=causal)

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        seen.record("flash_attn_with_kvcache", locals())
        options = {"tile": TILE, "scale": softmax_scale, "causal": causal, "window": window_size}
        return with_append(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, **options)

    module = types.ModuleType("flash_attn_interface")
    return _filled(module, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)


def flash4(seen: Recorder) -> types.ModuleType:
    """Module ``flash_attn.cute``: no append; the result comes with its log-sum-exp."""

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
        num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, full_block_cnt=None,
        full_block_idx=None, mask_block_cnt=None, mask_block_idx=None, block_size=None, return_lse=False,
    ):  # fmt: skip
        seen.record("flash_attn_func", locals())
        out = rows(q, k, v, k.shape[1], tile=TILE, scale=softmax_scale, causal=causal, window=window_size)
        return out, None

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
        seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        mask_mod=None, block_sparse_tensors=None, cu_total_m_blocks=None, cu_total_n_blocks=None,
        aux_tensors=None, return_lse=False,
    ):  # fmt: skip
        seen.record("flash_attn_varlen_func", locals())
        options = {"tile": TILE, "scale": softmax_scale, "causal": causal}
        if cu_seqlens_k is None:
            return rows(q, k, v, seqused_k, window=window_size, **options), None
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options), None

    return _filled(types.ModuleType("flash_attn.cute"), flash_attn_func, flash_attn_varlen_func)


def _filled(module, *functions):
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def install(*names: str) -> Recorder:
    """Puts stand-ins for "fa2", "fa3" and "fa4" among the modules, and nothing else of theirs."""
    from vtensor.integrations import flash_attention

    seen = Recorder()
    makers = {"flash_attn": ("fa2", flash2), "flash_attn_interface": ("fa3", flash3)}
    makers["flash_attn.cute"] = ("fa4", flash4)
    for module, (name, make) in makers.items():
        sys.modules[module] = make(seen) if name in names else None  # None: importing it raises
    if "fa4" in names and "fa2" not in names:
        sys.modules["flash_attn"] = types.ModuleType(
            "flash_attn"
        )  # the folder alone, as FlashAttention 4 has it
        sys.modules["flash_attn"].__path__ = []
    flash_attention.look_again()
    return seen
