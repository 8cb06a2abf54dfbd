"""Layers of a KVCache given to the attention shims: what plain tensors give, and nothing that step() has not
made ready is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vtensor.integrations import flash_attention as flash
from vtensor.integrations import flex_attention as flex
from vtensor.integrations.sdpa import scaled_dot_product_attention

import vtensor
from attention_support import int32, refused
from support import on_a_device
from test_flash_attention import noise, seen  # noqa: F401

HEADS, SIZE, SLOTS, MOST = 2, 16, 3, 512
LENGTHS = [70, 0, 33]

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own code generator


@pytest.fixture
def make(strict):
    made = []

    def cache(lengths=LENGTHS, dtype=torch.float32, **options):
        cache = vtensor.KVCache(2, HEADS, SIZE, SLOTS, MOST, dtype, pool=strict, **options)
        made.append(cache)
        for _ in lengths:
            cache.alloc()
        assert cache.step(lengths)
        for layer in range(2):
            for side, t in enumerate(by_position(cache, layer)):
                for slot, n in enumerate(lengths):
                    t[slot, :n] = noise(n, HEADS, SIZE, seed=9 * layer + 3 * side + slot, dtype=dtype)
        return cache

    yield cache
    for cache in made:
        cache.close()


def by_position(cache, layer=1):
    """K and V ``[slots, positions, heads, head size]`` in either layout."""
    return tuple(t if t.shape[1] == MOST else t.transpose(1, 2) for t in cache[layer])


def plain_like(t, lengths):
    """A plain tensor of ``t``'s values, with NaN where a slot has none."""
    whole = torch.full(t.shape, float("nan"), dtype=t.dtype)
    for slot, n in enumerate(lengths):
        whole[slot, :n] = t[slot, :n]
    return whole


