"""Attention over VTensors on a real GPU, by each kernel that is installed, against plain tensors and float64.

FlashAttention 2: ``pip install flash-attn --no-build-isolation``. 3, on Hopper: clone
Dao-AILab/flash-attention and ``pip install ./flash-attention/hopper --no-build-isolation``. 4, on Hopper and
Blackwell: ``pip install flash-attn-4``. What is not installed is skipped by name.
"""

from __future__ import annotations

import pytest
import torch
from vtensor.integrations import flash_attention as flash
from vtensor.integrations import sdpa
from vtensor.integrations.flex_attention import CacheMask, flex_attention
from vtensor.integrations.full_extent import FullExtent

import vtensor

HEADS, GROUPS, DIM = 8, 4, 128
PER_PAGE = (2 << 20) // (HEADS * DIM * 2)  # positions of a bf16 row in a 2 MiB page: 1,024
CAPACITY = 8 * PER_PAGE

pytestmark = pytest.mark.parametrize("device", ["gpu"], indirect=True)  # these kernels are the GPU's


@pytest.fixture(params=["fa2", "fa3", "fa4", "torch"])
def backend(request):
    if request.param not in flash.available():
        with pytest.raises(flash.NotInstalled) as caught:
            flash.flash_attn_func(*(torch.zeros(1, 1, 1, 8, device="cuda"),) * 3, backend=request.param)
        pytest.skip(str(caught.value))
    major = torch.cuda.get_device_capability()[0]
    if (request.param == "fa3" and major > 9) or (request.param == "fa4" and major < 9):
        pytest.skip(f"{request.param} has no kernels for compute capability {major}.x")
    return request.param


