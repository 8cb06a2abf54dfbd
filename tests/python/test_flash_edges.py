"""Edge cases of the FlashAttention shims: padding on the left, no queries, packed starts in no
order. What FlashAttention defines is computed, and all else refused."""

from __future__ import annotations

import numpy
import pytest
import torch
from vtensor.integrations import flash_attention as shims
from vtensor.integrations.sdpa import scaled_dot_product_attention

from attention_support import close, int32
from test_flash_attention import GROUPS, HEADS, PACKAGES, SIZE, caches, exact, noise, refused, seen  # noqa: F401

HOLDS = 8
WITH_LEFTPAD = ("fa2", "fa3", "torch")  # 4 has no such argument


def plain_cache():
    return tuple(noise(2, HOLDS, HEADS, SIZE, seed=i) for i in range(2))


@pytest.mark.parametrize("backend", WITH_LEFTPAD)
@pytest.mark.parametrize("kind", ["plain", "grown"])
@pytest.mark.parametrize(
    ("leftpad", "lengths", "says"),
    [
        (3, 8, ["cache_leftpad is a int", "int32"]),
        ([3, 2], 8, ["cache_leftpad is a list", "int32"]),
        (numpy.array([3, 2], dtype=numpy.int32), 8, ["cache_leftpad is a ndarray"]),
        (torch.tensor([3, 2]), 8, ["[2] of torch.int64"]),
        (int32(3), 8, ["[1] of torch.int32"]),
        (int32(-3, 0), 8, ["-3"]),
        (int32(0, 9), 8, ["9 of a sequence of 8"]),
        (int32(0, 9), None, ["9 of a sequence of 8"]),
        (int32(6, 5), int32(6, 4), ["5 of a sequence of 4"]),
    ],
)
def test_padding_that_cannot_be(host, seen, backend, kind, leftpad, lengths, says):  # noqa: F811
    k, v = plain_cache() if kind == "plain" else caches(host, length=HOLDS)
    q = noise(2, 1, HEADS * GROUPS, SIZE)
    with refused(seen, *says):
        shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, backend=backend)
    if kind == "grown":
        close(k, v)


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
    if kind == "grown":
        close(k, v)


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


# --- packed starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", (*PACKAGES, "torch"))
@pytest.mark.parametrize(
    ("starts", "says"),
    [
        ({"cu_seqlens_q": int32(0, 4, 2, 6)}, ["cu_seqlens_q", "from 4 back to 2"]),
        ({"cu_seqlens_k": int32(0, 7, 5, 9)}, ["cu_seqlens_k", "from 7 back to 5"]),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4, 6])}, ["cu_seqlens_q", "torch.int64"]),
        ({"cu_seqlens_k": torch.tensor([0, 3, 5, 9])}, ["cu_seqlens_k", "torch.int64"]),
        ({"cu_seqlens_k": [0, 3, 5, 9]}, ["cu_seqlens_k", "a list"]),
        ({"cu_seqlens_k": int32(0, 3, 5, 7, 9)}, ["of 3 sequences", "K of 4"]),
        ({"cu_seqlens_q": int32(0, 2, 4, 5, 6)}, ["of 4 sequences", "K of 3"]),
        ({"cu_seqlens_q": int32(0, 2, 4, 6)[None]}, ["cu_seqlens_q", "[1, 4]"]),
    ],
    ids=str,
)
def test_packed_starts_that_cannot_be(seen, backend, starts, says):  # noqa: F811
    q, k = noise(6, HEADS, SIZE), noise(9, HEADS, SIZE)
    given = {"cu_seqlens_q": int32(0, 2, 4, 6), "cu_seqlens_k": int32(0, 3, 5, 9)} | starts
    with refused(seen, *says):
        shims.flash_attn_varlen_func(q, k, k, **given, max_seqlen_q=3, max_seqlen_k=4, backend=backend)


def test_tokens_of_no_sequence_are_zeros():
    """Of a batch that is padded to a fixed size."""
    q, k = noise(8, HEADS, SIZE), noise(9, HEADS, SIZE)
    out = shims.flash_attn_varlen_func(q, k, k, int32(0, 2, 5), int32(0, 4, 9), 3, 5, backend="torch")
    assert out[:5].any() and not out[5:].any()
