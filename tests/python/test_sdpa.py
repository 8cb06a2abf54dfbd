"""Scaled dot-product attention over a cache: the right mask, grouped heads, both layouts."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from vtensor.integrations.full_extent import FullExtent
from vtensor.integrations.sdpa import scaled_dot_product_attention

import vtensor
from attention_support import HEADS, SIZE, caches, exact, noise, plain_like
from support import SHAPE_OF_A_MESSAGE, on_a_device, received, simcuda_library
from vtensor import sharing


def heads_first(t):
    """A plain tensor [B, H, S, D] of t's strides, with NaN behind its last position."""
    return plain_like(t, t.length + 8)[:, : t.length].transpose(1, 2)


def lower_right(queries, length):
    return torch.arange(length)[None] <= torch.arange(queries)[:, None] + length - queries


@pytest.mark.parametrize("grow_dim", [1, 2])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("queries", [1, 2, 7, 20])
def test_causal_is_lower_right(host, grow_dim, groups, queries):
    """With the error of torch's own function over plain tensors of the same strides and that mask beside
    ours."""
    k, v = caches(host, length=20, heads_first=grow_dim == 2)
    q = noise(2, HEADS * groups, queries, SIZE)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    plain = heads_first(k), heads_first(v)
    mask = lower_right(queries, 20)
    theirs = torch_sdpa(q, *plain, attn_mask=mask, enable_gqa=True)
    want = exact(q, *plain, mask)
    assert (theirs - want).abs().max() < 1e-5
    assert (out - want).abs().max() <= max((theirs - want).abs().max() * 2, 1e-6)
    if queries not in (1, 20):
        upper_left = torch_sdpa(q, *plain, is_causal=True, enable_gqa=True)
        assert not torch.allclose(upper_left.double(), want, atol=1e-3)


