"""vtensor.attention.views: what kernels are given of VTensors, plain tensors and layers of a KVCache, and
that nothing is read or written that these do not have."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

import attention_support
import vtensor
from attention_support import int32
from support import on_a_device
from vtensor.attention import views

ROWS, HOLDS, HEADS, SIZE = 3, 7, 2, 16
TOKENS = [HOLDS, 0, 4]  # of a cache's slots


def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def refused(*given, says=(), error=vtensor.InvalidArgument, **options):
    with attention_support.refused(*says, error=error):
        views("attend", *given, **options)


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
    *given, cache = views("attend", *grown, False, lengths)
    assert cache is None
    for view, ours in zip(given, grown, strict=True):
        assert type(view) is torch.Tensor and view.shape == (ROWS, shown, HEADS, SIZE)
        assert view.data_ptr() == (ours.address if shown else 0)
    kept = [weakref.ref(view) for view in given]
    del given, view
    assert [ref() for ref in kept] == [None, None]


def test_other_objects_pass_as_they_are():
    """The kernel checks them."""
    k = zeros(2, 5, 8, 12).transpose(1, 3)
    others = (
        k,
        zeros(9),
        zeros(2, 2).to_sparse(),
        zeros(2, 2).to("meta"),
        None,
        "k",
        np.zeros(3),
        torch.Tensor,
    )
    for other in others:
        taken = views("attend", other, k, False, 99, 1, int32(77))
        assert taken[0] is other and taken[1] is k and taken[2] is None
    assert torch.vmap(lambda x: views("attend", x, x)[0])(zeros(2, 3)).shape == (2, 3)


def test_slots_by_their_rows(cache):
    k, v = cache[0]
    assert views("attend", k, v, False, int32(4, 7), 0, torch.tensor([2, 0]))[2] is cache
    refused(k, v, False, int32(4, 7), 0, int32(0, 2), says=["7 tokens of slot 2", "4 ready"])
    refused(k, v, False, int32(4, 7), 1, int32(2, 0), says=["5 tokens of slot 2"])
    assert views("attend", k, v, False, 7, rows=1)[2] is cache
    refused(k, v, False, 7, rows=2, says=["7 tokens of slot 1"])
    refused(k, v, False, 7, rows=zeros(2, 1, 4, SIZE), says=["7 tokens of slot 1"])
    for unknown in (0, zeros(2, 4, SIZE)):
        assert views("attend", k, v, rows=unknown)[2] is cache


@pytest.mark.parametrize("options", [{}, {"layer_group": 2}, {"layout": "HND"}], ids=str)
def test_views_know_their_slots_and_tokens(host, options):
    """By the first of them that is missing."""
    with vtensor.KVCache(2, HEADS, SIZE, ROWS, 64, torch.float32, pool=host, **options) as made:
        assert made.step([0] * ROWS)

        def missing(t, lengths=2):
            with pytest.raises(vtensor.InvalidArgument, match="of slot") as caught:
                views("attend", t, t, False, lengths)
            words = str(caught.value).split()
            return int(words[5]), int(words[1])  # slot, tokens

        for t in made[1]:
            t = t.transpose(1, 2) if "layout" in options else t
            assert missing(t) == (0, 2)
            assert missing(t[1:, 7:]) == (1, 9)
            assert missing(t[2:, 7::3]) == (2, 11)
            assert missing(t[2:3, :, 1:]) == (2, 2)
            assert missing(t[1, 4:], int32(0, 1, 2)) == (1, 6)  # the ends of packed sequences
            assert views("attend", t, t, False, 0)[2] is made
            for other in (t[:1, :5].clone(), t[[0, 2], :5]):
                assert views("attend", other, other)[2] is None


# --- what cannot be looked at -------------------------------------------------------------------------------


def test_what_only_a_device_knows_and_what_a_kernel_refuses_is_left_to_them(grown, cache):
    past = on_a_device(int32(99, 99, 99))
    for wrong in (past, 2.5, torch.tensor([2.5, 3, 9]), int32(99)[None], "five", torch.tensor(99)):
        for pair in (grown, cache[0]):
            assert views("attend", *pair, False, wrong)[0].shape == pair[0].shape
            length = 5 if wrong is past else 0
            assert views("attend", *pair, False, length, 0, wrong)[0].shape[0] == ROWS


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["grown", "cache"])
def test_rows_and_positions_that_there_are_not(request, of):
    k, v = request.getfixturevalue(of) if of == "grown" else request.getfixturevalue(of)[0]
    holds = k.shape[1]
    for lengths, added in ((holds + 1, 0), (holds, 1), (-1, 0), (1 << 70, 0), (-(1 << 70), 9)):
        refused(k, v, False, lengths, added, rows=1, says=[f"holds {holds}", "row 0"])
    refused(k, v, False, int32(0, holds + 1), says=[f"{holds + 1} positions of row 1"])
    refused(k, v, False, int32(0, holds), 1, says=["row 1", "1 written after"])
    for index in (int32(3), int32(-1), torch.tensor([1 << 40])):
        refused(k, v, False, 0, 0, index, says=[f"row {index.item()} ", "3 rows"])
    refused(k, v, False, 0, rows=4, says=["row 3 ", "3 rows"])
    refused(k, v, False, int32(0, 0, 0, 0), rows=0, says=["row 3 ", "3 rows"])


def test_views_of_a_layer_that_are_no_rows_of_tokens(cache):
    """Which slots and tokens such a kernel reads is not known."""
    k, v = (t[1] for t in cache[0])  # a slot without tokens
    for heads_first, view in ((True, k.transpose(0, 1)), (True, cache[0][0][None]), (False, k[0])):
        refused(view, view, heads_first, says=["no rows of tokens", "tokens, "])
        assert views("attend", view, view, heads_first, rows=0)[2] is cache
        assert views("attend", view[:0], view[:0], heads_first)[2] is cache


def test_one_of_two_vtensors_that_is_shorter(grown):
    refused(grown[0], grown[1].truncate(4), says=["K has 7", "V 4", "append to both"])


def test_a_closed_tensor(grown):
    grown[1].close()
    refused(*grown, says=["closed"], error=vtensor.Closed)


def test_a_cache_that_is_asleep(cache, host):
    host.sleep(contents="host")
    with pytest.raises(vtensor.Asleep):
        views("attend", *cache[0], False, 2)
    host.wake()
    assert views("attend", *cache[0], rows=0)[2] is cache


def test_a_slot_whose_prefix_is_still_to_be_mapped(pool_factory):
    pool = pool_factory("host", prefetch=1 << 16)
    with vtensor.KVCache(1, HEADS, SIZE, ROWS, 512, torch.float32, pool=pool, lookahead=16) as made:
        first, tokens = made.alloc(), list(range(256))
        made.step([256 if slot == first else 0 for slot in range(ROWS)])
        made.publish(first, tokens)
        slot = made.alloc(tokens, deferred=True)
        known = made.length(slot)
        k, v = (side[slot : slot + 1] for side in made[0])
        refused(k, v, False, known, says=[f"of slot {slot}", "0 ready"])
        made.wait(slot)
        assert known and views("attend", k, v, False, known)[2] is made


def test_a_cache_that_is_gone_but_for_its_core(host):
    """A thread may be inside one of its operations."""
    cache = vtensor.KVCache(1, HEADS, SIZE, ROWS, 4, torch.bfloat16, pool=host)
    kept, (k, v) = cache._core, cache[0]
    assert views("attend", k, v, False, 0)[2] is cache
    del cache
    refused(k, v, False, 0, says=["has been closed"], error=vtensor.Closed)
    kept.close()
