"""Edge cases of FlashAttention's functions over torch's kernels: padding on the left, no queries, tokens of
no sequence, and what is refused because a slice would hide it."""

from __future__ import annotations

import pytest
import torch
from vtensor.integrations import flash_attention as shims
from vtensor.integrations.sdpa import scaled_dot_product_attention

from attention_support import int32
from test_flash_attention import GROUPS, HEADS, SIZE, caches, exact, noise, seen  # noqa: F401

HOLDS = 8


def plain_cache():
    return tuple(noise(2, HOLDS, HEADS, SIZE, seed=i) for i in range(2))


@pytest.mark.parametrize("lengths", [7, int32(7, 5), None])
@pytest.mark.parametrize("kind", ["plain", "grown"])
def test_padding_on_the_left(host, kind, lengths):
    """Up to all of a sequence, which then sees nothing and gives zeros."""
    k, v = plain_cache() if kind == "plain" else caches(host, length=HOLDS)
    q = noise(2, 1, HEADS * GROUPS, SIZE)
    ends = [HOLDS] * 2 if lengths is None else [7, 7] if isinstance(lengths, int) else [7, 5]
    out = shims.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cache_leftpad=int32(2, ends[1]), backend="torch"
    )
    want = exact(q[0], k[0, 2:], v[0, 2:], ends[0] - 2)
    assert (out[0].double() - want.double()).abs().max() < 0.02
    assert not out[1].any()


# --- no queries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", (None, "torch"))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [0, HOLDS])
def test_no_queries(backend, causal, length):
    q, k = noise(2, 0, HEADS * GROUPS, SIZE), noise(2, length, HEADS, SIZE)
    assert shims.flash_attn_func(q, k, k, causal=causal, backend=backend).shape == q.shape
    assert shims.flash_attn_with_kvcache(q, k, k, causal=causal, backend=backend).shape == q.shape
    heads_first = [t.transpose(1, 2) for t in (q, k, k)]
    out = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
    assert out.shape == heads_first[0].shape


@pytest.mark.parametrize("causal", [False, True])
def test_empty_sequences_in_a_packed_batch(causal):
    """Without queries, without keys (zeros), and without both."""
    q, k, v = (noise(t, h, SIZE, seed=t) for t, h in ((6, HEADS * GROUPS), (9, HEADS), (9, HEADS)))
    starts_q, starts_k = [0, 0, 2, 4, 4, 6], [0, 3, 3, 7, 7, 9]
    out = shims.flash_attn_varlen_func(
        q, k, v, int32(*starts_q), int32(*starts_k), 2, 4, causal=causal, backend="torch"
    )
    for n, (a, b) in enumerate(zip(starts_q, starts_q[1:], strict=False)):
        keys = slice(starts_k[n], starts_k[n + 1])
        if a == b:
            continue
        if keys.start == keys.stop:
            assert not out[a:b].any()
            continue
        want = shims.flash_attn_func(
            q[None, a:b], k[None, keys], v[None, keys], causal=causal, backend="torch"
        )
        torch.testing.assert_close(out[a:b], want[0])


def test_tokens_of_no_sequence_are_zeros():
    """Of a batch that is padded to a fixed size."""
    q, k = noise(8, HEADS, SIZE), noise(9, HEADS, SIZE)
    out = shims.flash_attn_varlen_func(q, k, k, int32(0, 2, 5), int32(0, 4, 9), 3, 5, backend="torch")
    assert out[:5].any() and not out[5:].any()


# --- what a slice would hide --------------------------------------------------------------------------------


NEW = noise(2, 1, HEADS * GROUPS, SIZE)
APPEND = {"k": NEW[:, :, :HEADS], "v": NEW[:, :, :HEADS]}


@pytest.mark.parametrize(
    "given",
    [
        {"cache_seqlens": 9},
        {"cache_seqlens": -1},
        {"cache_seqlens": int32(8, 9)},
        {"cache_seqlens": int32(8)},
        {"cache_seqlens": int32(8, 8, 8)},
        {"cache_leftpad": int32(-3, 0)},
        {"cache_leftpad": int32(0, 9)},
        {"cache_seqlens": int32(6, 4), "cache_leftpad": int32(6, 5)},
        {"cache_batch_idx": int32(0, 2)},
        {"q": noise(3, 1, HEADS, SIZE)},
        {"cache_seqlens": HOLDS, **APPEND},
        {"cache_seqlens": int32(3, HOLDS), **APPEND},
    ],
    ids=lambda given: str({name: value for name, value in given.items() if name not in "qkv"}),
)
def test_positions_that_a_plain_cache_does_not_have(seen, given):  # noqa: F811
    k_cache, v_cache = plain_cache()
    for backend in ("torch", "fa4") if "k" in given else ("torch",):
        call = {"q": NEW, "k_cache": k_cache, "v_cache": v_cache} | given
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            shims.flash_attn_with_kvcache(**call, backend=backend)


@pytest.mark.parametrize(
    ("starts_q", "starts_k"),
    [((0, 4, 2, 6), (0, 3, 5, 9)), ((0, 2, 4, 7), (0, 3, 5, 9)), ((0, 2, 4, 6), (0, 7, 5, 9)),
     ((0, 2, 4, 6), (0, 3, 5, 10)), ((0, 2, 4, 6), (0, 3, 5, 7, 9)), ((0, 2, 4, 6), (0, 9))],
)  # fmt: skip
def test_packed_starts_that_cannot_be(starts_q, starts_k):
    q, k = noise(6, HEADS, SIZE), noise(9, HEADS, SIZE)
    with pytest.raises((RuntimeError, ValueError)):
        shims.flash_attn_varlen_func(q, k, k, int32(*starts_q), int32(*starts_k), 3, 4, backend="torch")
