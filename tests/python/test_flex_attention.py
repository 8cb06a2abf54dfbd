"""FlexAttention over growing views and over full extents: few compiles, ragged rows, masks and score mods.

Compiling takes seconds, so the compiled functions are those of the integration, shared by all tests here, and
what more of them would show is left to the slow tests.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attn_gym.masks import (
    causal_mask,
    generate_doc_mask_mod,
    generate_prefix_lm_mask,
    generate_sliding_window,
)
from attn_gym.mods import generate_alibi_bias, generate_tanh_softcap
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex
from vtensor.integrations import flex_attention as integration
from vtensor.integrations.flex_attention import CacheMask, flex_attention
from vtensor.integrations.full_extent import FullExtent

import attention_support
from attention_support import HEADS, SIZE, caches, noise

ROWS, GROUPS, CAPACITY = 2, 2, 512

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own code generator


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def step(t, n=1, seed=0):
    x = noise(len(t), HEADS, n, SIZE, seed=seed)
    t.append(x if t.grow_dim == 2 else x.transpose(1, 2))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def exact(q, k, v, lengths, mask_mod=None, score_mod=None):
    """In float64, row by row over [B, H, S, D]; the queries are the last positions of each row."""
    out = []
    for b, n in enumerate(lengths):
        at, kv = torch.arange(n - q.shape[2], n)[:, None], torch.arange(n)[None]
        row, h = torch.tensor(b), torch.arange(q.shape[1])[:, None, None]
        change = score_mod and partial(score_mod, b=row, h=h, q_idx=at, kv_idx=kv)
        mask = kv <= at if mask_mod is None else mask_mod(row, h, at, kv)
        out.append(
            attention_support.exact(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], mask, change)
        )
    return torch.cat(out)


# attention-gym's own masks and score mods, of absolute positions.
WINDOW = 40
causal = causal_mask
sliding_window = generate_sliding_window(WINDOW)
document = generate_doc_mask_mod(causal_mask, torch.arange(0, CAPACITY + 50, 50, dtype=torch.int32))
prefix_lm = generate_prefix_lm_mask(110)  # above the length of one row
alibi = generate_alibi_bias(HEADS * GROUPS)
soft_cap = generate_tanh_softcap(5, approx=False)


MODS = [  # each of the four masks and two score mods, for one query and for several
    (causal, None, 1),
    (causal, alibi, 4),
    (document, None, 1),
    (prefix_lm, soft_cap, 1),
    (prefix_lm, soft_cap, 4),
    (sliding_window, alibi, 1),
    (sliding_window, None, 4),
]


@pytest.mark.slow
@pytest.mark.seconds(200)
@pytest.mark.parametrize(("mask_mod", "grow_dim"), [(None, 1), (sliding_window, 2)])
def test_growing_views_compile_at_most_twice_in_200_steps(strict, mask_mod, grow_dim):
    k, v = caches(strict, heads_first=grow_dim == 2)
    mask = mask_mod and CacheMask(mask_mod, ROWS, 1, CAPACITY)
    torch._dynamo.reset()
    before = graphs()
    for i in range(200):
        step(k, seed=i), step(v, seed=i + 1000)
        q = noise(ROWS, HEADS * GROUPS, 1, SIZE, seed=i)
        out = flex_attention(q, k, v, block_mask=mask and mask.update(k.length), enable_gqa=True)
        if i % 20 == 0:
            heads_first = (t[...].transpose(1, 2) if grow_dim == 1 else t for t in (k, v))
            assert (out - exact(q, *heads_first, [k.length] * ROWS, mask_mod)).abs().max() < 1e-5
    assert graphs() - before <= 2


@pytest.mark.seconds(200)
def test_a_full_extent_compiles_once_for_ragged_rows_over_140_steps(strict):
    """Across pages and tiles; the holes behind the last tile would fault."""
    k, v = caches(strict, heads_first=True)
    full = FullExtent(k), FullExtent(v)
    mask = CacheMask(None, ROWS, 1, CAPACITY)
    torch._dynamo.reset()
    before, block_mask, counts = graphs(), mask.block_mask, mask.block_mask.kv_num_blocks
    for i in range(140):
        step(k, seed=i), step(v, seed=i + 1000)
        lengths = [k.length, max(1, k.length // 3)]
        mask.update(lengths)
        q = noise(ROWS, HEADS * GROUPS, 1, SIZE, seed=i)
        out = flex_attention(q, *full, block_mask=mask, enable_gqa=True)
        if i % 30 == 0 or k.length % 128 in (0, 1):
            assert (out - exact(q, k, v, lengths)).abs().max() < 1e-5
    assert graphs() - before == 1
    assert mask.block_mask is block_mask and block_mask.kv_num_blocks is counts
    assert counts[:, 0, 0].tolist() == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask_mod", "score_mod", "queries"), MODS, ids=lambda mod: getattr(mod, "__name__", str(mod))
)
@pytest.mark.seconds(200)
def test_masks_and_score_mods_give_what_they_give_over_plain_tensors(strict, mask_mod, score_mod, queries):
    """Bit for bit, with the same strides in the same compiled code; and close to float64.

    Behind the last position the plain tensors are zero, as a full extent is, whose VTensor had NaN there.
    """
    k, v = caches(strict, length=150, heads_first=True)
    for t in (k, v):
        t.extend(100)[:, :, 150:].fill_(float("nan"))
        t.truncate(150)
    full = FullExtent(k), FullExtent(v)
    plain = [torch.empty_strided(f.tensor.shape, f.tensor.stride()).zero_() for f in full]
    for p, t in zip(plain, (k, v), strict=True):
        p[:, :, :150] = t
    torch._dynamo.reset()
    mask = CacheMask(mask_mod, ROWS, queries, CAPACITY).update([150, 97])
    q = noise(ROWS, HEADS * GROUPS, queries, SIZE)
    mod = None if score_mod is None else mask.score_mod(score_mod)
    out = flex_attention(q, *full, mod, mask, enable_gqa=True)
    assert (out - exact(q, k, v, [150, 97], mask_mod, score_mod)).abs().max() < 1e-5
    compiled = integration._compiled()
    assert torch.equal(compiled(q, *plain, mod, mask.block_mask, None, True), out)
    # The kernel does read the whole tile: NaN there would show.
    plain[1][:, :, 150:256] = float("nan")
    assert compiled(q, *plain, mod, mask.block_mask, None, True).isnan().any()


@pytest.mark.slow
@pytest.mark.seconds(200)
def test_a_prompt_by_torchs_own_mask(strict):
    """`create_block_mask` and torch's own compiled function over a view, without the integration."""
    k, v = caches(strict, length=130, heads_first=True)
    q = noise(ROWS, HEADS * GROUPS, 130, SIZE)
    block_mask = torch_flex.create_block_mask(causal, None, None, 130, 130, device="cpu")
    torch._dynamo.reset()
    out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    direct = torch.compile(torch_flex.flex_attention)
    assert torch.equal(direct(q, k[...], v[...], block_mask=block_mask, enable_gqa=True), out)
    assert (out - exact(q, k, v, [130] * ROWS)).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.seconds(200)
