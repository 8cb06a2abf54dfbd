"""For tests of attention: tensors of noise, and of lengths as kernels take them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import vtensor
from support import SHAPE_OF_A_MESSAGE


def noise(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same for the same seed; of other dtypes the float32 values, rounded."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@contextmanager
def refused(*says: object, error: type[Exception] = vtensor.InvalidArgument):
    """By a message of our shape that has all of ``says``."""
    with pytest.raises(error, match=SHAPE_OF_A_MESSAGE) as caught:
        yield caught
    for word in says:
        assert str(word) in str(caught.value), (word, str(caught.value))