# --- what would be written where there is no memory --------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "given"),
    [
        ((SLOTS, 1, HEADS, SIZE), {"cache_seqlens": torch.tensor(300)}),
        ((SLOTS, 1, HEADS, SIZE), {"cache_seqlens": int32(33)}),
        ((SLOTS, 1, HEADS, SIZE), {"cache_seqlens": [300] * SLOTS}),
        ((SLOTS, 1, HEADS, SIZE), {"cache_seqlens": np.int64(300)}),
        (
            (SLOTS, 1, HEADS, SIZE),
            {"cache_seqlens": int32(0, 300, 301), "cache_batch_idx": torch.tensor([0])},
        ),
        ((SLOTS, HEADS, SIZE), {"cache_seqlens": 300}),
        ((SLOTS, HEADS, SIZE), {"cache_seqlens": int32(300, 300, 300)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["torch", "fa4"])
def test_an_append_that_would_broadcast_is_refused(make, seen, backend, queries, given):  # noqa: F811
    """To slots that have no such tokens: the write would end the process."""
    cache = make()
    layer, new = cache[0], noise(SLOTS, 1, HEADS, SIZE)
    with pytest.raises((vtensor.InvalidArgument, TypeError)):
        flash.flash_attn_with_kvcache(noise(*queries), *layer, new, new, **given, backend=backend)


# --- FlashAttention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"layer_group": 2}, {"layout": "HND"}], ids=str)
@pytest.mark.parametrize("backend", ["torch", "fa2", "fa4"])
def test_steps_that_append_in_slots_of_their_own_lengths(make, seen, backend, options):  # noqa: F811
    """Across pages and in chosen slots, bit for bit as over plain tensors."""
    dtype = torch.float32 if backend == "torch" else torch.bfloat16
    tile = 256 if backend == "fa4" else 1  # it reads whole ones
    cache, lengths = make(dtype=dtype, tile=tile, **options), list(LENGTHS)
    k, v = by_position(cache)
    plain = [plain_like(t, lengths) for t in (k, v)]
    if backend == "fa4":
        plain = [t.nan_to_num() for t in plain]
    index = None if backend == "fa4" else int32(2, 0)
    slots = [0, 1, 2] if index is None else [2, 0]
    for step, n in enumerate((1, 40, 1, 3)):
        new = [noise(len(slots), n, h, SIZE, seed=step + i, dtype=dtype) for i, h in enumerate((4, 2, 2))]
        given = {"cache_seqlens": int32(*(lengths[slot] for slot in slots)), "causal": True}
        if index is not None:
            given["cache_batch_idx"] = index

        def call(k, v, new=new, given=given):
            return flash.flash_attn_with_kvcache(new[0], k, v, *new[1:], backend=backend, **given)

        with refused("call step(lengths)"):
            call(k, v)
        for slot in slots:
            lengths[slot] += n
        assert cache.step(lengths)
        assert torch.equal(call(k, v), call(*plain))
        for slot in slots:
            assert torch.equal(k[slot, : lengths[slot]], plain[0][slot, : lengths[slot]])


# --- SDPA and FlexAttention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("queries", [1, 4])
def test_sdpa_over_what_slots_have(make, layout, queries):
    cache = make(layout=layout)
    k, v = (t.transpose(1, 2) for t in by_position(cache))
    plain = [plain_like(t, LENGTHS).transpose(1, 2) for t in by_position(cache)]
    q = noise(2, 4, queries, SIZE, dtype=torch.float32)
    options = {"is_causal": True, "enable_gqa": True}
    out = scaled_dot_product_attention(q, k[::2, :, :33], v[::2, :, :33], **options)
    want = scaled_dot_product_attention(q, *(t[::2, :, :33] for t in plain), **options)
    assert (out - want).abs().max() < 1e-6
    with refused("34 tokens of slot 2", "33 ready"):
        scaled_dot_product_attention(q, k[::2, :, :34], v[::2, :, :34], **options)


@pytest.mark.slow
@pytest.mark.seconds(200)
def test_flex_attention_over_whole_layers(make):
    """One compile for all steps, ragged; whole tiles are read, and mapped."""
    with torch.no_grad():
        cache = make([100, 1, 33], layout="HND", tile=128)
        plain = [torch.zeros_like(t) for t in cache[1]]
        for t, whole in zip(cache[1], plain, strict=True):
            for slot, n in enumerate(cache.lengths):
                whole[slot, :, :n] = t[slot, :, :n]
        mask = flex.CacheMask(None, SLOTS, 1, MOST)
        torch._dynamo.reset()
        compiled = flex._compiled()
        lengths = cache.lengths
        for step in range(3):
            lengths = [n + 20 for n in lengths]
            assert cache.step(lengths)
            for t, whole in zip(cache[1], plain, strict=True):
                for slot, n in enumerate(lengths):
                    t[slot, :, n - 20 : n] = whole[slot, :, n - 20 : n] = noise(HEADS, 20, SIZE, seed=step)
            q = noise(SLOTS, 4, 1, SIZE, seed=step, dtype=torch.float32)
            out = flex.flex_attention(q, *cache[1], block_mask=mask.update(lengths), enable_gqa=True)
            assert torch.equal(out, compiled(q, *plain, None, mask.block_mask, None, True))
    with refused("161 tokens of slot 0", "160 ready"):
        flex.flex_attention(q, *cache[1], block_mask=mask.update([161, 1, 33]), enable_gqa=True)
    with refused("512 tokens of slot 0"):
        flex.flex_attention(q, *cache[1], enable_gqa=True)


def test_flex_attention_needs_whole_tiles_on_a_device(make):
    cache = make([100, 1, 33], layout="HND", tile=64)
    mask = flex.CacheMask(None, SLOTS, 1, MOST).update([100, 1, 33])
    q = on_a_device(noise(SLOTS, HEADS, 1, SIZE, dtype=torch.float32))
    with refused("tile=64", "tile=128"):
        flex.flex_attention(q, *cache[1], block_mask=mask)


def test_flash_attention_needs_its_tiles_on_a_device(make, seen):  # noqa: F811
    cache = make(dtype=torch.bfloat16, tile=128)
    q = on_a_device(noise(SLOTS, 1, HEADS, SIZE))

    def call(backend):
        flash.flash_attn_with_kvcache(q, *cache[1], cache_seqlens=int32(*LENGTHS), backend=backend)

    seen.name = ""
    with refused("tile=128", "tile=224"):
        call("fa3")
    assert seen.name == ""
    call("fa2")
    assert seen.name == "flash_attn_with_kvcache"
    # Tiles never go past what the kernel is given, nor past the cache.
    row = [t[:1, : LENGTHS[0]] for t in cache[1]]
    flash.flash_attn_func(q[:1], *row, backend="fa3")
    assert seen.name == "flash_attn_func"
    flash.flash_attn_with_kvcache(q[:1], *row, cache_seqlens=LENGTHS[0], backend="fa3")
    assert seen.name == "flash_attn_with_kvcache"


# --- leases and ends ----------------------------------------------------------------------------------------


def test_the_cache_is_told_of_the_stream(make, monkeypatch):
    cache = make()
    told = []
    monkeypatch.setattr(vtensor.KVCache, "record_stream", lambda self, stream=None: told.append(self))
    k, v = (t[2:, :33] for t in cache[1])
    host = noise(1, 1, HEADS, SIZE, dtype=torch.float32)

    calls = [
        lambda k, v: flash.flash_attn_func(q, k, v),
        lambda k, v: flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=33),
        lambda k, v: flash.flash_attn_varlen_func(q[0], k[0], v[0], int32(0, 1), int32(0, 33), 1, 33),
        lambda k, v: scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))),
    ]
    for q in (host, on_a_device(host)):
        for call in calls:
            told.clear()
            call(k, v)
            assert set(told) == (set() if q is host else {cache})
            told.clear()
            call(k.clone(), v.clone())
            assert not told