@pytest.mark.parametrize("grow_dim", [1, 2])
def test_the_same_kernel_on_the_same_layout_gives_the_same_bits(host, grow_dim):
    k, v = caches(host, length=33, heads_first=grow_dim == 2)
    plain = heads_first(k), heads_first(v)
    for queries in (1, 4, 33):
        q = noise(2, HEADS, queries, SIZE)
        assert torch.equal(scaled_dot_product_attention(q, k, v), torch_sdpa(q, *plain))
        options = {1: {}, 4: {"attn_mask": lower_right(4, 33)}, 33: {"is_causal": True}}[queries]
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.equal(out, torch_sdpa(q, *plain, **options))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("shape", [(1, 9), (2, 1, 1, 9), (4, 1, 9), (2, 4, 1, 9), (1, 4, 3, 9)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_every_shape_over_grouped_heads(host, queries, shape, kind):
    if len(shape) > 1 and shape[-2] not in (1, queries):
        shape = (*shape[:-2], queries, 9)
    k, v = caches(host, length=9, heads_first=True)
    q = noise(2, 4, queries, SIZE)
    mask = noise(*shape, seed=3)
    if kind is torch.bool:
        mask = (mask > -0.5) | (torch.arange(9) == 0)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert (out - exact(q, k, v, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [1, 3])
def test_compiled_over_growing_views(host, queries):
    k, v = caches(host, length=20, heads_first=True)
    q = noise(2, HEADS * 2, queries, SIZE)
    counter = CompileCounterWithBackend("eager")

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    with torch.no_grad():
        for n in range(5, 20):
            given = q, k[:, :, :n], v[:, :, :n]
            assert torch.equal(compiled(*given), attend(*given))
    assert counter.frame_count <= 2


def test_compiled_for_every_size_where_both_alignments_are_the_same(host):
    k, v = caches(host, length=9, heads_first=True)
    given = noise(2, HEADS, 9, SIZE), k[...], v[...]

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(*given), attend(*given))


@pytest.mark.filterwarnings("ignore")  # that jit.trace is deprecated, and takes sizes for constants
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_traced_over_views(host, queries, causal):
    k, v = caches(host, length=9, heads_first=True)
    given = noise(2, HEADS, queries, SIZE), k[...], v[...]

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert torch.equal(torch.jit.trace(attend, given)(*given), attend(*given))


def test_queries_that_see_nothing_give_zeros(host):
    k, v = caches(host, length=2, heads_first=True)
    out = scaled_dot_product_attention(noise(2, HEADS, 5, SIZE), k, v, is_causal=True)
    assert not out[:, :, :3].any() and out[:, :, 3:].all()


def test_a_scale_and_a_full_extent(host):
    k, v = caches(host, length=5)
    q = noise(2, HEADS, 1, SIZE)
    out = scaled_dot_product_attention(q, FullExtent(k), FullExtent(v), scale=0.5)
    assert torch.equal(out, torch_sdpa(q, k.transpose(1, 2), v.transpose(1, 2), scale=0.5))


def test_both_tensors_are_leased_during_the_call(host, leases):
    k, v = caches(host, length=5, heads_first=True)
    q = on_a_device(noise(2, HEADS, 1, SIZE))
    scaled_dot_product_attention(q, k, v)
    plain = noise(2, HEADS, 5, SIZE)
    scaled_dot_product_attention(q, plain, plain)
    assert leases == [[id(k), id(v)], "ended"]


@pytest.mark.parametrize("shape", [(1, 8), (3, 9), (2, 8), (2, 1, 9), (2, 2, 1, 9), (3, 1, 1, 9)])
def test_stacked_heads_take_no_mask_that_torch_would_refuse(host, shape):
    """One of K's heads, or of as many queries as a group has heads, would fit them and mean another."""
    k, v = caches(host, length=9, heads_first=True)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(noise(2, HEADS * 3, 1, SIZE), k, v, torch.ones(shape), enable_gqa=True)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((0, 4, 1, 8), (0, 2, 5, 8), (0, 2, 5, 8)),
        ((1, 4, 1, 8), (3, 2, 5, 8), (3, 2, 5, 8)),
        ((4, 1, 8), (2, 5, 8), (2, 5, 8)),
        ((3, 2, 4, 1, 8), (3, 2, 2, 5, 8), (3, 2, 2, 5, 8)),
        ((1, 4, 1, 8), (1, 2, 5, 8), (1, 4, 5, 8)),
        ((1, 4, 1, 8), (1, 4, 5, 8), (1, 2, 5, 8)),
    ],
)
def test_a_single_step_takes_every_shape_that_torch_takes(query, key, value):
    given = noise(*query), noise(*key, seed=1), noise(*value, seed=2)
    out, theirs = scaled_dot_product_attention(*given, enable_gqa=True), torch_sdpa(*given, enable_gqa=True)
    assert out.shape == theirs.shape and torch.allclose(out, theirs, atol=1e-6)


def test_a_mask_and_is_causal(host):
    k, v = caches(host, length=9, heads_first=True)
    with pytest.raises(vtensor.InvalidArgument, match=SHAPE_OF_A_MESSAGE):
        scaled_dot_product_attention(noise(2, 2, 3, SIZE), k, v, torch.ones(3, 9), is_causal=True)
    with pytest.raises(RuntimeError):  # torch's: heads are grouped only if that was asked for
        scaled_dot_product_attention(noise(2, 4, 1, SIZE), k, v)


@pytest.mark.parametrize("grow_dim", [1, 2])
def test_readers_are_taken_as_their_tensors_are(pool_factory, kind, monkeypatch, grow_dim):
    """Also where as many positions as heads would hide that they were exchanged."""
    monkeypatch.setattr(sharing, "cuda_library", str(simcuda_library() or ""))
    pool = pool_factory(kind, shareable=True)
    k, v = caches(pool, length=HEADS, heads_first=grow_dim == 2)
    q = noise(2, HEADS, 2, SIZE)
    with received(k) as keys, received(v) as values:
        assert torch.equal(
            scaled_dot_product_attention(q, keys, values, is_causal=True),
            scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        k.extend(1)
        assert keys.sync()
        with pytest.raises(vtensor.InvalidArgument, match="K has 3 positions, V 2"):
            scaled_dot_product_attention(q, keys, values)
    with pytest.raises(vtensor.Closed):
        scaled_dot_product_attention(q, keys, values)
