"""The lengths that the FlashAttention shims get: past the end of plain tensors, of rows of their own,
and in compiled code."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from vtensor.integrations import _torch_flash
from vtensor.integrations import flash_attention as shims

import fake_flash
import vtensor
from attention_support import int32
from test_flash_attention import CAPACITY, GROUPS, HEADS, PACKAGES, SIZE, caches, exact, noise, refused, seen  # noqa: F401

HOLDS = 100


# --- plain tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", (*PACKAGES, "torch"))
def test_rows_of_vtensors(host, seen, backend):  # noqa: F811
    """Those of a query, the first where there are more; and those that are named."""
    k, v = caches(host, length=5)
    three, one = noise(3, 1, HEADS, SIZE), noise(1, 1, HEADS, SIZE)
    with refused(seen, "row 2", "2 rows"):
        shims.flash_attn_with_kvcache(three, k, v, cache_seqlens=5, backend=backend)
    if backend != "fa4":
        for new in ({}, {"k": one[:, :, :HEADS], "v": one[:, :, :HEADS]}):
            with refused(seen, "row 2", "2 rows"):
                shims.flash_attn_with_kvcache(
                    one, k, v, cache_seqlens=5, cache_batch_idx=int32(2), backend=backend, **new
                )
            assert k.length == v.length == 5
    out = shims.flash_attn_with_kvcache(one, k, v, cache_seqlens=5, backend=backend)
    assert (out[0].double() - exact(one[0], k[0], v[0], 5).double()).abs().max() < 0.02


def test_pages_are_not_rows(host, seen):  # noqa: F811
    """Of a paged cache, lengths go beyond a page."""
    grown = [vtensor.from_tensor(noise(8, 16, HEADS, SIZE), 1, 16, pool=host) for _ in "kv"]
    table = torch.zeros(1, 4, dtype=torch.int32)
    seen.before = lambda: (_ for _ in ()).throw(RuntimeError("launched"))
    for given in (grown, [t.clone() for t in grown]):
        with pytest.raises(RuntimeError, match="launched"):
            shims.flash_attn_with_kvcache(
                noise(1, 1, HEADS, SIZE), *given, cache_seqlens=int32(60), block_table=table, backend="fa2"
            )
        with pytest.raises(RuntimeError, match="launched"):
            starts = int32(0, 1), int32(0, 60), 1, 60
            shims.flash_attn_varlen_func(
                noise(1, HEADS, SIZE), *given, *starts, block_table=table, backend="fa2"
            )


# --- rows of their own lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", (*PACKAGES, "torch"))
def test_shorter_rows_append_where_there_is_room(host, seen, backend):  # noqa: F811
    """The tensors grow with the longest row, and not before it reaches their end."""
    k, v = caches(host, length=40, capacity=45)
    lengths = int32(12, 37)
    q, *new = (noise(2, 1, h, SIZE, seed=h) for h in (HEADS * GROUPS, HEADS, HEADS))
    for _ in range(8):
        out = shims.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lengths, backend=backend)
        for row, at in enumerate(lengths):
            assert torch.equal(k[row, at], new[0][row, 0]) and torch.equal(v[row, at], new[1][row, 0])
            want = exact(q[row], k[row], v[row], at + 1)
            assert (out[row].double() - want.double()).abs().max() < 0.02
        lengths += 1
        assert k.length == v.length == max(40, int(lengths[1]))
    with pytest.raises(vtensor.CapacityExceeded):
        shims.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lengths, backend=backend)
    assert k.length == v.length == 45


def test_lengths_of_a_device_grow_behind_the_longest_row(host, seen, monkeypatch):  # noqa: F811
    """The host does not look at them: as many positions as are appended."""
    k, v = caches(host, length=40)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    q = noise(2, 3, HEADS, SIZE)
    shims.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=int32(12, 37), backend="fa2")
    assert k.length == v.length == 43


@pytest.mark.parametrize("shared", ["both", "values"])
def test_an_append_parts_the_pages_that_it_writes_to(stream_pool, seen, shared):  # noqa: F811
    """I6: where a kernel's write cannot part shared pages, it would fault, or change the other tensor. What
    extend adds is its own anyway, but not what a shorter row is written behind."""
    pool = stream_pool()
    k, v = caches(pool, length=100)
    before = k.clone(), v.clone()
    forks = [k.fork() if shared == "both" else k, v.fork()]
    q = noise(2, 1, HEADS, SIZE, seed=3)
    shims.flash_attn_with_kvcache(q, *forks, q, q, cache_seqlens=int32(10, 100), backend="fa2")
    assert [t.length for t in forks] == [101, 101]
    assert torch.equal(v, before[1]) and (shared == "values" or torch.equal(k, before[0]))
    assert all(torch.equal(t[row, at], q[row, 0]) for t in forks for row, at in enumerate((10, 100)))
    # Where nothing is appended, nothing is unshared.
    forks.append(forks[1].fork())
    used = pool.stats().pages_used
    none = noise(2, 0, HEADS, SIZE)
    shims.flash_attn_with_kvcache(
        q, forks[0], forks[1], none, none, cache_seqlens=int32(10, 100), backend="fa2"
    )
    assert pool.stats().pages_used == used


# --- torch.compile ------------------------------------------------------------------------------------------


def both(function, *arguments):
    compiled = torch.compile(
        function, backend=(counter := CompileCounterWithBackend("eager")), fullgraph=True
    )
    torch._dynamo.reset()
    with torch.no_grad():
        for given in arguments:
            assert torch.equal(compiled(*given()), function(*given()))
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("error:.*lru_cache")
@pytest.mark.parametrize("queries", [1, 3])
def test_compiled_over_growing_views(host, queries):
    """One graph, found anew by no length."""
    k, v = caches(host, length=30, dtype=torch.float32)
    q = noise(2, queries, HEADS * GROUPS, SIZE, dtype=torch.float32)
    views = [(lambda n=n: (q, k[:, :n], v[:, :n])) for n in range(5, 30)]
    shims.look_again()
    both(lambda q, k, v: shims.flash_attn_func(q, k, v, causal=True), *views)
    both(lambda q, k, v: shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=k.shape[1]), *views)
    new = q[:, :, :HEADS]
    both(
        lambda q, k, v: shims.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=k.shape[1] - queries),
        *[(lambda n=n: (q, k[:, :n].clone(), v[:, :n].clone())) for n in range(5, 15)],
    )


def test_compiled_over_a_package(seen, monkeypatch):  # noqa: F811
    """One graph over many lengths; a layer of a KVCache passes as it is."""
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = lambda q, k, v, causal=False: q + v.sum(1, keepdim=True)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    shims.look_again()
    q = noise(1, 1, HEADS, SIZE)
    given = [(lambda n=n: (q, noise(1, n, HEADS, SIZE), noise(1, n, HEADS, SIZE))) for n in range(3, 9)]
    both(lambda q, k, v: shims.flash_attn_func(q, k, v, causal=True, backend="fa2"), *given)


def test_a_vtensor_is_for_what_is_around_the_graph(host):
    """Of torch's tracing it is no part: views of it are."""
    k, v = caches(host, length=5, heads_first=True, dtype=torch.float32)
    q = noise(2, 1, HEADS, SIZE, dtype=torch.float32)

    def attend(q, k, v):
        return shims.flash_attn_func(q + 0, k, v) + 0

    torch._dynamo.reset()
    with torch.no_grad():
        with pytest.raises(Exception, match="Observed exception"):
            torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(attend, backend="aot_eager")(q, k, v), attend(q, k, v))


