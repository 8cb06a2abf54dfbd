"""AttentionSpec: what kernels are given of VTensors, plain tensors and layers of a KVCache, and of what is
refused that which the shims' tests do not ask for."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

import vtensor
from attention_support import int32
from support import on_a_device
from test_bad_input import SHAPE_OF_A_MESSAGE
from vtensor.attention import AttentionSpec

ROWS, HOLDS, HEADS, SIZE = 3, 7, 2, 16
TOKENS = [HOLDS, 0, 4]  # of a cache's slots
DTYPES = torch.float16, torch.bfloat16
NAMES = "attend", "q", "k", "v"

SDPA = AttentionSpec(*NAMES, heads_first=True)
FLASH = AttentionSpec(*NAMES, package="FlashAttention", dtypes=DTYPES)
WITH_CACHE = AttentionSpec(*NAMES, same_rows=False, package="FlashAttention", dtypes=DTYPES)
PACKED = AttentionSpec(*NAMES, packed=True, package="FlashAttention", dtypes=DTYPES)


def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def refused(call, *given, says=(), error=vtensor.InvalidArgument):
    with pytest.raises(error, match=SHAPE_OF_A_MESSAGE) as caught:
        call(*given)
    assert all(word in str(caught.value) for word in says), caught.value


@pytest.fixture
def grown(host):
    """K and V ``[3, 7, 2, 16]`` that grow."""
    made = [vtensor.from_tensor(zeros(ROWS, HOLDS, HEADS, SIZE), 1, 12, pool=host) for _ in "kv"]
    yield made
    for t in made:
        t.close()


@pytest.fixture
def cache(host):
    with vtensor.KVCache(1, HEADS, SIZE, ROWS, 12, torch.bfloat16, pool=host) as made:
        for _ in TOKENS:
            made.alloc()
        assert made.step(TOKENS)
        yield made


# --- what is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "shown"), [(None, 7), (7, 7), (3, 3), (0, 0), (int32(1, 2, 7), 7)])
def test_views_of_vtensors_keep_nothing_alive(grown, lengths, shown):
    *views, cache = WITH_CACHE.take(zeros(ROWS, 1, 4, SIZE), *grown, lengths)
    assert cache is None
    for view, ours in zip(views, grown, strict=True):
        assert type(view) is torch.Tensor and view.shape == (ROWS, shown, HEADS, SIZE)
        assert view.data_ptr() == (ours.address if shown else 0)
    kept = [weakref.ref(view) for view in views]
    del view, views
    assert [ref() for ref in kept] == [None, None]


def test_positions_lie_where_the_kernel_has_them(grown):
    for spec, q in ((FLASH, zeros(ROWS, 1, 4, SIZE)), (SDPA, zeros(ROWS, 4, 1, SIZE))):
        keys, values, _ = spec.take(q, *grown)
        assert keys.data_ptr() == grown[0].address and keys.stride(-1) == 1
        sizes = (ROWS, HOLDS, HEADS, SIZE) if spec is FLASH else (ROWS, HEADS, HOLDS, SIZE)
        assert keys.shape == values.shape == sizes


def test_plain_tensors_pass_as_they_are():
    for dtype in DTYPES:
        k = zeros(2, 5, 8, 128, dtype=dtype)
        assert FLASH.take(zeros(2, 1, 32, 128, dtype=dtype), k, k) == (k, k, None)
    k, smaller = zeros(2, 8, 5, 64), zeros(2, 8, 5, 48)
    assert SDPA.take(zeros(2, 32, 1, 64), k, smaller)[1] is smaller
    packed = zeros(9, 8, 64)
    assert PACKED.take_packed(zeros(3, 8, 64), packed, packed, int32(0, 3), int32(0, 9))[0] is packed


@pytest.mark.parametrize(
    ("lengths", "shortest", "longest"), [(7, 7, 7), (3, 3, 3), (int32(1, 6, 4), 1, 6), (None, 0, 7)]
)
def test_the_room_that_a_write_needs(grown, lengths, shortest, longest):
    new = zeros(ROWS, 2, HEADS, SIZE)
    lengths = on_a_device(int32(9, 9, 9)) if lengths is None else lengths  # their values are not read
    needs = WITH_CACHE.room(zeros(ROWS, 1, 4, SIZE), *grown, lengths, None, None, new, new)
    assert needs == (HOLDS, shortest, longest, 2)


def test_either_may_be_of_a_cache(cache):
    """The cache then records the stream."""
    (k, v), q = cache[0], zeros(ROWS, 1, 4, SIZE)
    other = torch.zeros_like(k)
    for pair in ((k, v), (other, v), (k, other)):
        assert WITH_CACHE.take(q, *pair, 0)[2] is cache
    assert WITH_CACHE.take(q, other, other, 0)[2] is None
    refused(WITH_CACHE.take, q, other, v, 5, says=["5 tokens of slot 1", "0 ready"])


def test_slots_by_their_rows(cache):
    k, v = cache[0]
    q = zeros(2, 1, 4, SIZE)
    assert WITH_CACHE.take(q, k, v, int32(4, 7), torch.tensor([2, 0]))[2] is cache
    refused(WITH_CACHE.take, q, k, v, int32(4, 7), int32(0, 2), says=["7 tokens of slot 2", "4 ready"])
    new = zeros(2, 1, HEADS, SIZE)
    refused(WITH_CACHE.take, q, k, v, int32(4, 7), int32(2, 0), None, new, new, says=["5 tokens of slot 2"])


@pytest.mark.parametrize("options", [{}, {"layer_group": 2}, {"layout": "HND"}], ids=str)
def test_views_know_their_slots_and_tokens(host, options):
    """By the first of them that is missing."""
    heads_first = "layout" in options
    with vtensor.KVCache(2, HEADS, SIZE, ROWS, 64, torch.float32, pool=host, **options) as made:
        assert made.step([0] * ROWS)

        def missing(t, positions=2, packed=False):
            q = torch.zeros(len(t), 1, t.shape[-2], t.shape[-1])
            call, given = made_for_any.take, (q, t, t, positions)
            if packed:
                call, given = for_packed.take_packed, (q[:1, 0], t, t, None, int32(0, positions))
            with pytest.raises(vtensor.InvalidArgument, match="of slot") as caught:
                call(*given)
            words = str(caught.value).split()
            return int(words[5]), int(words[1])  # slot, tokens

        made_for_any = AttentionSpec(*NAMES, same_rows=False, grouped=True)
        for_packed = AttentionSpec(*NAMES, packed=True)
        for t in made[1]:
            t = t.transpose(1, 2) if heads_first else t
            assert missing(t) == (0, 2)
            assert missing(t[1:, 7:]) == (1, 9)
            assert missing(t[2:, 7::3]) == (2, 11)
            assert missing(t[2:3, :, 1:]) == (2, 2)
            assert missing(t[1, 4:], packed=True) == (1, 6)
            q = torch.zeros(ROWS, 1, HEADS, SIZE)
            assert made_for_any.take(q, t, t, 0)[2] is made
            # Other memory, and tokens of one slot as rows.
            for other in (t[:1, :5].clone(), t[[0, 2], :5], t[0][:, None]):
                assert made_for_any.take(q[: len(other)], other, other)[2] is None


# --- what cannot be looked at -------------------------------------------------------------------------------


def test_what_only_a_device_knows_is_left_to_it(grown, cache):
    q, past = zeros(ROWS, 1, 4, SIZE), on_a_device(int32(99, 99, 99))
    for pair in (grown, [t.detach().clone() for t in grown], cache[0]):
        assert WITH_CACHE.take(q, *pair, past)[0].shape == pair[0].shape
        refused(WITH_CACHE.take, q, *pair, past[:2], says=["[2] of torch.int32", "q is [3, 1, 4, 16]"])


def test_tensors_without_memory_tell_nothing(grown):
    """As those that a tracer makes: what is in them is not looked at."""
    k, q, lengths = grown[0].clone(), zeros(ROWS, 1, 4, SIZE), int32(99, 99, 99)
    lengths.untyped_storage().resize_(0)
    assert WITH_CACHE.take(q, k, k, lengths)[0] is k
    assert PACKED.take_packed(q[0], k[0], k[0], lengths, lengths)[2] is None


def test_wrappers_and_tensors_of_no_memory_are_checked_by_attributes():
    q = zeros(1, 4, 3, SIZE, dtype=torch.float32)
    for other in (q[:, :2], torch.empty_like(q[:, :2], device="meta")):
        same = q.to(other.device)
        assert SDPA.take(same, other, other)[0] is other
        refused(SDPA.take, same[:, :3], other, other, says=["3 heads, k 2"])
    refused(SDPA.take, q, q.to("meta"), q, says=["q is on cpu, k on meta, v on cpu"])
    refused(SDPA.take, q, q.to_sparse(), q, says=["k is [1, 4, 3, 16] of torch.float32", "strided"])
    torch.vmap(lambda x: SDPA.take(x, x, x)[0])(torch.stack([q, q]))
    with pytest.raises(vtensor.InvalidArgument, match="head size of 8"):
        torch.vmap(lambda x: SDPA.take(x, x[..., :8], x)[0])(torch.stack([q, q]))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [None, 3, np.zeros((1, 2, 3, 16)), "tensor", torch.Tensor], ids=type)
def test_what_is_no_tensor(other):
    q = zeros(1, 3, 2, SIZE)
    for at, name in enumerate("qkv"):
        given = [q, q, q]
        given[at] = other
        refused(FLASH.take, *given, says=[f"{name} is a {type(other).__name__}", "strided tensor"])


def test_one_of_them_grows(grown):
    k, v = grown
    q, new = zeros(ROWS, 1, 4, SIZE), zeros(ROWS, 1, HEADS, SIZE)
    refused(WITH_CACHE.take, q, k, v[...], says=["one of k and v is a plain tensor"])
    refused(WITH_CACHE.room, q, k[...], v[...], 7, None, None, new, new, says=["k is no VTensor"])
    rows = [vtensor.from_tensor(t, 0, 8, pool=k.pool) for t in (k[...], v[...])]
    refused(WITH_CACHE.room, q, *rows, 3, None, None, new, new, says=["grows along its positions"])
    for t in rows:
        t.close()
        refused(FLASH.take, q, t, t, says=["closed"], error=vtensor.Closed)


def test_as_many_new_positions_of_both(grown):
    q, one, two = zeros(ROWS, 1, 4, SIZE), zeros(ROWS, 1, HEADS, SIZE), zeros(ROWS, 2, HEADS, SIZE)
    plain = [t.clone() for t in grown]
    for call, held in ((WITH_CACHE.room, grown), (WITH_CACHE.take, plain)):
        for new in ((one, two), (two, one), (one, None), (None, one)):
            refused(call, q, *held, 3, None, None, *new, says=["k", "v", "as many new positions of both"])
        refused(call, q, *held, 3, None, None, one, "new", says=["v is a str"])


def test_heads_that_fit_none():
    alike = AttentionSpec(*NAMES, heads_first=True, grouped=False)
    q, k, none = zeros(1, 4, 3, SIZE), zeros(1, 2, 3, SIZE), zeros(1, 0, 3, SIZE)
    refused(alike.take, q, k, k, says=["4 heads, k 2", "enable_gqa=True"])
    refused(SDPA.take, q, none, none, says=["4 heads, k 0"])
    refused(SDPA.take, zeros(1, 4, 3, SIZE).float(), k, k, says=["q is torch.float32, k torch.bfloat16"])


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 5, 9])
def test_other_dimensions(rank):
    q, other = zeros(1, 3, 2, SIZE), zeros(*[1] * rank)
    for at, name in enumerate("qkv"):
        given = [q, q, q]
        given[at] = other
        refused(FLASH.take, *given, says=[f"{name} is {list(other.shape)}", "head size]"])
    if rank != 3:
        refused(PACKED.take_packed, q[0], other, q[0], says=["k has rows", "k[0]"])
        refused(PACKED.take_packed, other, q[0], q[0], says=[f"q is {list(other.shape)}", "[tokens, heads"])


def test_lengths_past_64_bits(grown):
    q = zeros(ROWS, 1, 4, SIZE)
    refused(WITH_CACHE.take, q, *grown, 1 << 70, says=[f"cache_seqlens is {1 << 70}", "holds 7"])


def test_a_cache_that_is_gone_but_for_its_core(host):
    """A thread may be inside one of its operations."""
    cache = vtensor.KVCache(1, HEADS, SIZE, ROWS, 4, torch.bfloat16, pool=host)
    kept, (k, v) = cache._core, cache[0]
    q = zeros(ROWS, 1, 4, SIZE)
    assert WITH_CACHE.take(q, k, v, 0)[2] is cache
    del cache
    refused(WITH_CACHE.take, q, k, v, 0, says=["has been closed"], error=vtensor.Closed)
    kept.close()
