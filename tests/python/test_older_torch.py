"""Releases of torch without DLPack's C exchange API (before 2.10): tensors are read by attributes."""

from __future__ import annotations

import pytest
import torch

import vtensor
from vtensor import _core, testing


@pytest.fixture(autouse=True)
def without_exchange_api():
    _core.use_exchange_api(False)
    yield
    _core.use_exchange_api(True)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_lives_as_with_it(dtype):
    pool = vtensor.Pool("cpu", page_size=4096)
    x = torch.randint(0, 2, (2, 700, 3)).to(dtype)
    t = vtensor.empty(2, 0, 3, grow_dim=1, capacity=4000, dtype=dtype, pool=pool)
    t.append(x).append(x.transpose(0, 1).contiguous().transpose(0, 1)).shrink(50, front=True)
    forked = t.fork().append(x[:, :1])
    t.reindex([1, 0])
    testing.check_invariants(pool)
    expected = torch.cat([x, x], 1)[:, 50:]
    assert torch.equal(_bytes(t), _bytes(expected[[1, 0]]))
    assert torch.equal(_bytes(forked), _bytes(torch.cat([expected, x[:, :1]], 1)))
    t.close(), forked.close(), pool.close()


def _bytes(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def test_a_change_from_outside_is_noticed():
    t = vtensor.empty(8, grow_dim=0, capacity=100)
    torch.Tensor.set_(t, torch.zeros(8))
    with pytest.raises(vtensor.VTensorError, match="put back"):
        t.extend(1)
    assert t.extend(1).length == 9
    t.close()


def test_a_source_that_is_not_strided_is_refused():
    t = vtensor.empty(0, 4, grow_dim=0, capacity=100)
    with pytest.raises(vtensor.InvalidArgument, match="not strided"):
        t.append(torch.ones(2, 4).to_sparse())
    t.close()
