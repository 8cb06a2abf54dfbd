"""The whole reservation as one plain tensor: what is mapped, what is zero, and how long it is safe."""

from __future__ import annotations

import pytest
import torch
from vtensor.integrations import full_extent
from vtensor.integrations.full_extent import FullExtent

import vtensor
from interrupts import at_every_bytecode
from support import SHAPE_OF_A_MESSAGE

PER_PAGE = 32  # positions of [., ., 2, 16] in float32 to a page


def growing(pool, length=0, capacity=1024, rows=2):
    return vtensor.empty(rows, length, 2, 16, grow_dim=1, capacity=capacity, pool=pool)


def test_it_has_the_shape_of_the_capacity_and_shows_what_is_appended(host):
    t = growing(host, capacity=1000)
    full = FullExtent(t)
    assert type(full.tensor) is torch.Tensor and full.tensor.shape == (2, 1000, 2, 16)
    assert full.tensor.stride() == t.stride() and full.tensor.data_ptr() == t.address
    for n in (1, 200, 7):
        t.append(torch.randn(2, n, 2, 16))
        full.cover(t.length)
        assert torch.equal(full.tensor[:, : t.length], t)
    full.tensor[1, 5] = 3
    assert bool((t[1, 5] == 3).all())


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("tail", [0, 256])
def test_whole_tiles_are_mapped_and_zero_behind_the_length(pool_factory, length, tail):
    pool = pool_factory("host", pages=200)
    t = growing(pool)
    t.extend(700).fill_(float("nan"))
    t.truncate(length)
    t.fill_(1)
    full = FullExtent(t).cover(length, tail)
    stop = -(-(length + tail) // 128) * 128
    mapped = {(record.row, record.index) for record in t.pages()}
    assert {(row, page) for row in range(2) for page in range(stop // PER_PAGE)} <= mapped
    assert full.tensor[:, :stop].isfinite().all()
    assert not full.tensor[:, length:stop].any() and bool((full.tensor[:, :length] == 1).all())
    assert t.length == length


def test_cover_costs_driver_calls_only_where_a_tile_begins(host):
    t = growing(host, 1, rows=1)
    full = FullExtent(t).cover(1)
    before = sum(host.stats().driver_calls["caller"].values())
    for _ in range(127):
        t.extend(1)
        full.cover(t.length)
    assert sum(host.stats().driver_calls["caller"].values()) == before


def test_what_was_truncated_inside_a_covered_tile_is_zeroed(host):
    t = growing(host, 100)
    full = FullExtent(t).cover(100)
    t.fill_(float("nan"))
    t.truncate(60)
    t.fill_(1)
    full.cover(60)
    assert full.tensor[:, :128].isfinite().all() and t.length == 60


def test_an_interrupted_cover_leaves_the_length(host):  # I17
    t = growing(host, 5)
    full = FullExtent(t)

    def check(_, outcome):
        assert t.length == 5
        assert not full.cover(300).tensor[:, 5:384].any()

    assert at_every_bytecode(lambda: full.cover(1), lambda _: full.cover(300), check, within=full_extent) > 9


def test_pages_behind_a_shorter_length_go_back(host):  # I4
    t = growing(host, 0, rows=1)
    full = FullExtent(t)
    full.cover(t.extend(600).length)
    t.truncate(1)
    full.cover(1)
    assert host.stats().pages_mapped == 128 // PER_PAGE


def test_no_other_tensor_ever_shows_in_it(host):  # I3, I7
    t = growing(host, 5).fill_(7)
    tensor = FullExtent(t).cover(5).tensor  # which alone has to keep the addresses
    address = t.address
    t.close()
    others = [growing(host, 5).fill_(9) for _ in range(4)]
    assert all(other.address != address for other in others)
    assert not (tensor == 9).any()
    del tensor


def test_no_room_for_a_tile_changes_nothing(pool_factory):  # I8
    pool = pool_factory("host", pages=10)
    t = growing(pool, 120, rows=2)
    full = FullExtent(t)
    taken = vtensor.empty(2 * 4096, grow_dim=0, capacity=2 * 4096, dtype=torch.uint8, pool=pool)
    t.extend(8)
    with pytest.raises(vtensor.OutOfPages):
        full.cover(t.length, tail=256)
    assert t.length == 128
    full.cover(128)
    taken.close()


def test_lengths_above_the_capacity(host):
    t = growing(host, 5, capacity=200)
    full = FullExtent(t)
    with pytest.raises(vtensor.CapacityExceeded, match=SHAPE_OF_A_MESSAGE):
        full.cover(201)
    assert not full.cover(190, tail=256).tensor[:, 5:].any()  # up to the capacity, where the tensor ends


def test_a_tensor_that_moved_or_ended(host):
    t = growing(host, 5)
    full = FullExtent(t)
    t.shrink(1, front=True)
    with pytest.raises(vtensor.InvalidArgument, match="moved"):
        full.cover(4)
    t.close()
    with pytest.raises(vtensor.Closed, match=SHAPE_OF_A_MESSAGE):
        full.cover(4)
    with pytest.raises(vtensor.InvalidArgument, match="the VTensor itself"):
        FullExtent(torch.zeros(3))
    with pytest.raises(vtensor.InvalidArgument, match="capacity is 0"):
        FullExtent(vtensor.empty(1, 0, 8, grow_dim=1, capacity=0, pool=host))