def test_prompts_of_any_length_in_batches_of_any_size(strict):
    """Of more lengths than dynamo compiles one by one, after other batches."""
    torch._dynamo.reset()
    before = graphs()
    for rows, queries in [(1, 1), (2, 1), *((3, n) for n in range(2, 12))]:
        k, v = caches(strict, rows, length=150, heads_first=True)
        mask = CacheMask(None, rows, queries, CAPACITY).update(150)
        q = noise(rows, HEADS * GROUPS, queries, SIZE)
        out = flex_attention(q, FullExtent(k), FullExtent(v), mask.score_mod(alibi), mask, enable_gqa=True)
        assert (out - exact(q, k, v, [150] * rows, score_mod=alibi)).abs().max() < 1e-5
    assert graphs() - before == 3


@pytest.mark.parametrize("strict_export", [False, True])
def test_exported_over_views(strict, strict_export):
    k, v = caches(strict, length=20, heads_first=True)
    given = noise(ROWS, HEADS, 1, SIZE), k[...], v[...]
    mask = CacheMask(None, ROWS, 1, CAPACITY).update([20, 7])

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, block_mask=mask)

    exported = torch.export.export(Attention(), given, strict=strict_export)
    assert (exported.module()(*given) - exact(*given, [20, 7])).abs().max() < 1e-5


