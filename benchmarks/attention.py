"""Attention over a ``VTensor`` and over a plain tensor of the same layout: there is nothing to pay.

Where memory lies decides some percent of such a time, so every trial allocates anew, and the control is a
second plain tensor, which has its own place in memory too.
"""

from __future__ import annotations

import random

import torch
from torch.nn.functional import scaled_dot_product_attention

import vtensor

from .harness import Bar, Figure, Settings, clock, count, interleave, quantile, slowdown, within_control

HEADS, HEAD_DIM = 8, 128


def run(settings: Settings) -> list[Figure]:
    length = settings.pick(8192, 256)
    medians: dict[str, list[float]] = {"vtensor": [], "plain": [], "control": []}
    differing = 0
    for trial in range(settings.pick(15, 2)):
        pairs = allocate(length, settings, trial)
        q = torch.randn(1, HEADS, 1, HEAD_DIM, device=settings.device)
        expected = scaled_dot_product_attention(q, *pairs["plain"])
        differing += int((scaled_dot_product_attention(q, *pairs["vtensor"]) != expected).sum())

        def sample(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor = q) -> float:
            return clock(lambda: scaled_dot_product_attention(q, k, v), settings.wait)

        samples = {name: lambda pair=pair: sample(*pair) for name, pair in pairs.items()}
        taken = interleave(samples, settings.pick(41, 3), warmup=2)
        for name, seconds in taken.items():
            medians[name].append(quantile(sorted(seconds), 0.5))
        for t in pairs["vtensor"]:
            t.close()
    ratios = [a / b for a, b in zip(medians["control"], medians["plain"], strict=True)]
    what, bar = f"SDPA over {length:,} tokens", within_control(ratios)
    return [
        slowdown.among(medians, what, "plain tensor", "vtensor", "plain", "control", bar),
        count("SDPA", "plain tensor", differing, "elements differ", Bar(0)),
    ]


def allocate(length: int, settings: Settings, trial: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V [1, heads, length, head_dim] three times, in an order that changes, with the same values."""
    device = settings.device
    values = [torch.randn(1, HEADS, length, HEAD_DIM, device=device) for _ in range(2)]

    def growing(x: torch.Tensor) -> torch.Tensor:
        return vtensor.from_tensor(x, grow_dim=2, capacity=length + 128)

    def plain(x: torch.Tensor) -> torch.Tensor:
        row = row_length(length + 128, settings)
        return torch.zeros(1, HEADS, row, HEAD_DIM, device=device)[:, :, :length].copy_(x)

    makers = {"vtensor": growing, "plain": plain, "control": plain}
    names = list(makers)
    random.Random(trial).shuffle(names)
    made = {name: (makers[name](values[0]), makers[name](values[1])) for name in names}
    assert made["plain"][0].stride() == made["vtensor"][0].stride()
    return made


def row_length(capacity: int, settings: Settings) -> int:
    """Positions from one head to the next in a VTensor with this capacity."""
    t = vtensor.empty(1, HEADS, 0, HEAD_DIM, grow_dim=2, capacity=capacity, device=settings.device)
    length = t.stride(1) // HEAD_DIM
    t.close()
    return length
