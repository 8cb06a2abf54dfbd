"""A decode step with growth, without a model: one token is added to K and V, then attention reads them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import vtensor

from .harness import Figure, Settings, clock, interleave, slowdown

HEADS, HEAD_DIM = 8, 128
TOKEN_BLOCK = 16

Pair = tuple[torch.Tensor, torch.Tensor]
Grow = Callable[[torch.Tensor, torch.Tensor], Pair]  # adds K and V [1, heads, 1, head_dim] and returns all


def run(settings: Settings) -> list[Figure]:
    start, steps = settings.pick(8192, 256), settings.pick(300, 5)
    device = settings.device
    prefix = torch.randn(2, 1, HEADS, start, HEAD_DIM, device=device)
    q, k, v = (torch.randn(1, HEADS, 1, HEAD_DIM, device=device) for _ in range(3))

    made = {"vtensor": growing, "preallocated": preallocated, "control": preallocated}
    made |= {"cat": concatenated, "paged": paged}
    ways = {name: make(prefix, start + steps + 1) for name, make in made.items()}

    def sample(grow: Grow) -> float:
        return clock(lambda: scaled_dot_product_attention(q, *grow(k, v)), settings.wait)

    taken = interleave({name: lambda grow=grow: sample(grow) for name, grow in ways.items()}, steps)
    what = f"append and SDPA at {start:,} tokens"
    return [
        slowdown.among(taken, what, "preallocated, the limit", "vtensor", "preallocated", "control"),
        slowdown.among(taken, what, "torch.cat", "vtensor", "cat"),
        slowdown.among(taken, what, "paged, gathered each step", "vtensor", "paged"),
    ]


def growing(prefix: torch.Tensor, capacity: int) -> Grow:
    keys, values = (vtensor.from_tensor(x, grow_dim=2, capacity=capacity) for x in prefix)

    def grow(k: torch.Tensor, v: torch.Tensor) -> Pair:
        return keys.append(k), values.append(v)

    return grow


def preallocated(prefix: torch.Tensor, capacity: int) -> Grow:
    keys, values = (prefix.new_zeros(1, HEADS, capacity, HEAD_DIM) for _ in range(2))
    length = prefix.shape[3]
    keys[:, :, :length] = prefix[0]
    values[:, :, :length] = prefix[1]

    def grow(k: torch.Tensor, v: torch.Tensor) -> Pair:
        nonlocal length
        keys.narrow(2, length, 1).copy_(k)
        values.narrow(2, length, 1).copy_(v)
        length += 1
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    return grow


def concatenated(prefix: torch.Tensor, capacity: int) -> Grow:
    keys, values = prefix[0].clone(), prefix[1].clone()

    def grow(k: torch.Tensor, v: torch.Tensor) -> Pair:
        nonlocal keys, values
        keys = torch.cat((keys, k), dim=2)
        values = torch.cat((values, v), dim=2)
        return keys, values

    return grow


def paged(prefix: torch.Tensor, capacity: int) -> Grow:
    """Token blocks anywhere in one allocation; gathered, where no kernel reads through a table."""
    blocks = -(-capacity // TOKEN_BLOCK)
    table = torch.randperm(blocks, device=prefix.device)
    pools = [prefix.new_zeros(HEADS, blocks, TOKEN_BLOCK, HEAD_DIM) for _ in prefix]
    length = prefix.shape[3]
    for pool, tokens in zip(pools, prefix, strict=True):
        pool[:, table[: length // TOKEN_BLOCK]] = tokens[0].unflatten(1, (-1, TOKEN_BLOCK))

    def grow(k: torch.Tensor, v: torch.Tensor) -> Pair:
        nonlocal length
        block, place = table[length // TOKEN_BLOCK], length % TOKEN_BLOCK
        length += 1
        used = table[: -(-length // TOKEN_BLOCK)]
        for pool, token in zip(pools, (k, v), strict=True):
            pool[:, block, place] = token[0, :, 0]
        keys, values = (
            pool.index_select(1, used).view(1, HEADS, -1, HEAD_DIM)[:, :, :length] for pool in pools
        )
        return keys, values

    return grow
