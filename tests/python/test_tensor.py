"""The public interface of VTensor: every constructor, method and property, on both drivers."""

from __future__ import annotations

import re

import pytest
import torch

import vtensor
from support import (
    PER_PAGE,
    calls,
    calls_since,
    filled,
    page_ids,
    quarter,
    ramp,
    same_bytes,
)

# All but those of quantized tensors and of single bits, which torch itself does not copy.
FOUND = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPES = [FOUND[name] for name in sorted(FOUND) if not re.match(r"torch\.(q|u?int[1-7]$)", name)]


# --- creation ---------------------------------------------------------------------------------------------


@pytest.mark.exact
def test_empty_is_a_torch_tensor_of_the_asked_shape(pool):
    t = vtensor.empty(2, 3, 5, 7, grow_dim=1, capacity=100, dtype=torch.float32, pool=pool)
    assert isinstance(t, torch.Tensor) and isinstance(t, vtensor.VTensor)
    assert t.shape == (2, 3, 5, 7) and t.dtype is torch.float32 and t.device.type == "cpu"
    assert (t.grow_dim, t.length, t.capacity, t.pool, t.closed) == (1, 3, 100, pool, False)
    assert t.address == t.data_ptr() != 0
    assert t.address % pool.page_size == 0
    assert t.nbytes_mapped == 2 * -(-3 * 5 * 7 * 4 // pool.page_size) * pool.page_size
    row_pages = -(-100 * 5 * 7 * 4 // pool.page_size)
    assert t.nbytes_reserved >= 2 * row_pages * pool.page_size
    assert not t.requires_grad


@pytest.mark.parametrize("sizes", [(4,), (4, 5), (2, 4, 5), (2, 3, 4, 5)])
def test_grow_dim_anywhere(pool, sizes):
    for dim in range(len(sizes)):
        for named in (dim, dim - len(sizes)):
            t = vtensor.zeros(*sizes, grow_dim=named, capacity=5000, dtype=torch.int32, pool=pool)
            assert t.grow_dim == dim
            more = list(sizes)
            more[dim] = 3
            first, second = ramp(t), ramp(torch.empty(more, dtype=torch.int32))
            t.copy_(first)
            t.append(second)
            assert same_bytes(t, torch.cat([first, second], dim))  # I2
            t.close()


def test_rows_are_reservations_of_whole_pages_side_by_side(pool):
    t = quarter(pool, 5, rows=(2, 3), capacity=9)
    row = 3 * pool.page_size  # 9 quarters fill three pages
    assert t.stride() == (3 * row, row, pool.page_size // PER_PAGE, 1)
    for i in range(2):
        for j in range(3):
            assert t[i, j].data_ptr() == t.address + (3 * i + j) * row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(pool, dtype):
    t = vtensor.empty(2, 3, 4, grow_dim=1, capacity=40, dtype=dtype, pool=pool)
    data = ramp(torch.empty(2, 9, 4, dtype=dtype))
    if dtype is torch.bool:
        data = data.view(torch.uint8).remainder(2).view(torch.bool)
    t.copy_(data[:, :3])
    t.append(data[:, 3:8])
    t.append(data[:, 8:9])
    assert t.dtype is dtype
    assert same_bytes(t, data)
    t.shrink(2, front=True)
    t.shrink(1)
    assert same_bytes(t, data[:, 2:8])
    other = t.reallocate(80).fork()
    assert same_bytes(other, data[:, 2:8])
    assert same_bytes(vtensor.from_tensor(data, grow_dim=1, capacity=9, pool=pool), data)


def test_empty_like_takes_all_but_the_contents(pool):
    t = filled(pool, 6, 3, rows=(2,), capacity=32, dtype=torch.float16)
    like = vtensor.empty_like(t)
    assert (like.shape, like.dtype, like.grow_dim, like.capacity, like.pool) == (
        t.shape,
        t.dtype,
        t.grow_dim,
        t.capacity,
        t.pool,
    )
    assert not like.any() and like.address != t.address
    assert vtensor.empty_like(t, capacity=50).capacity == 50


@pytest.mark.exact
def test_empty_like_in_another_pool(host, pool_factory):
    other = pool_factory("host", page_size=16384)
    t = filled(host, 6)
    like = vtensor.empty_like(t, pool=other)
    assert like.pool is other and like.shape == t.shape
    assert other.stats().pages_used == 1


def test_default_pool_is_one_per_device():
    t = vtensor.empty(3, 4, grow_dim=0, capacity=10)
    assert t.pool is vtensor.default_pool("cpu") is vtensor.default_pool("cpu")
    assert t.pool.page_size == 65536 and str(t.pool.device) == "cpu"


# --- growing ----------------------------------------------------------------------------------------------


def test_append_takes_any_strides(pool):
    t = vtensor.empty(2, 0, 6, grow_dim=1, capacity=100, dtype=torch.float32, pool=pool)
    x = torch.arange(2 * 5 * 6, dtype=torch.float32).reshape(2, 5, 6)
    sources = [
        x,
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        x[:, ::2],
        x[:, :1].expand(2, 4, 6),
        x.flip(1),
        torch.as_strided(x, (2, 4, 6), (6, 3, 1)),
    ]
    for source in sources:
        t.append(source)
    assert same_bytes(t, torch.cat(sources, 1))


def test_append_takes_conjugate_and_negative_views(pool):
    t = vtensor.empty(0, 6, grow_dim=0, capacity=100, dtype=torch.complex64, pool=pool)
    z = torch.randn(3, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    t.append(z.conj()).append(torch._neg_view(z))
    assert torch.equal(t, torch.cat([z.conj().resolve_conj(), -z]))
    imaginary = vtensor.empty(0, 6, grow_dim=0, capacity=100, dtype=torch.float32, pool=pool)
    imaginary.append(z.conj().imag)
    assert torch.equal(imaginary, -z.imag)


def test_append_takes_what_overlaps_the_tensor(pool):
    t = quarter(pool, 3)
    t.copy_(ramp(t))
    expected = t.clone()
    t.append(t)
    expected = torch.cat([expected, expected])
    assert same_bytes(t, expected)
    t.append(t[1:5])
    expected = torch.cat([expected, expected[1:5]])
    assert same_bytes(t, expected)
    t.append(t[2:3].expand(4, -1))
    assert same_bytes(t, torch.cat([expected, expected[2:3].expand(4, -1)]))


def test_append_of_a_source_that_requires_grad(pool):
    """Without a graph; with one it is refused."""
    t = vtensor.zeros(1, 4, grow_dim=0, capacity=100, pool=pool)
    with torch.no_grad():
        t.append(torch.ones(1, 4, requires_grad=True))
    assert t.length == 2 and t[1].eq(1).all() and not t.requires_grad


# --- moving ------------------------------------------------------------------------------------------------


@pytest.mark.exact
def test_front_shrinks_then_move_where_the_tensor_was_asked_to(pool):
    t = filled(pool, 8, 1, rows=(2,), capacity=10, when_full="move")
    expected = ramp(t)
    t.copy_(expected)
    t.shrink(5, front=True)
    t.extend(2)
    ids = set(page_ids(t))
    before = calls(pool)
    t.extend(5)  # 10 positions in all: the capacity, but not behind what the front used up
    assert t.length == 10 and t.capacity == 10
    assert same_bytes(t[:, :3], expected[:, 5:])  # I2
    assert ids <= set(page_ids(t)), "pages were copied"
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync")
    with pytest.raises(vtensor.CapacityExceeded):
        t.extend(1)
    assert t.length == 10


@pytest.mark.exact
def test_reallocate_keeps_the_pages(pool):
    t = quarter(pool, 10, rows=(2,), capacity=12)
    t.copy_(ramp(t))
    expected, ids, used = t.clone(), page_ids(t), pool.stats().pages_used
    before = calls(pool)
    bigger = t.reallocate(40)
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync") and not made.get("cuMemCreate")
    assert t.closed and not bigger.closed
    assert bigger.capacity == 40 and bigger.length == 10 and bigger.grow_dim == 1
    assert same_bytes(bigger, expected)  # I2
    assert page_ids(bigger) == ids and pool.stats().pages_used == used
    assert same_bytes(bigger.extend(30)[:, :10], expected)


# --- records and properties -------------------------------------------------------------------------------


@pytest.mark.exact
def test_pages_tells_of_each_mapped_page(pool):
    t = filled(pool, 9, rows=(2,), capacity=20)
    records = t.pages()
    row = t.stride(0)  # in bytes, as the elements are bytes
    assert [(r.row, r.index, r.address) for r in records] == [
        (i, j, t.address + i * row + j * pool.page_size) for i in range(2) for j in range(3)
    ]
    assert len({r.page_id for r in records}) == 6 and {r.shared for r in records} == {1}
    assert len({r.state for r in records}) == 1 and all(isinstance(r.state, str) for r in records)
    f = t.fork()
    assert {r.shared for r in f.pages()} == {r.shared for r in t.pages()} == {2}
    t.shrink(5, front=True)
    assert [r.index for r in t.pages()] == [1, 2, 1, 2]


@pytest.mark.exact
def test_reindex_copies_no_whole_page(pool):
    t = filled(pool, 8, rows=(4,), capacity=20)  # two whole pages a row
    ids = page_ids(t)
    before = calls(pool)
    t.reindex(torch.tensor([3, 2, 1, 0]))
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync")
    assert sorted(page_ids(t)) == sorted(ids) and page_ids(t) != ids
