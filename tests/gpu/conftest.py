"""Pools on a real GPU; every test here is skipped, with the reason, where there is none."""

from __future__ import annotations

import gc

import pytest
import torch

import vtensor
from vtensor import testing


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: torch.cuda.is_available() is false")
    torch.cuda.init()


@pytest.fixture
def pool(gpu):
    """256 pages of 2 MiB; at the end empty (I14), sound (I5) and closed."""
    pool = vtensor.Pool("cuda", page_size=2 << 20, budget=512 << 20)
    yield pool
    gc.collect()
    torch.cuda.synchronize()
    testing.check_invariants(pool)
    stats = pool.stats()
    pool.close()
    assert (stats.pages_used, stats.pages_mapped, stats.pages_quarantined) == (0, 0, 0)


@pytest.fixture
def driver():
    """cuda-bindings, NVIDIA's own view of what we asked the driver for."""
    return pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
