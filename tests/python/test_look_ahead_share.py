"""What is mapped ahead of need is a share of what is stored, for each tensor and so for a pool (I4)."""

from __future__ import annotations

import torch

import vtensor
from support import eventually

PAGE = 4096
LEAST = 256  # pages: 1 MiB
SHARE = 16


def test_growth_as_fast_as_memory_allows(pool_factory):
    pool = pool_factory("host", 16384, prefetch=64 << 20)
    tensors = [
        vtensor.empty(0, PAGE, grow_dim=0, capacity=8192, dtype=torch.uint8, pool=pool) for _ in range(2)
    ]
    rows = torch.ones(64, PAGE, dtype=torch.uint8)
    most = 0
    for _ in range(100):
        for t in tensors:
            t.append(rows)
            assert t.nbytes_mapped // PAGE <= t.length + max(LEAST, t.length // SHARE)
        most = max(most, pool.stats().pages_prefetched)
    assert most > 0
    stored = sum(t.length for t in tensors)
    assert pool.stats().pages_prefetched <= max(2 * LEAST, stored // SHARE)


def test_a_large_tensor_gets_its_share(pool_factory):
    """More than the least: its growth is fast, and a sixteenth of it is."""
    pool = pool_factory("host", 40000, prefetch=64 << 20)
    t = vtensor.empty(0, PAGE, grow_dim=0, capacity=20000, dtype=torch.uint8, pool=pool)
    rows = torch.ones(2000, PAGE, dtype=torch.uint8)
    for _ in range(8):
        t.append(rows)
    eventually(lambda: pool.stats().pages_prefetched > LEAST)
    assert pool.stats().pages_prefetched <= t.length // SHARE
