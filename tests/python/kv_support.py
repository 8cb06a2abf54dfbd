"""For tests of KVCache: caches of small pages."""

from __future__ import annotations

import torch

import vtensor
from vtensor.testing.kv_model import write

PAGE = 4096
UNIT = 16  # tokens to a page of "layers"
RANGES = 4  # rows of a slot of "layers"
# Shapes that differ in how rows lie: 16 tokens fill a page, or 8, or a token takes more than a page.
SHAPES: dict[str, dict] = {
    "layers": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
    "sliced": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 16, "layer_group": 4},
    "uneven groups": {"num_layers": 3, "num_kv_heads": 1, "head_dim": 32, "layer_group": 2},
    "heads": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "layout": "HND", "layer_group": 2},
    "latent": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 36, "value_head_dim": 0},
    "two sizes": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 96, "value_head_dim": 32},
    "fat tokens": {"num_layers": 4, "num_kv_heads": 4, "head_dim": 96, "layer_group": 4},
    "tiles": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "tile": 12},
    "windows": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 32, "windows": [None, 20, 33, 20]},
}
MAX_BATCH, MAX_LEN = 6, 120


def options_of(shape: str, **options) -> dict:
    """What a KVCache of this shape takes, besides dtype and pool."""
    return {"tile": 1, **SHAPES[shape], "max_batch": MAX_BATCH, "max_len": MAX_LEN, **options}


def make_cache(pool, shape: str = "layers", **options) -> vtensor.KVCache:
    return vtensor.KVCache(**options_of(shape, **options), dtype=torch.float32, pool=pool)


def lengths_with(cache: vtensor.KVCache, slot: int, length: int) -> list[int]:
    """Those of the cache's slots, with another of one slot."""
    lengths = cache.lengths
    lengths[slot] = length
    return lengths


def grown(cache: vtensor.KVCache, slot: int, length: int) -> bool:
    return cache.step(lengths_with(cache, slot, length))


def filled(cache: vtensor.KVCache, length: int) -> int:
    """A slot with so many tokens."""
    slot = cache.alloc()
    assert grown(cache, slot, length)
    write(cache, slot, 0, range(length))
    return slot


def lacks_host_memory(monkeypatch, nth: int) -> None:
    """Has the ``nth`` tensor that torch is asked for refused, on the host, until ``monkeypatch.undo()``."""
    real, sizes = torch.empty, []

    def empty(size, **options):
        sizes.append(size)
        if len(sizes) == nth:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(size, **options)

    monkeypatch.setattr("torch.empty", empty)


def used(cache: vtensor.KVCache) -> int:
    """Pages of its pool in use."""
    return cache.pool.stats().pages_used
