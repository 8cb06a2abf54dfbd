"""For tests of KVCache: caches of small pages, and K and V that say whose they are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

import vtensor

PAGE = 4096
# Shapes that differ in how rows lie: 16 tokens fill a page, or 8, or a token takes more than a page.
SHAPES: dict[str, dict] = {
    "layers": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
    "sliced": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 16, "layer_group": 4},
    "uneven groups": {"num_layers": 3, "num_kv_heads": 1, "head_dim": 32, "layer_group": 2},
    "heads": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "layout": "head", "layer_group": 2},
    "latent": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 36, "value_head_dim": 0},
    "two sizes": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 96, "value_head_dim": 32},
    "fat tokens": {"num_layers": 4, "num_kv_heads": 4, "head_dim": 96, "layer_group": 4},
    "tiles": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "tile": 12},
    "windows": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 32, "windows": [None, 20, 33, 20]},
}
MAX_BATCH, MAX_LEN = 6, 120


def make_cache(pool, shape: str = "layers", **options) -> vtensor.KVCache:
    options = {"tile": 1, **SHAPES[shape], "max_batch": MAX_BATCH, "max_len": MAX_LEN, **options}
    return vtensor.KVCache(**options, dtype=torch.float32, pool=pool)


def marks(values: Sequence[int], layer: int, of_v: bool) -> torch.Tensor:
    """What a layer's K or V holds for tokens of these values: exact in float32."""
    here = torch.tensor(values, dtype=torch.float64) * 16 + 2 * layer + of_v
    return here.to(torch.float32)


def rows_of(cache: vtensor.KVCache, tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """``[max_len, heads, head_dim]`` of a slot, in either layout."""
    rows = tensor[slot]
    return rows.transpose(0, 1) if rows.shape[0] != cache.max_len else rows


def write(cache: vtensor.KVCache, slot: int, start: int, values: Sequence[int]) -> None:
    """Marks tokens from ``start`` on, in every layer, as a kernel would."""
    for layer in range(len(cache)):
        for of_v, tensor in enumerate(cache[layer]):
            if tensor is not None:
                part = rows_of(cache, tensor, slot)[start : start + len(values)]
                part.copy_(marks(values, layer, bool(of_v))[:, None, None].expand_as(part))


def check_contents(
    cache: vtensor.KVCache, slot: int, values: Sequence[int], windows: Sequence[int | None] | None = None
) -> None:
    """Each token holds its mark, in every layer that sees it."""
    for layer in range(len(cache)):
        window = windows[layer] if windows else None
        first = 0 if window is None else max(0, len(values) - window)
        for of_v, tensor in enumerate(cache[layer]):
            if tensor is None:
                continue
            seen = rows_of(cache, tensor, slot)[first : len(values)]
            wanted = marks(values[first:], layer, bool(of_v))[:, None, None].expand_as(seen)
            assert torch.equal(seen, wanted), (slot, layer, "v" if of_v else "k")


def grown(cache: vtensor.KVCache, slot: int, length: int) -> bool:
    lengths = cache.lengths
    lengths[slot] = length
    return cache.step(lengths)


def value_of(salt: str, tokens: Sequence[int]) -> int:
    """What the last of these tokens computes: the same for whoever begins with them."""
    return zlib.crc32(repr((salt, list(tokens))).encode()) & 0xFFFFF
