"""For tests of attention: tensors of noise, and of lengths as kernels take them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import vtensor
from support import SHAPE_OF_A_MESSAGE

HEADS, SIZE = 2, 16


def noise(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same for the same seed; of other dtypes the float32 values, rounded."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(pool, rows=2, length=0, *, heads_first=False, capacity=512, dtype=torch.float32, seed=1):
    """K and V [rows, length, HEADS, SIZE], or with a row for each head."""
    made = []
    for at in range(2):
        sizes = (rows, HEADS, 0, SIZE) if heads_first else (rows, 0, HEADS, SIZE)
        t = vtensor.empty(*sizes, grow_dim=2 if heads_first else 1, capacity=capacity, dtype=dtype, pool=pool)
        values = noise(rows, length, HEADS, SIZE, seed=seed + at, dtype=dtype)
        made.append(t.append(values.transpose(1, 2) if heads_first else values))
    return made


def plain_like(t, positions):
    """A plain tensor [rows, positions, HEADS, SIZE] of t's strides with t's values, NaN behind them."""
    view = t[...] if t.grow_dim == 1 else t[...].transpose(1, 2)
    whole = torch.empty_strided((len(t), positions, HEADS, SIZE), view.stride(), dtype=t.dtype)
    whole.fill_(float("nan"))[:, : t.length] = view
    return whole


def exact(q, k, v, mask=None, change=None):
    """In float64, over [B, H, S, D] and changed scores; `mask` broadcasts to [B, Hq, Sq, Sk], True where seen
    or a float to add."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if change is not None:
        scores = change(scores)
    if mask is not None:
        seen = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask
        scores = scores + seen.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@contextmanager
def refused(*says: object, error: type[Exception] = vtensor.InvalidArgument):
    """By a message of our shape that has all of ``says``."""
    with pytest.raises(error, match=SHAPE_OF_A_MESSAGE) as caught:
        yield caught
    for word in says:
        assert str(word) in str(caught.value), (word, str(caught.value))