# --- torch's own kernel -------------------------------------------------------------------------------------


class Op:
    """Stands for aten._flash_attention_forward: its arguments up to what torch 2.9 has."""

    def __init__(self):
        self.got = []

    def __call__(
        self, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    ):  # fmt: skip
        assert dropout_p == 0 and return_debug_mask is False and seqused_k is None and alibi_slopes is None
        window = window_size_left, window_size_right
        self.got.append((cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window, scale))
        options = {"scale": scale, "causal": is_causal, "window": window}
        if cum_seq_q is None:
            return fake_flash.rows(q, k, v, k.shape[1], **options), None, None, None, None
        return fake_flash.packed(q, k, v, cum_seq_q, cum_seq_k, **options), None, None, None, None


@pytest.mark.parametrize(
    ("causal", "window", "passed"),
    [
        (False, (-1, -1), (False, (-1, -1))),
        (True, (-1, -1), (True, (-1, 0))),
        (True, (7, 0), (False, (7, 0))),
        (True, (7, 3), (False, (7, 0))),
        (False, (None, 0), (True, (-1, 0))),
        (False, (3, 2), (False, (3, 2))),
    ],
)
def test_torchs_kernel_is_called_by_its_operator(monkeypatch, causal, window, passed):
    """With grouped heads, packed and not: the same attention as the reference's, by arguments that torch has
    had since 2.9, of the operator that is there."""
    op = Op()
    names = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    taken = ["query", "key", "value", *Op.__call__.__code__.co_varnames[4:15]]
    assert names[: len(taken)] == taken
    q, k, v = (noise(2, n, h, SIZE, seed=n, dtype=torch.float32) for n, h in ((5, 4), (9, 2), (9, 2)))
    starts = int32(0, 2, 5), int32(0, 4, 9)
    options = {"causal": causal, "window_size": window, "softmax_scale": 0.3, "backend": "torch"}
    packed = q[0], k[0], v[0], *starts, 3, 5
    want = shims.flash_attn_func(q, k, v, **options), shims.flash_attn_varlen_func(*packed, **options)
    monkeypatch.setattr(_torch_flash, "_has_flash", lambda q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", op)
    torch.testing.assert_close(shims.flash_attn_func(q, k, v, **options), want[0])
    torch.testing.assert_close(shims.flash_attn_varlen_func(*packed, **options), want[1])
    assert op.got == [(None, None, 5, 9, *passed, 0.3), (*starts, 3, 5, *passed, 0.3)]