def noise(*sizes, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda", generator=generator)


def cache(pool, length, rows=2, seed=1):
    return [
        vtensor.from_tensor(noise(rows, length, HEADS, DIM, seed=seed + i), 1, CAPACITY, pool=pool)
        for i in range(2)
    ]


def plain_like(t, positions):
    """t's values and strides, NaN behind them."""
    whole = torch.empty_strided((len(t), positions, HEADS, DIM), t.stride(), dtype=t.dtype, device=t.device)
    whole.fill_(float("nan"))[:, : t.length] = t
    return whole


def exact(q, k, v, length, causal=True):
    """One row in float64: [Sq, Hq, D] over the first `length` of [S, H, D]."""
    keys, values = (t[:length].double().repeat_interleave(q.shape[1] // HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * DIM**-0.5
    if causal:
        hidden = torch.ones(len(q), length, device="cuda").triu(length - len(q) + 1).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values)


def first(result):
    return result[0] if isinstance(result, tuple) else result  # FlashAttention 4 gives its log-sum-exp too


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("length", [5, PER_PAGE - 1, PER_PAGE + 77])
def test_attention_has_the_bits_of_a_plain_tensor(pool, backend, queries, length):
    if queries > length:
        pytest.skip("more queries than keys")
    k, v = cache(pool, length)
    q = noise(2, queries, HEADS * GROUPS, DIM)
    plain = [plain_like(t, length) for t in (k, v)]
    out = first(flash.flash_attn_func(q, k, v, causal=True, backend=backend))
    theirs = first(flash.flash_attn_func(q, *plain, causal=True, backend=backend))
    assert torch.equal(out, theirs)
    for b in range(2):
        assert (out[b].double() - exact(q[b], k[b], v[b], length)).abs().max() < 0.02
    k.close(), v.close()


def test_an_append_by_the_kernel_over_a_page_border(pool, backend):
    start = PER_PAGE - 3
    k, v = cache(pool, start)
    plain = [plain_like(t, start + 8) for t in (k, v)]
    for i in range(8):
        q = noise(2, 1, HEADS * GROUPS, DIM, seed=3 * i)
        new = [noise(2, 1, HEADS, DIM, seed=3 * i + j) for j in (1, 2)]
        options = {"k": new[0], "v": new[1], "cache_seqlens": start + i, "causal": True, "backend": backend}
        out = flash.flash_attn_with_kvcache(q, k, v, **options)
        theirs = flash.flash_attn_with_kvcache(q, *(t[:, : start + i + 1] for t in plain), **options)
        assert torch.equal(out, theirs) and k.length == start + i + 1
    assert torch.equal(k, plain[0]) and torch.equal(v, plain[1])
    k.close(), v.close()


@pytest.mark.parametrize("full", [False, True])
def test_rows_of_different_lengths(pool, backend, full):
    """Over full extents the tiles go on behind what is mapped: what is not covered would fault."""
    longest = PER_PAGE - 10
    k, v = cache(pool, longest)
    q = noise(2, 1, HEADS * GROUPS, DIM)
    lengths = torch.tensor([longest, 300], dtype=torch.int32, device="cuda")
    given = [FullExtent(t) for t in (k, v)] if full else [k, v]
    out = flash.flash_attn_with_kvcache(q, *given, cache_seqlens=lengths, backend=backend)
    for b, n in enumerate((longest, 300)):
        assert (out[b].double() - exact(q[b], k[b], v[b], n)).abs().max() < 0.02
    del given
    k.close(), v.close()


def test_an_append_to_a_fork_leaves_the_other_alone(pool, backend):  # I6
    k, v = cache(pool, 70)
    before = k.clone()
    forks = [t.fork() for t in (k, v)]
    new = noise(2, 1, HEADS, DIM, seed=9)
    q = noise(2, 1, HEADS * GROUPS, DIM)
    flash.flash_attn_with_kvcache(q, *forks, k=new, v=new, cache_seqlens=70, backend=backend)
    assert torch.equal(k, before) and torch.equal(forks[0][:, 70:], new)
    for t in (k, v, *forks):
        t.close()


def test_packed_sequences(pool, backend):
    k, v = (vtensor.from_tensor(noise(900, HEADS, DIM, seed=i), 0, CAPACITY, pool=pool) for i in (1, 2))
    q = noise(40, HEADS * GROUPS, DIM)
    starts_q = torch.tensor([0, 1, 40], dtype=torch.int32, device="cuda")
    starts_k = torch.tensor([0, 400, 900], dtype=torch.int32, device="cuda")
    out = first(
        flash.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=starts_q,  # by name: FlashAttention 4 has them in another order
            cu_seqlens_k=starts_k,
            max_seqlen_q=39,
            max_seqlen_k=500,
            causal=True,
            backend=backend,
        )
    )
    for (a, b), (c, d) in (((0, 1), (0, 400)), ((1, 40), (400, 900))):
        assert (out[a:b].double() - exact(q[a:b], k[c:d], v[c:d], d - c)).abs().max() < 0.02
    k.close(), v.close()


@pytest.mark.parametrize("queries", [1, 16])
def test_sdpa_is_causal_from_the_lower_right(pool, queries):
    k, v = cache(pool, 777)
    q = noise(2, queries, HEADS * GROUPS, DIM)
    out = sdpa.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
    for b in range(2):
        assert (out[b].transpose(0, 1).double() - exact(q[b], k[b], v[b], 777)).abs().max() < 0.02
    k.close(), v.close()


def test_flex_attention_over_a_full_extent_with_one_compile(pool):
    from torch._dynamo.utils import counters

    start = PER_PAGE - 20
    k, v = cache(pool, start)
    full = FullExtent(k), FullExtent(v)
    mask = CacheMask(None, 2, 1, CAPACITY, device="cuda")
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for i in range(40):
            k.append(noise(2, 1, HEADS, DIM, seed=i))
            v.append(noise(2, 1, HEADS, DIM, seed=-i - 1))
            q = noise(2, 1, HEADS * GROUPS, DIM, seed=i)
            lengths = [k.length, 100 + i]
            out = flex_attention(
                q.transpose(1, 2), *full, block_mask=mask.update(lengths), enable_gqa=True
            ).transpose(1, 2)
            for b, n in enumerate(lengths):
                assert (out[b].double() - exact(q[b], k[b], v[b], n)).abs().max() < 0.02
    assert counters["stats"]["unique_graphs"] - before == 1
    del full
    k.close(), v.close()
