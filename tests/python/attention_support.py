"""For tests of attention: tensors of noise, and of lengths as kernels take them."""

from __future__ import annotations

import torch


def noise(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same for the same seed; of other dtypes the float32 values, rounded."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