@pytest.mark.seconds(200)
def test_numbers_that_only_the_device_knows_read_nothing_outside(strict, monkeypatch):
    """They are not checked: counts stay between none and all, and tiles inside the extent."""
    mask = CacheMask(None, 4, 1, CAPACITY)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    lengths, starts = torch.tensor([70, 70, 300, 900]), torch.tensor([-128, 600, 300, 0])
    mask.update(lengths, starts)
    assert mask.longest is mask.known is None
    assert mask.block_mask.kv_num_blocks[:, 0, 0].tolist() == [1, 0, 1, 4]
    indices = mask.block_mask.kv_indices
    assert indices.min() == 0 and indices.max() == 3 and indices[2, 0, 0].tolist() == [2, 3, 3, 3]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "starts", "says"),
    [
        (513, 0, ["513", "512"]),
        ([5, 600], 0, ["600", "512"]),
        ([1, 5], 0, ["from 1", "2 queries"]),
        ([5, 5, 5], 0, ["[3] lengths", "2 rows"]),
        ([100, 70], -128, ["row 0", "-128"]),
        ([100, 70], [0, -1], ["row 1", "-1"]),
        ([100, 70], [0, 71], ["row 1", "71", "ends at 70"]),
        ([100, 70], 600, ["600", "ends at 100"]),
        ([100, 70], [0, 0, 0], ["[3] starts", "2 rows"]),
        ([100, 70], torch.tensor([0, 600]), ["600", "ends at 70"]),
    ],
)
def test_lengths_and_starts_that_a_mask_cannot_have(lengths, starts, says):
    mask = CacheMask(None, ROWS, 2, CAPACITY).update(7)
    with attention_support.refused(*says):
        mask.update(lengths, starts)
    assert mask.lengths.tolist() == mask.known == [7, 7] and mask.longest == 7
    mask.update([100, 70], starts=[100, 70])


@pytest.mark.parametrize("sizes", [(0, 1, 8), (1, 0, 8), (1, 9, 8)])
def test_sizes_that_a_mask_cannot_have(sizes):
    with attention_support.refused():
        CacheMask(None, *sizes)


def test_what_does_not_fit_is_refused_before_anything_is_compiled(strict):
    k, v = caches(strict, length=20, heads_first=True)
    full = FullExtent(k), FullExtent(v)
    q = noise(ROWS, HEADS, 1, SIZE)
    before = graphs()

    def refused(*says, query=q, key=k, value=v, **options):
        with attention_support.refused(*says):
            flex_attention(query, key, value, **options)

    mask = CacheMask(None, ROWS, 1, CAPACITY)
    refused("first 21 positions", "holds 20", block_mask=mask.update(21))
    refused("first 21 positions", "holds 20", key=full[0], value=full[1], block_mask=mask)
    plain = [t.clone() for t in (k, v)]
    refused("21 positions, K 20", key=plain[0], value=plain[1], block_mask=mask)
    refused("FullExtent", "CacheMask", key=full[0], value=full[1])
    refused("FullExtent", "both", key=full[0], block_mask=mask)
    for rows in (1, 3):
        other = CacheMask(None, rows, 1, CAPACITY).update(15)
        for given in ({}, {"key": full[0], "value": full[1]}):
            refused(f"mask has {rows} rows, query 2", block_mask=other, **given)
    refused("append to both", value=v.truncate(19))
    assert graphs() == before
