"""What is known at a glance to suit a kernel is nothing that the checks in Python refuse."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vtensor.integrations import flash_attention as flash
from vtensor.integrations._kv import check_groups, check_pair, check_rank, check_rows

import vtensor
from vtensor.demands import Demands, suit

ALIKE, GROUPED = Demands(4, 1, grouped=False), Demands(4, 1)
FLASH = Demands(4, 2, aligned=True)


@pytest.fixture
def pair(host):
    """K and V ``[1, 5, 2, 16]`` that grow."""
    made = [vtensor.from_tensor(noise(1, 5, 2, 16), grow_dim=1, capacity=8, pool=host) for _ in "kv"]
    yield made
    for t in made:
        t.close()


@pytest.mark.parametrize(("positions", "seen"), [(None, 5), (5, 5), (3, 3), (0, 0)])
def test_plain_views_of_what_suits(pair, positions, seen):
    *views, cache = FLASH.plain(noise(1, 1, 4, 16), *pair, positions)
    assert cache is None
    for view, ours in zip(views, pair, strict=True):
        assert type(view) is torch.Tensor and view.shape == (1, seen, 2, 16)
        assert view.data_ptr() == (ours.address if seen else 0)
    kept = [weakref.ref(view) for view in views]
    del view, views
    assert [ref() for ref in kept] == [None, None]


def test_no_views_of_what_may_not_suit(pair, host):
    k, v = pair
    q = noise(1, 1, 4, 16)
    closed, longer = (
        vtensor.from_tensor(noise(1, 6, 2, 16), grow_dim=1, capacity=8, pool=host) for _ in "cl"
    )
    closed.close()
    heads_first = vtensor.from_tensor(noise(1, 5, 2, 16), grow_dim=2, capacity=32, pool=host)
    for name, wrong in {
        "one of them plain": (q, k, v[:]),
        "another number of sequences": (noise(2, 1, 4, 16), k, v),
        "none": (q, None, v),
        "closed": (q, closed, closed),
        "of another length": (q, k, longer),
        "growing along its heads": (q, heads_first, heads_first),
        "another dtype": (q.float(), k, v),
        "no tensor": ("q", k, v),
    }.items():
        assert FLASH.plain(*wrong) is None, name
    assert FLASH.plain(q, k, v, 6) is None
    for t in (longer, heads_first):
        t.close()


def refused(check, *arguments, **options) -> bool:
    try:
        check(*arguments, **options)
    except vtensor.InvalidArgument:
        return True
    return False


def noise(*sizes: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Query, key and value, of which each may differ from what would fit, and in strides and address."""
    common = [draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 3], [1, 2, 6], [4, 8, 16, 256])]
    common_dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    made = []
    for _ in "qkv":
        sizes, dtype = list(common), common_dtype
        for dim in draw(st.lists(st.integers(0, 3), max_size=2)):
            sizes[dim] = draw(st.sampled_from([0, 1, 2, 3, 8, 264]))
        if draw(st.integers(0, 9)) == 0:
            dtype = draw(
                st.sampled_from([torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64])
            )
        if draw(st.integers(0, 9)) == 0:
            sizes.pop()
        padding, start = draw(st.sampled_from([(0, 0), (0, 0), (8, 0), (1, 0), (8, 1)]))
        padded = noise(*sizes[:-1], sizes[-1] + padding, dtype=dtype)
        t = padded[..., start : start + sizes[-1]]
        if len(sizes) == 4 and draw(st.booleans()):
            t = t.transpose(1, 2).contiguous().transpose(1, 2)
        made.append(t.transpose(-1, -2) if draw(st.integers(0, 19)) == 0 else t)
    return made


@given(qkv=tensors(), grouped=st.booleans())
@settings(max_examples=600, deadline=None)
def test_nothing_that_suits_is_refused(qkv, grouped):
    q, k, v = qkv

    def heads_first() -> None:
        for t in qkv:
            check_rank("test", "t", t, 4, "")
        check_pair("test", q, k, v, heads_dim=1)
        check_rows("test", q, k)
        check_groups("test", q, k, grouped)

    assert suit(GROUPED if grouped else ALIKE, q, k, v) == (not refused(heads_first))

    def as_flash() -> None:
        for t in qkv:
            check_rank("test", "t", t, 4, "")
        check_rows("test", q, k)
        check_pair("test", q, k, v, heads_dim=2)
        flash._check_layout(kernel, "k", k)
        flash._check_layout(kernel, "v", v)

    kernel = flash._Kernel("", "test", flash._PACKAGES["fa3"], print, {}, True, FLASH)
    assert not suit(FLASH, q, k, v) or not refused(as_flash)


def test_what_models_use_suits():
    for dtype in (torch.bfloat16, torch.float16):
        k = vtensor.empty(2, 5, 8, 128, grow_dim=1, capacity=9, dtype=dtype)
        assert suit(FLASH, noise(2, 1, 32, 128, dtype=dtype), k, k.snapshot())
    heads_first = noise(2, 8, 5, 64, dtype=torch.float32)
    assert suit(GROUPED, noise(2, 32, 1, 64, dtype=torch.float32), heads_first, heads_first[..., :48])
    assert suit(
        Demands(3, 1, same_rows=False, aligned=True), noise(3, 8, 64), noise(9, 8, 64), noise(9, 8, 64)
    )


def test_demands_that_cannot_be_meant():
    for rank, heads_dim in ((4, -2), (4, 4), (0, 0), (4, 0), (4, 3), (3, 2), (2, 0), (5, 2)):
        with pytest.raises(vtensor.InvalidArgument, match="heads_dim is"):
            Demands(rank, heads_dim)


@pytest.mark.parametrize("other", [None, 3, np.zeros((1, 2, 3, 16)), "tensor", torch.Tensor], ids=type)
def test_what_is_no_tensor_does_not_suit(other):
    q = noise(1, 2, 3, 16)
    for qkv in ((other, q, q), (q, other, q), (q, q, other)):
        assert not suit(GROUPED, *qkv)


def test_what_dlpack_cannot_describe_does_not_suit():
    q = noise(1, 2, 3, 16, dtype=torch.float32)
    for other in (q.to_sparse(), torch.empty_like(q, device="meta")):
        assert not suit(GROUPED, q, other, other)
    seen = []
    torch.vmap(lambda x: seen.append(suit(GROUPED, x, x, x)) or x)(noise(2, 1, 2, 3, 16, dtype=torch.float32))
    assert seen == [False]
